"""The checkpoint's format: what is written comes back, and what was damaged never does.

Any damage, and headers that lie: tests/single/test_bad_files.py.
"""

import errno
import json
import math
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors
import torch

from hvdtrain.checkpoint import checkpoint, contents, verify
from hvdtrain.checkpoint import writer as writers
from hvdtrain.checkpoint.writer import LEAST_SECONDS, MOST_BACKOFF, CheckpointInterval
from hvdtrain.engines import atomic, files
from hvdtrain.engines.errors import Failure, UserError
from hvdtrain.engines.lock import Lock
from hvdtrain.engines.portable import bytes_of
from hvdtrain.features import replicas
from hvdtrain.guards.judge import HangTimeouts
from hvdtrain.models import weights
from hvdtrain.output import metric_names
from tests.facts import sound_facts
from tests.single.training.small import Trained

TENSORS = {
    "model.weight": torch.arange(12, dtype=torch.float32).view(3, 4) / 7,
    "model.half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "model.steps": torch.tensor(7),
    "optimizer.0.exp_avg": torch.zeros(3, 4),
    "buffers": torch.rand(2, 5, generator=torch.Generator().manual_seed(1)),
    "model.empty": torch.zeros(0),
}
FACTS = sound_facts(config={"lr": 0.1, "name": "ä"})


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / checkpoint.name_of(12)
    checkpoint.write_checkpoint(path, FACTS, TENSORS)
    return path.read_bytes()


def refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(checkpoint.Damaged) as caught:
        checkpoint.read_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_what_is_written_comes_back(tmp_path):
    path = tmp_path / "new" / checkpoint.name_of(12)
    checkpoint.write_checkpoint(path, FACTS, TENSORS)
    facts, tensors = checkpoint.read_checkpoint(path)
    assert facts == FACTS
    assert set(tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


TYPES = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "complex64"]
TYPES += ["int64", "int32", "int16", "uint16", "uint8", "bool"]


def test_tensors_are_written_as_safetensors_reads_them(tmp_path):
    """Each begins at a multiple of its element's size, so that it can be mapped into memory."""
    types = [kind for name in TYPES if contents.is_stored(kind := getattr(torch, name))]
    tensors = {f"{kind} [{n}]": torch.arange(n).to(kind) for kind in types for n in (0, 1, 3)}
    tensors |= {
        '\u00e9 "{': torch.tensor(2.5),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "none": torch.ones(2, 0),
    }
    tensors["conjugate"] = torch.tensor([1 + 2j]).conj()
    with (tmp_path / "x").open("wb") as file:
        weights.write_tensors(file, tensors, {"facts": "{}"})
    with safetensors.safe_open(tmp_path / "x", framework="pt") as file:
        assert file.metadata() == {"facts": "{}"}
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            read = file.get_tensor(name)
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(bytes_of(read), bytes_of(tensor))
    content = (tmp_path / "x").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    first = len(content) - max(place["data_offsets"][1] for name, place in header.items() if name != "__metadata__")
    assert all((first + header[name]["data_offsets"][0]) % one.element_size() == 0 for name, one in tensors.items())


def test_tensors_are_written_from_the_memory_that_they_are_in():
    """A copy would take the memory of another checkpoint, and hold the lock of the interpreter: training would stop."""
    written = []
    tensors = {"a": torch.ones(1000), "b": torch.ones(10, 10, dtype=torch.float64)}
    weights.write_tensors(
        SimpleNamespace(write=lambda part: written.append(torch.frombuffer(part, dtype=torch.uint8))), tensors
    )
    assert {part.data_ptr() for part in written[1:]} == {tensor.data_ptr() for tensor in tensors.values()}


def test_every_truncation_is_refused(sound, tmp_path):
    for length in range(len(sound)):
        refused(tmp_path / "cut", sound[:length])


def test_every_flipped_bit_of_every_byte_is_refused(sound, tmp_path):
    for place in range(len(sound)):
        damaged = bytearray(sound)
        damaged[place] ^= 1 << (place % 8)
        refused(tmp_path / "flipped", bytes(damaged))


def test_one_without_a_checksum_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file(TENSORS, tmp_path / "x", {"facts": json.dumps(FACTS)})
    with pytest.raises(checkpoint.Damaged):
        checkpoint.read_checkpoint(tmp_path / "x")


