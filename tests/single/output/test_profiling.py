"""--profile: which steps are in the file, and what is said of a run that is too short."""

import json
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from hvdtrain.features.profile import Profile
from hvdtrain.loop.feature import Features
from hvdtrain.output.clock import Clock
from hvdtrain.output.run_output import RunOutput
from tests.single.unwritable import no_room


def train(profile: Profile, steps: range, *, products: int = 1, failed: bool = False) -> None:
    """Call the feature as a run does."""
    features = Features([profile])
    profile.prepare(SimpleNamespace(clock=Clock(), features=features))
    for number in steps:
        for _ in range(products):
            torch.ones(2) @ torch.ones(2)
        for after_step in features.after_step:
            after_step(SimpleNamespace(number=number))
    for feature in features.all:
        feature.close(failed=failed)


@pytest.mark.parametrize(
    ("trained", "recorded", "said"),
    [
        (9, 2, "profile: steps 106 to 107, a file per rank: {out}/profile (open one at ui.perfetto.dev)"),
        (6, 1, "profile: only 1 of 2 steps: the run is over (--profile 2 begins after 5 steps)"),
        (4, 0, "profile: only 0 of 2 steps: the run is over (--profile 2 begins after 5 steps)"),
        (None, 0, ""),
    ],
    ids=["whole", "cut", "short", "failed"],
)
def test_steps_are_recorded_after_five(trained, recorded, said, engine, tmp_path, capsys):
    flags, alive = Namespace(profile=2, output_dir=tmp_path), []
    output = RunOutput(engine, tmp_path, progress=False)

    profile = Profile(engine, flags, output, lambda: alive.append(True))
    train(profile, range(101, 101 + (trained or 6)), failed=trained is None)
    assert said.format(out=tmp_path) in capsys.readouterr().out
    path = tmp_path / "profile" / "rank-0.json"
    assert path.exists() == bool(recorded)
    if recorded:
        names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
        assert names.count("aten::dot") == recorded
        assert alive


@pytest.mark.parametrize("most", [1000, 40_000])
def test_without_room_an_earlier_profile_stays_and_no_file_is_said_to_be_there(most, engine, tmp_path, capfd):
    """torch's library tells nobody."""
    path = tmp_path / "profile" / "rank-0.json"
    path.parent.mkdir()
    path.write_text("of an earlier run")
    profile = Profile(engine, Namespace(profile=1, output_dir=tmp_path), RunOutput(engine, tmp_path, progress=False))
    with no_room(most):
        train(profile, range(8), products=100)
    said = capfd.readouterr()
    assert "open one at" not in said.out
    assert f"warning: rank 0 has no profile (no room for {path}, with " in said.err
    assert path.read_text() == "of an earlier run"
    assert list(path.parent.iterdir()) == [path]
