"""One run over changing numbers of ranks, killed in between, compared with one that kept the first number and its peace."""

import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from hvdtrain.checkpoint import checkpoint, reading
from tests.chaos.lineage import all_struck, attacked, results, seconds_lost, tally
from tests.chaos.outcomes import Outcome

GLOBAL_BATCH = 64
# Batch norm sees each rank's own samples, whose number changes with the ranks; without it only the order of sums does.
FLAGS = "--model convnet-nonorm --step-timeout 5"
TOLERANCE = 1e-3  # relative, of the loss and of each weight


def schedule(ranks: Sequence[int], scratch: Path, chance: random.Random) -> Outcome:
    """Start on ranks[0], kill a rank, go on with ranks[1], and so on; the last part trains to the end."""
    batch = -(-GLOBAL_BATCH // ranks[0])
    apart, together = scratch / "apart", scratch / "together"
    label = " -> ".join(map(str, ranks)) + " ranks, mpirun, killed in between"
    left, detected, faults, deaths = 0, [], [], []
    for place, size in enumerate(ranks):
        last = place == len(ranks) - 1
        # Every third step has a checkpoint. If the kill came before the first is complete, the next part would begin anew.
        attack = dict(rank=chance.randrange(size), point=chance.choice(("backward", "update")), count=chance.choice((4, 5)),
                      kind="kill", saved=True)  # fmt: skip
        try:
            done = attacked(apart, ranks=size, batch=batch, flags=FLAGS, attack=None if last else attack)
        except AssertionError as error:
            return Outcome("ranks changed", label, False, False, note=f"hang: {str(error)[:60]}")
        left += done.left_behind
        struck = all_struck(apart)
        if (done.code == 0) != last or bool(struck) == last:
            return Outcome(
                "ranks changed", label, False, False, leftovers=left, note=f"part {place + 1}: {str(done)[-300:]}"
            )
        if struck:
            deaths.append(attack["rank"])
            faults += struck
            detected.append(time.time() - struck[0].time)
    whole = attacked(together, ranks=ranks[0], batch=batch, flags=FLAGS)
    assert whole.code == 0, whole
    lost, repeated = tally(apart)
    unlike = differences(apart, together)
    return Outcome(
        "ranks changed", label, True, not unlike, lost, repeated, max(detected, default=None),
        seconds_lost(apart, faults), left, f"killed: ranks {deaths}; {'; '.join(unlike)}",
    )  # fmt: skip


def differences(apart: Path, together: Path) -> list[str]:
    """Return in what two runs differ beyond float tolerance."""
    mine, theirs = results(apart), results(together)
    unlike = [
        f"{name}: {mine[name]}, {theirs[name]}" for name in ("samples", "steps", "epochs") if mine[name] != theirs[name]
    ]
    if abs(mine["test_loss"] - theirs["test_loss"]) > TOLERANCE * theirs["test_loss"]:
        unlike.append(f"test_loss: {mine['test_loss']}, {theirs['test_loss']}")
    if (
        abs(mine["test_accuracy"] - theirs["test_accuracy"]) > 1.5 / 382
    ):  # one sample on the border may fall to either side
        unlike.append(f"test_accuracy: {mine['test_accuracy']}, {theirs['test_accuracy']}")
    weights = [reading.read(checkpoint.listed(path / "checkpoints")[0])[1] for path in (apart, together)]
    unlike += [
        f"{name}: up to {(weights[0][name] - weights[1][name]).abs().max():.1e} apart"
        for name in weights[1]
        if name.startswith("model.")
        and not torch.allclose(weights[0][name], weights[1][name], rtol=TOLERANCE, atol=1e-5)
    ]
    return unlike