@pytest.mark.parametrize(
    "facts", [FACTS | {"format": checkpoint.CHECKPOINT_FORMAT + 1}, ["not an object"]], ids=["later", "list"]
)
def test_a_checkpoint_of_another_version_is_refused_and_stays_where_it_is(facts, tmp_path):
    path = tmp_path / checkpoint.name_of(12)
    checkpoint.write_checkpoint(path, facts, TENSORS)
    with pytest.raises(UserError, match=f"{path}: another version of hvdtrain wrote this checkpoint: use that one"):
        checkpoint.newest(tmp_path, print)
    assert path.exists()


def test_a_pickle_is_refused_and_not_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    torch.save({"model": Trap()}, tmp_path / "trap")
    with pytest.raises(checkpoint.Damaged):
        checkpoint.read_checkpoint(tmp_path / "trap")
    assert not (tmp_path / "ran").exists()


def write_some(directory: Path, steps, value=lambda step: None, direction="max") -> None:
    for step in steps:
        best = None if value(step) is None else {"metric": "x", "direction": direction, "value": value(step)}
        facts = {**FACTS, "state": {**FACTS["state"], "step": step}, "best": best}
        checkpoint.write_checkpoint(directory / checkpoint.name_of(step), facts, TENSORS)


def test_newest_falls_back_to_the_newest_sound_one_and_says_so(tmp_path):
    write_some(tmp_path, (5, 100, 20, 99_999_999, 100_000_000))  # by number, not as text
    for step, data in ((100_000_000, b""), (99_999_999, (tmp_path / checkpoint.name_of(100)).read_bytes()[:-1])):
        (tmp_path / checkpoint.name_of(step)).write_bytes(data)
    said: list[str] = []
    found = checkpoint.newest(tmp_path, said.append)
    assert found is not None
    assert found[0]["state"]["step"] == 100
    assert len(said) == 2
    assert f"{checkpoint.name_of(100_000_000)} is damaged" in said[0]
    assert (tmp_path / (checkpoint.name_of(100_000_000) + ".damaged")).exists()  # nothing is thrown away
    assert checkpoint.newest(tmp_path / "nowhere", said.append) is None


def test_of_a_run_that_goes_on_meanwhile_the_newest_is_taken(tmp_path, monkeypatch):
    """An older one was, the best, where the newest had been removed after it was listed."""
    write_some(tmp_path, (5, 20))
    lists = iter([[tmp_path / checkpoint.name_of(step) for step in (10, 5)]])
    listed = checkpoint.checkpoints_in
    monkeypatch.setattr(checkpoint, "checkpoints_in", lambda directory: next(lists, None) or listed(directory))
    said: list[str] = []
    found = checkpoint.newest(tmp_path, said.append, keep_names=True)
    assert (found and found[0]["state"]["step"], said) == (20, [])


def test_a_copy_under_the_name_of_a_later_step_is_not_the_newest_for_ever(tmp_path):
    write_some(tmp_path, (5, 6))
    later = tmp_path / checkpoint.name_of(99)
    later.write_bytes((tmp_path / checkpoint.name_of(5)).read_bytes())
    said: list[str] = []
    found = checkpoint.newest(tmp_path, said.append)
    assert found is not None
    assert found[0]["state"]["step"] == 6
    assert said == [
        f"checkpoint {later} is damaged (it is a copy of step-00000005.safetensors): kept as {later.name}.damaged; "
        "trying the previous one"
    ]


