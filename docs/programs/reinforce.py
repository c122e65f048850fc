"""Learn by REINFORCE to walk to the origin: an epoch is so many episodes, played by the current policy."""

import torch
from hvdtrain import training
from torch import Tensor, nn

EPISODES, LENGTH = 2_048, 12
MOVES = torch.tensor([[-0.5, 0.0], [0.5, 0.0], [0.0, -0.5], [0.0, 0.5]])


def episodes(policy: nn.Module, count: int) -> tuple[Tensor, Tensor]:
    """Return the log-probability of the moves and the return of each episode, [count]."""
    at, chosen = 3 * torch.randn(count, 2), torch.zeros(count)
    for _ in range(LENGTH):
        moves = torch.distributions.Categorical(logits=policy(at))
        move = moves.sample()
        chosen = chosen + moves.log_prob(move)
        at = at + MOVES[move]
    return chosen, -at.norm(dim=1)


def main():
    flags = training.parser("reinforce", __doc__, epochs=4, batch_size=64).parse_args()
    with training.start(flags) as run:
        policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 4))
        optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
        policy, optimizer = run.prepare(policy, optimizer)
        for epoch in run.epochs(flags.epochs):
            for step in run.steps(EPISODES):
                for batch in step.batches():
                    chosen, returns = episodes(policy, len(batch.indices))
                    loss = -(chosen * (returns - returns.mean())).mean()
                    step.backward(loss)
                    step.record(reward=returns)
                step.update()
    return run.exit_code


if __name__ == "__main__":
    training.main(main)
