"""Damages of checkpoints: each kind can be drawn for a checkpoint of today, and is rejected."""

import dataclasses
import random
from collections import Counter

import torch

from hvdtrain.checkpoint import checkpoint
from hvdtrain.loop.state import TrainState
from tests.chaos.damages import HEADERS, KINDS, damages
from tests.facts import sound_facts


def test_every_damage_is_rejected_and_the_checkpoint_before_is_taken(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for step in (4, 8):
        facts = sound_facts(state=dataclasses.asdict(TrainState(step=step, samples=64 * step)))
        tensors = {"model.weight": torch.full((64, 3), float(step)), "model.bias": torch.arange(3)}
        checkpoint.write(tmp_path / "checkpoints" / checkpoint.name_of(step), facts, tensors)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    outcomes = list(damages(tmp_path, scratch, 300, random.Random(1)))
    assert [str(outcome) for outcome in outcomes if not outcome.good] == []
    drawn = Counter(outcome.attack.removeprefix("checkpoint damaged: ") for outcome in outcomes)
    assert set(drawn) == {kind for kind in KINDS if kind != "header"} | {f"header: {kind}" for kind in HEADERS}