@pytest.mark.parametrize("keep_names", [False, True])
def test_one_that_was_renamed_gets_its_name_back(keep_names, tmp_path):
    write_some(tmp_path, (6, 7))
    later = (tmp_path / checkpoint.name_of(6)).rename(tmp_path / checkpoint.name_of(99))
    said: list[str] = []
    found = checkpoint.newest(tmp_path, said.append, keep_names=keep_names)
    assert found is not None
    assert found[0]["state"]["step"] == (6 if keep_names else 7)
    assert later.exists() == keep_names
    assert (tmp_path / checkpoint.name_of(6)).exists() != keep_names
    told = f"checkpoint {later} is of another step: renamed to step-00000006.safetensors"
    assert said == ([] if keep_names else [told])


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Cannot allocate memory (os error 12)"),
        RuntimeError("unable to mmap 200000256 bytes from file <x>: Cannot allocate memory (12)"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: not enough memory: you tried to"),
    ],
    ids=["safetensors", "mmap", "torch"],
)
def test_a_lack_of_memory_is_not_a_damage(error, tmp_path, monkeypatch):
    """Sound checkpoints were renamed, and with memory again the training began at its beginning."""
    write_some(tmp_path, (5, 6))
    before = sorted(tmp_path.iterdir())

    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr("safetensors.safe_open", fail)
    with pytest.raises(Failure, match=r"step-00000006.safetensors cannot be read: not enough memory: free some, or"):
        checkpoint.newest(tmp_path, print)
    with pytest.raises(OSError, match="Cannot allocate memory"):  # the best one might be removed
        writers.prune(tmp_path, 1)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("of", ["the directory", "the files"])
def test_where_none_can_be_read_for_now_nothing_is_changed(code, of, tmp_path, monkeypatch):
    """Training started from the beginning, and moved them aside."""
    write_some(tmp_path, (5, 6))
    before = sorted(tmp_path.iterdir())

    def fail(*arguments, **options):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "listdir") if of == "the directory" else (Path, "open")), fail)
        with pytest.raises(Failure, match=rf"no checkpoint in {tmp_path} can be read \({os.strerror(code)}\): nothing"):
            checkpoint.newest(tmp_path, print)
    assert sorted(tmp_path.iterdir()) == before


def test_what_cannot_be_read_for_now_is_not_removed(tmp_path, monkeypatch):
    """The best one was: without its facts, it is one of many."""
    write_some(tmp_path, range(1, 6), lambda step: float(step == 1))
    real = Path.open

    def fail(path, *mode):
        if path.name == checkpoint.name_of(1):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *mode)

    monkeypatch.setattr(Path, "open", fail)
    writer = writers.Writer(tmp_path, 1, lambda path, error: None)
    writer.put({**FACTS, "state": {"epoch": 1, "step": 6}}, TENSORS)
    writer.flush()
    assert writer.failed is None
    assert len(checkpoint.checkpoints_in(tmp_path)) == 6


def test_a_run_reads_the_header_of_each_earlier_checkpoint_once_and_of_its_own_never(tmp_path, monkeypatch):
    """It read all of them again after each checkpoint, over the network where --output-dir is."""
    write_some(tmp_path, (1, 2, 3), lambda step: float(step == 2))
    read, real = [], checkpoint.read_facts
    monkeypatch.setattr(checkpoint, "read_facts", lambda path: (read.append(path.name), real(path))[1])
    writer = writers.Writer(tmp_path, 2, lambda path, error: None)
    for step, value in ((4, 0.5), (5, 2.0), (6, 0.1), (7, 0.1), (8, 0.1)):
        best = {"metric": "x", "direction": "max", "value": value}
        writer.put({**FACTS, "state": {**FACTS["state"], "step": step}, "best": best}, TENSORS)
        writer.flush()
    assert sorted(read) == [checkpoint.name_of(step) for step in (1, 2, 3)]
    assert [path.name for path in checkpoint.checkpoints_in(tmp_path)] == [
        checkpoint.name_of(step) for step in (8, 7, 5)
    ]


def test_many_kept_checkpoints_cost_few_calls_each(tmp_path):
    """With --keep 500, a checkpoint took twice as long as with three."""
    known = {checkpoint.name_of(step): {"best": {"direction": "max", "value": step % 7}} for step in range(300)}
    for name in known:
        (tmp_path / name).touch()
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(event) if event == "call" else None)
    try:
        left = writers.prune(tmp_path, 298, known)
    finally:
        sys.setprofile(None)
    assert len(left) == len(list(tmp_path.iterdir())) == 298
    assert len(calls) < 8 * 300


@pytest.mark.parametrize("value", [None, "x", [1], float("nan"), 10**400])
def test_a_value_that_is_no_number_is_not_the_best(value):
    assert metric_names.goodness({"best": {"value": value, "direction": "max"}}) == -math.inf
    assert metric_names.goodness({"best": {"value": 1, "direction": "min"}}) == -1.0


