"""Learn by REINFORCE to walk to the origin: an epoch is so many episodes, played by the current policy."""

import argparse

import torch
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    flags = parser.parse_args()
    torch.manual_seed(1)
    policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    for epoch in range(flags.epochs):
        for _ in range(EPISODES // flags.batch_size):
            optimizer.zero_grad()
            chosen, returns = episodes(policy, flags.batch_size)
            loss = -(chosen * (returns - returns.mean())).mean()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}  return {returns.mean():.4f}")


if __name__ == "__main__":
    main()
