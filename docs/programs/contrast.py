"""Contrastive learning with a momentum encoder and a queue of keys, as in MoCo."""

import torch
import torch.nn.functional as F
from hvdtrain import training
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

QUEUE = 512


def encoder() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def view(x: Tensor) -> Tensor:
    return x + 0.2 * torch.randn_like(x)


def main():
    flags = training.parser("contrast", __doc__, epochs=4, batch_size=32).parse_args()
    with training.start(flags) as run:
        x = run.to_device(torch.randn(2_000, 16))
        net = encoder()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        model, optimizer = run.prepare(net, optimizer)
        slow = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.99))
        queue = nn.Module()
        queue.register_buffer("keys", F.normalize(torch.randn(QUEUE, 8), dim=1).to(run.device))
        run.register(slow=slow, queue=queue)
        for epoch in run.epochs(flags.epochs):
            for step in run.steps(x):
                fresh = []
                for (batch,) in step.batches():
                    queries = F.normalize(model(view(batch)), dim=1)
                    with torch.no_grad():
                        keys = F.normalize(slow(view(batch)), dim=1)
                    logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.keys.T], 1) / 0.1
                    loss = F.cross_entropy(logits, torch.zeros(len(batch), dtype=torch.int64, device=run.device))
                    step.backward(loss)
                    fresh.append(run.gather(keys))
                step.update()
                slow.update_parameters(net)
                queue.keys = torch.cat([*fresh, queue.keys])[:QUEUE]
    return run.exit_code


if __name__ == "__main__":
    training.main(main)