@pytest.mark.parametrize(("direction", "sign"), [("max", 1), ("min", -1)])
def test_prune_keeps_the_newest_and_the_best(direction, sign, tmp_path):
    values = {2: 0.9 * sign, 3: 0.8 * sign, 5: float("nan")}
    write_some(tmp_path, range(1, 8), lambda step: values.get(step, 0.1 * sign), direction)
    writers.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint.name_of(step) for step in (2, 6, 7)]


@pytest.mark.parametrize(
    ("automatic", "keep", "left"),
    [
        ({3, 5, 6, 7}, 2, [2, 4, 6, 7]),  # the two newest that were asked for, and two spare ones
        ({1, 2, 3, 4, 5, 6}, 3, [6, 7]),
        ({6, 7}, 1, [5, 7]),
        (set(), 1, [7]),
    ],
)
def test_automatic_checkpoints_do_not_displace_others(automatic, keep, left, tmp_path):
    for step in range(1, 8):
        checkpoint.write_checkpoint(
            tmp_path / checkpoint.name_of(step), {**FACTS, "automatic": step in automatic}, TENSORS
        )
        writers.prune(tmp_path, keep)
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint.name_of(step) for step in left]


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace", "directory"])
def test_a_failing_system_call_leaves_the_last_good_one_alone(call, tmp_path, monkeypatch):
    path = tmp_path / checkpoint.name_of(1)
    checkpoint.write_checkpoint(path, FACTS, TENSORS)
    before = path.read_bytes()

    def fail(*args, **kwargs):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, data):
            self.file.write(data[: len(data) // 2])
            fail()

    real_open = os.fdopen
    if call == "open":
        monkeypatch.setattr(files, "open_regular", fail)
    elif call == "write":
        monkeypatch.setattr(os, "fdopen", lambda handle, mode: Full(real_open(handle, mode)))
    elif call == "directory":
        monkeypatch.setattr(atomic, "sync_directory", fail)
    else:
        monkeypatch.setattr(*{"fsync": (os, "fsync"), "replace": (Path, "replace")}[call], fail)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        checkpoint.write_checkpoint(path, {**FACTS, "at": 2}, TENSORS)
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]  # no half a file left
    checkpoint.read_checkpoint(path)
    assert call == "directory" or path.read_bytes() == before


def test_writer_goes_on_after_a_failure_and_says_it(tmp_path):
    told: list[tuple[str, object]] = []
    directory = tmp_path / "file" / "checkpoints"
    writer = writers.Writer(directory, 2, lambda path, error: told.append((path.name, error and error.errno)))
    (tmp_path / "file").write_text("in the way")
    writer.put({**FACTS, "state": {"step": 1}}, TENSORS)
    writer.flush()
    assert isinstance(writer.failed, OSError)
    (tmp_path / "file").unlink()
    for step in (2, 3, 4):
        writer.put({**FACTS, "state": {"step": step}}, TENSORS)
        writer.flush()
    assert writer.failed is None
    assert [name for name, _ in told] == [checkpoint.name_of(step) for step in (1, 2, 3, 4)]
    assert [error is None for _, error in told] == [False, True, True, True]
    assert [path.name for path in checkpoint.checkpoints_in(directory)] == [
        checkpoint.name_of(4),
        checkpoint.name_of(3),
    ]


def test_a_snapshot_waits_until_the_one_before_is_written_unless_that_takes_longer_than_a_step(tmp_path, monkeypatch):
    """Steps of milliseconds replaced each snapshot that waited: a run that was killed lost several, or began anew."""
    steps: list[int] = []
    goes_on, write = threading.Event(), checkpoint.write_checkpoint
    monkeypatch.setattr(checkpoint, "write_checkpoint", lambda *what: (time.sleep(0.02), write(*what)))

    def writer(patience):
        return writers.Writer(tmp_path, 9, lambda path, _: steps.append(int(path.stem[5:])), patience=patience)

    patient, hurried = writer(60.0), writer(1e-3)
    for step in range(1, 6):
        assert steps[: step - 2] == list(range(1, step - 1))
        patient.put({**FACTS, "state": {"step": step}}, TENSORS)
    patient.flush()
    monkeypatch.setattr(checkpoint, "write_checkpoint", lambda *what: (goes_on.wait(60), write(*what)))
    for step in range(6, 60):
        hurried.put({**FACTS, "state": {"step": step}}, TENSORS)
    goes_on.set()
    hurried.flush()
    assert steps[:5] == [1, 2, 3, 4, 5]
    assert len(steps) <= 7
    assert steps[-1] == 59


def test_a_snapshot_is_taken_when_the_one_before_is_on_the_disk(tmp_path, monkeypatch):
    """Else there are two, each as large as model and optimizer."""
    snapshot, write, writing = contents.snapshot, checkpoint.write_checkpoint, []

    def slow(*arguments):
        writing.append(True)
        time.sleep(0.05)
        write(*arguments)
        writing.clear()

    def taken(*arguments):
        assert not writing
        return snapshot(*arguments)

    monkeypatch.setattr(checkpoint, "write_checkpoint", slow)
    monkeypatch.setattr(contents, "snapshot", taken)
    Trained("--checkpoint-steps", "1", out=tmp_path)


@pytest.mark.parametrize(("owner", "name"), [(checkpoint, "checkpoint_digest"), (Path, "mkdir"), (os, "fsync")])
def test_a_directory_moved_while_a_checkpoint_is_written_gets_nothing(owner, name, tmp_path, monkeypatch):
    out, real, moved = tmp_path / "out", getattr(owner, name), []
    out.mkdir()
    lock = Lock(out, 0)

    def move(*arguments: object, **options: object) -> object:
        if not moved:
            moved.append(out.rename(tmp_path / "elsewhere"))
            os.makedirs(out / "checkpoints")  # noqa: PTH103 (Path.mkdir is replaced)
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, move)
    with pytest.raises(OSError, match=r"out was moved while this run writes there|No such file"):
        checkpoint.write_checkpoint(out / "checkpoints" / checkpoint.name_of(1), FACTS, TENSORS, lock)
    assert moved
    assert not list((out / "checkpoints").iterdir())
    lock.release()


def test_verify_prints_the_facts_of_a_sound_checkpoint_alone(sound, tmp_path, capsys):
    path = tmp_path / "x"
    path.write_bytes(sound)
    assert verify.main([str(path)]) == 0
    assert json.loads(capsys.readouterr().out) == FACTS
    path.write_bytes(sound[:-1])
    with pytest.raises(UserError, match=f"^{path}: .*: name another checkpoint"):
        verify.main([str(path)])


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_fsync_still_gets_checkpoints(code, tmp_path, monkeypatch):
    def refuse(handle):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    checkpoint.write_checkpoint(tmp_path / checkpoint.name_of(12), FACTS, TENSORS)
    assert checkpoint.read_checkpoint(tmp_path / checkpoint.name_of(12))[0] == FACTS


# ---- when automatic ones are due


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def saved(interval, clock, stall, processor=0.0, seconds=0.01, failed=False):
    with interval.saving():
        clock.now += stall
    interval.written(processor, seconds, failed=failed)


def due(interval, clock):
    return clock() >= interval.due_at


def share(cost, seconds=400.0):
    """Return the share of the time that checkpoints of this cost (stall, processor) take once one was measured."""
    clock = Clock()
    interval = CheckpointInterval(True, clock)
    interval.begin()
    saved(interval, clock, *cost)
    until, spent = clock.now + seconds, 0.0
    while clock.now < until:
        clock.now += 0.02
        if due(interval, clock):
            saved(interval, clock, *cost)
            spent += sum(cost)
    return spent / seconds


@pytest.mark.parametrize("cost", [(0.001, 0.002), (0.01, 0.01), (0.5, 1.0), (0.0, 3.0)])
def test_checkpoints_take_at_most_a_hundredth_of_the_time(cost):
    assert share(cost) <= 0.0101
    assert share(cost) >= min(0.005, sum(cost) / LEAST_SECONDS * 0.9)


def test_before_the_first_is_measured_its_size_tells():
    clock = Clock()
    interval = CheckpointInterval(True, clock)
    assert interval.seconds == LEAST_SECONDS
    interval.expect(1_500_000_000)  # GPT-2's, with Adam
    assert 600 < interval.seconds < 1200
    clock.now += 1200
    assert not due(interval, clock), "before training"
    interval.begin()
    assert not due(interval, clock)
    clock.now += 1200
    assert due(interval, clock)
    saved(interval, clock, 0.2, 3.0)
    assert interval.seconds == pytest.approx(320)


def test_one_long_stall_is_an_exception_and_two_are_none():
    clock = Clock()
    interval = CheckpointInterval(True, clock)
    for stall in (0.01, 0.01, 5.0):
        saved(interval, clock, stall)
    assert interval.seconds == pytest.approx(LEAST_SECONDS)
    saved(interval, clock, 5.0)
    assert interval.seconds == pytest.approx(500)


def test_a_slow_file_system_is_busy_for_a_tenth_of_the_time():
    clock = Clock()
    interval = CheckpointInterval(True, clock)
    saved(interval, clock, 0.001, 0.001, seconds=30.0)
    assert interval.seconds == pytest.approx(300)


def test_where_none_can_be_written_it_is_tried_ever_more_rarely():
    clock = Clock()
    interval = CheckpointInterval(True, clock)
    pauses = []
    for _ in range(12):
        saved(interval, clock, 0.001, failed=True)
        pauses.append(interval.seconds)
    assert pauses[:3] == [2.0, 4.0, 8.0]
    assert pauses[-1] == MOST_BACKOFF
    saved(interval, clock, 0.001)
    assert interval.seconds == pytest.approx(LEAST_SECONDS)


def test_never_where_it_is_off():
    clock = Clock()
    interval = CheckpointInterval(False, clock)
    interval.begin()
    saved(interval, clock, 0.1)
    clock.now += 1e6
    assert not due(interval, clock)


# ---- what a run does around one


def test_a_rank_that_hangs_in_a_checkpoint_has_the_limit_of_a_step_and_each_tensor_is_progress(tmp_path, monkeypatch):
    """With ten times that, `--step-timeout 5` left a rank that span there alone for 50 s. What ranks wait for when they are
    compared is a rank's step."""
    phases, beats, snapshot = {}, [], contents.snapshot

    def before(t):
        activity = t.run.engine.activity

        def copied(tensors, heartbeat):
            phases.setdefault("copy", activity.phase)
            assert heartbeat == activity.heartbeat
            del beats[:]
            copies = snapshot(tensors, lambda: beats.append(heartbeat()))
            assert len(beats) == len(copies) > 1
            return copies

        monkeypatch.setattr(replicas, "compare", lambda *_: phases.setdefault("compare", activity.phase) and None)
        monkeypatch.setattr(contents, "snapshot", copied)

    Trained("--checkpoint-steps", "1", out=tmp_path, epochs=1, before=before)
    assert phases["compare"].name in ("step", "first step")
    assert phases["copy"].name == "checkpoint"
    for timeouts in (HangTimeouts(5.0), HangTimeouts()):
        assert timeouts.phase(phases["copy"], 0.0) == timeouts.step(0.0)


def test_a_snapshot_is_contiguous_and_does_not_change_with_the_weights():
    weights = torch.arange(6.0).reshape(2, 3).requires_grad_()
    copies = contents.snapshot({"weights": weights, "transposed": weights.t()})
    weights.data.zero_()
    assert copies["weights"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert copies["transposed"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert all(copy.is_contiguous() and not copy.requires_grad for copy in copies.values())


def test_an_exception_waits_for_the_checkpoint_that_is_being_written(tmp_path, monkeypatch, capfd):
    """The lock was released first: "not written (AssertionError()): training continues", of which neither was true."""
    raised, digest = threading.Event(), checkpoint.checkpoint_digest

    def late(*arguments):
        assert raised.wait(60)
        time.sleep(0.3)  # the exception has reached the end of the block meanwhile
        return digest(*arguments)

    monkeypatch.setattr(checkpoint, "checkpoint_digest", late)

    def fail(t, epoch):
        if epoch == 1:
            raised.set()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Trained(out=tmp_path, head=fail)
    assert checkpoint.read_checkpoint(tmp_path / "checkpoints" / checkpoint.name_of(5))[0]["state"]["epoch"] == 1
    assert "not written" not in capfd.readouterr().err
