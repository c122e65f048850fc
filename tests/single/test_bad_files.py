"""Files as nobody should leave them: one clear line or the right answer, and no more memory than the file has bytes."""

import gzip
import io
import json
import os
import tarfile
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from hvdtrain import report as page
from hvdtrain import training
from hvdtrain.checkpoint import checkpoint, contents
from hvdtrain.checkpoint.own import IN_STEPS
from hvdtrain.checkpoint.randomness import Generators
from hvdtrain.checkpoint.saving import Checkpoints
from hvdtrain.datasets import decoding, tar_shards
from hvdtrain.datasets import mnist_data as mnist_files
from hvdtrain.datasets.images import UNREADABLE
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.single import SerialEngine
from hvdtrain.loop.prepare import prepare
from hvdtrain.loop.state import TrainState
from hvdtrain.models.convnet import MODELS
from hvdtrain.models.weights import MOST_TENSORS, load_weights
from hvdtrain.output import run_output
from hvdtrain.output.recorded_runs import read_runs, time_shares
from tests.facts import own_tensors, sound_facts
from tests.single.data import fake_mnist as fake
from tests.single.examples import JSON, changed, little_memory, one_line, spoilt, tried
from tests.single.output.test_recorded_runs import LANGUAGE

# IDX


@pytest.fixture
def mnist(tmp_path, monkeypatch) -> Path:
    """A small sound MNIST, and no cache."""
    for name in mnist_files.PUBLISHED:
        monkeypatch.setitem(mnist_files.PUBLISHED, name, fake.published(name))
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/none")
    return fake.write(tmp_path / "mnist")


@st.composite
def idx_files(draw: st.DrawFn, name: str) -> bytes:
    """What may lie under the name of an IDX file: damaged, under another header, or anything."""
    sound = fake.MNIST[name]
    sizes = st.sampled_from([0, 1, 19, 20, 21, 28, 784, 2**16, 2**31 - 1, 2**31, 2**32 - 1])
    shape = draw(st.lists(sizes, max_size=5))
    kind = draw(st.sampled_from([8, 8, 8, 9, 0x0D, 0, 255]))
    header = bytes([0, 0, kind, len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape)
    return draw(
        st.one_of(
            spoilt(sound),
            st.binary(max_size=40).map(lambda rest: header + rest),
            st.just(header + sound[16:]),
            st.binary(max_size=200),
            st.sampled_from([*fake.MNIST.values(), *fake.FASHION.values()]),
        )
    )


@tried(100)
@given(data=st.data())
def test_any_idx_file_is_refused_or_right(mnist, data):
    name = data.draw(st.sampled_from(fake.NAMES))
    plain, packed = mnist / name, mnist / f"{name}.gz"
    content = data.draw(idx_files(name))
    compressed = data.draw(st.booleans())
    if compressed:
        content = gzip.compress(content, compresslevel=1)
        content = data.draw(st.just(content) | spoilt(content))
        plain.unlink(missing_ok=True)
    (packed if compressed else plain).write_bytes(content)
    try:
        with little_memory():
            loaded = mnist_files.load_dataset("mnist", mnist, download=False)
    except UserError as error:
        one_line(error)
    else:
        tensors = (loaded.train_images, loaded.train_labels, loaded.test_images, loaded.test_labels)
        for file, tensor in zip(fake.NAMES, tensors, strict=True):
            assert bytes(tensor.flatten().tolist()) == fake.MNIST[file][16 if "images" in file else 8 :]
    finally:
        packed.unlink(missing_ok=True)
        plain.write_bytes(fake.MNIST[name])


def test_a_gzip_file_of_a_hundred_thousand_empty_ones_takes_no_time():
    file = fake.published("mnist").files[0]
    with pytest.raises(ValueError, match="but 0 bytes"):
        mnist_files.unpacked_file(mnist_files.PUBLISHED["mnist"], file, gzip.compress(b"") * 100_000)


# Shards


def tar_of(count: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for number in range(count):
            for name, content in ((f"{number}.jpg", b"image"), (f"{number}.cls", str(number % 3).encode())):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


TAR = tar_of(5)
TARS = st.one_of(spoilt(TAR), spoilt(gzip.compress(TAR)), st.binary(max_size=600))


def shard_directory(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        (tmp_path / split).mkdir(exist_ok=True)
        (tmp_path / split / "000000.tar").write_bytes(TAR)
        (tmp_path / split / "sizes.json").write_text('{"000000.tar": 5}')
        (tmp_path / split / "classes.json").write_text('["a", "b", "c"]')
    return tmp_path


@pytest.mark.parametrize("name", ["sizes.json", "classes.json"])
@tried(50)
@given(content=st.one_of(
    st.binary(max_size=60), JSON.map(lambda value: json.dumps(value).encode()), st.just(b"[" * 100_000),
    changed({"000000.tar": 5}).map(lambda value: json.dumps(value).encode()),
))  # fmt: skip
def test_any_index_of_shards_is_refused_or_right(name, content, engine, tmp_path):
    directory = shard_directory(tmp_path)
    (directory / "train" / name).write_bytes(content)
    try:
        with little_memory():
            source = tar_shards.open_shards(engine, directory, (None, None), 8, classes=None)
    except UserError as error:
        one_line(error)
        return
    if name == "classes.json":
        assert source.classes == 3
        assert json.loads(content) == ["a", "b", "c"]
    else:
        assert len(source.train) == 5
        assert json.loads(content).get("000000.tar") is None or json.loads(content)["000000.tar"] >= 5


@tried(60)
@given(content=TARS)
def test_of_any_shard_each_sample_is_read_or_reported(content, engine, tmp_path):
    path = tmp_path / "000000.tar"
    path.write_bytes(content)
    with little_memory():
        try:
            (index,) = tar_shards.indexed(engine, [str(path)])
        except UserError as error:  # compressed
            one_line(error)
            return
        assert len(index.table) <= len(content) / 512
        dataset = tar_shards.Shards([str(path)], [index], decoding.Prepare(1, train=False), 3)
        labels = [dataset[number][1] for number in range(len(dataset))]
    assert all(label in (0, 1, 2, UNREADABLE) for label in labels)
    if sum(label >= 0 for label in labels) < 5:
        assert index.problem or UNREADABLE in labels


# Checkpoints


@pytest.fixture(scope="module")
def saved() -> tuple[dict, dict]:
    """Facts and tensors of a small run's checkpoint."""
    model = MODELS["convnet-nonorm"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    facts, tensors, _ = contents.collect([model], [optimizer], {})
    state = asdict(TrainState(samples_of_epoch=64, samples=64, step=1, train_seconds=1.5, train={"loss": 0.5}))
    data = {"dataset": "digits", "train_samples": 128}
    facts = sound_facts(state=state, config={"lr": 0.1, "epochs": 2}, data=data) | facts
    here = SimpleNamespace(device=torch.device("cpu"))
    generators = Generators(here, 1, print, keeps=True)
    generators.begin_epoch()
    tensors |= own_tensors([{"generators": generators.state(IN_STEPS)}])
    return facts, tensors


def go_on(directory: Path, engine: SerialEngine, resume: Path | None = None) -> TrainState:
    """Resume as `training.start` and `Run.prepare` do; return where training stands."""
    model = MODELS["convnet-nonorm"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parser = training.parser("test", None, epochs=2, batch_size=64)
    parser.add_argument("--lr", type=float, default=0.1)
    where = ["--output-dir", str(directory)] if resume is None else ["--resume", str(resume)]
    flags = parser.parse(["--engine", "serial", *where])
    quiet = run_output.RunOutput(engine, None, progress=False)
    checkpoints = Checkpoints(engine, flags, {}, quiet)
    try:
        state = checkpoints.resume.begin()
        checkpoints.open({"dataset": "digits", "train_samples": 128})
        checkpoints.resume.announce(state)
        checkpoints.restore(prepare(engine, engine, flags, [model, optimizer], ["", ""], 1, False, None))
        checkpoints.resume.tell_settings({}, {})  # as the first step does
        return state
    finally:
        checkpoints.close()


def test_a_sound_checkpoint_goes_on(saved, engine, tmp_path):
    facts, tensors = saved
    checkpoint.write_checkpoint(tmp_path / "checkpoints" / checkpoint.name_of(1), facts, tensors)
    assert go_on(tmp_path, engine) == TrainState(**facts["state"])


@st.composite
def spoilt_checkpoints(draw: st.DrawFn, sound: bytes) -> bytes:
    """A checkpoint that a disk or a network has spoilt, or whose header is well-formed and says something else."""
    length = int.from_bytes(sound[:8], "little")
    header = json.loads(sound[8 : 8 + length])
    if draw(st.booleans()):
        return draw(spoilt(sound))
    if draw(st.booleans()):
        other = draw(changed(header))
    else:
        facts = draw(changed(json.loads(header["__metadata__"]["facts"])))
        other = header | {"__metadata__": header["__metadata__"] | {"facts": json.dumps(facts)}}
    text = json.dumps(other).encode()
    assume(json.loads(text) != header)
    return len(text).to_bytes(8, "little") + text + sound[8 + length :]


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory) -> dict[str, bytes]:
    directory = tmp_path_factory.mktemp("two")
    for step in (4, 8):
        facts = sound_facts(state=asdict(TrainState(step=step, samples=64 * step)))
        tensors = {"model.weight": torch.full((8, 3), float(step)), "model.bias": torch.arange(3)}
        checkpoint.write_checkpoint(directory / checkpoint.name_of(step), facts, tensors)
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@tried(100)
@given(data=st.data())
def test_any_damage_to_the_newest_checkpoint_leaves_the_one_before(data, two_checkpoints, tmp_path_factory):
    directory = tmp_path_factory.mktemp("damaged")
    before, newest = (directory / name for name in two_checkpoints)
    before.write_bytes(two_checkpoints[before.name])
    sound = two_checkpoints[newest.name]
    damaged = data.draw(spoilt_checkpoints(sound))
    assume(damaged != sound)
    newest.write_bytes(damaged)
    said: list[str] = []
    facts, tensors = checkpoint.newest(directory, said.append)[:2]
    assert facts == checkpoint.read_checkpoint(before)[0]
    assert torch.equal(tensors["model.weight"], torch.full((8, 3), 4.0))
    assert tensors["model.bias"].tolist() == [0, 1, 2]
    assert len(said) == 1
    assert f"{newest.name} is damaged" in said[0]
    assert newest.with_name(f"{newest.name}.damaged").exists()


def test_braces_in_strings_are_not_taken_for_tensors(saved, engine, tmp_path):
    facts, tensors = saved
    facts = facts | {"typed": {"text": '"{' * MOST_TENSORS}}
    checkpoint.write_checkpoint(tmp_path / "checkpoints" / checkpoint.name_of(1), facts, tensors)
    assert go_on(tmp_path, engine) == TrainState(**facts["state"])


def test_weights_of_another_type_are_not_converted(saved, engine, tmp_path):
    facts, tensors = saved
    name = next(name for name in tensors if name.startswith("model."))
    checkpoint.write_checkpoint(
        tmp_path / "checkpoints" / checkpoint.name_of(1), facts, tensors | {name: tensors[name].to(torch.int8)}
    )
    with pytest.raises(
        UserError, match=r"is torch.int8 in the file, torch.float32 in the model: build the model as the run did"
    ):
        go_on(tmp_path, engine)


@pytest.mark.parametrize("output_dir", [True, False])
def test_what_a_checkpoint_says_does_not_control_the_terminal(saved, engine, output_dir, capfd, tmp_path):
    facts, tensors = saved
    facts = facts | {"config": {"lr": "\x1b]0;title\x07\x1b[2J" + "A" * 10**7}}
    checkpoint.write_checkpoint(tmp_path / "checkpoints" / checkpoint.name_of(1), facts, tensors)
    said = []
    if output_dir:
        with pytest.raises(UserError, match="holds a run with different flags") as caught:
            go_on(tmp_path, engine)
        said.append(str(caught.value))
    else:
        go_on(tmp_path, engine, resume=tmp_path)
        said.append(capfd.readouterr().err.removesuffix("\n"))
    assert said[0].isprintable()
    assert len(said[0]) < 3000
    assert said[0].endswith(("--resume never", "continued with those given now"))


@tried(100)
@given(
    tensors=st.dictionaries(
        st.sampled_from(["own", "own.bytes", "model.x", "__metadata__", ""]),
        st.fixed_dictionaries({
            "dtype": st.sampled_from(["F32", "U8", "BF16", "BOOL", "F8_E4M3", "X", 7]),
            "shape": st.lists(st.sampled_from([0, 1, 7, 2**31, 2**40, 2**63, 2**64, -1, "x"]), max_size=3),
            "data_offsets": st.lists(st.sampled_from([0, 4, 28, 2**33, 2**63, 2**64 - 1, -4]), min_size=1, max_size=3),
        }) | JSON,
        max_size=3,
    ),
    metadata=JSON, length=st.none() | st.sampled_from([0, 1, 2**20, 10**8, 10**8 + 1, 2**32, 2**63, 2**64 - 1]),
    body=st.binary(max_size=64),
)  # fmt: skip
def test_headers_that_lie_are_refused_without_taking_the_memory(tensors, metadata, length, body, tmp_path):
    header = json.dumps(tensors | {"__metadata__": metadata}).encode()
    path = tmp_path / "lying"
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + body)
    with little_memory(), pytest.raises(checkpoint.Damaged) as caught:
        checkpoint.read_checkpoint(path)
    assert len(str(caught.value).splitlines()) == 1
    assert checkpoint.read_facts(path) == {}


@pytest.mark.parametrize(
    ("count", "key"),
    [(MOST_TENSORS, "dtype"), (MOST_TENSORS, r"\u0064type"), (10**6, "dtype")],
)
def test_a_million_empty_tensors_cost_neither_time_nor_memory(count, key, tmp_path):
    """They took 33 s and 2 GB, for 67 MB."""
    tensors = ",".join(f'"{i}":{{"{key}":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(count + 1))
    header = f"{{{tensors}}}".encode()
    path = tmp_path / "many.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    del tensors, header
    with little_memory(), pytest.raises(checkpoint.Damaged, match="it names more than 100,000 tensors"):
        checkpoint.read_checkpoint(path)
    assert checkpoint.read_facts(path) == {}
    with pytest.raises(UserError, match=r"not a file of weights .it names more than 100,000 tensors"):
        load_weights(torch.nn.Linear(1, 1), path)


def test_compressed_weights_are_refused_before_they_are_unpacked(tmp_path):
    """1.6 MB of zeros became 1.6 GB: torch reads them, and never writes them."""
    path, packed = tmp_path / "weights.pt", tmp_path / "packed.pt"
    torch.save({"w": torch.zeros(2**20)}, path)
    with ZipFile(path) as plain, ZipFile(packed, "w", ZIP_DEFLATED) as archive:
        for name in plain.namelist():
            archive.writestr(name, plain.read(name))
    with pytest.raises(
        UserError, match=r"not a file of weights \(it is compressed: [0-9,]+ bytes that become 4,19[0-9,]+\)"
    ):
        load_weights(torch.nn.Linear(1, 1), packed)
    model = torch.nn.Linear(1, 1)
    for zipped in (True, False):  # torch's two formats
        torch.save(model.state_dict(), path, _use_new_zipfile_serialization=zipped)
        load_weights(torch.nn.Linear(1, 1), path)


@pytest.mark.parametrize("kind", ["a file of torch.save, or another zip", "compressed by gzip", "JSON"])
def test_a_file_of_another_format_is_told_as_that(kind, tmp_path):
    """It had "a header of 578,712,552,184,433,488 bytes"."""
    path = tmp_path / "weights.safetensors"
    if kind == "JSON":
        path.write_text('{"weight_map": {}}')
    elif kind == "compressed by gzip":
        path.write_bytes(gzip.compress(b"weights"))
    else:
        torch.save({"w": torch.zeros(3)}, path)
    with pytest.raises(UserError, match=rf"\(it is {kind}, and not safetensors\)"):
        load_weights(torch.nn.Linear(1, 1), path)


@pytest.mark.parametrize("name", ["step-00000001.safetensors", "weights.pt"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(name, engine, tmp_path):
    path = tmp_path / "checkpoints" / name
    path.parent.mkdir()
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"not a file of weights .it is not a regular file"):
        load_weights(torch.nn.Linear(1, 1), path)
    if path.suffix == ".safetensors":
        assert checkpoint.read_facts(path) == {}
        with pytest.raises(UserError, match="--resume X: it is not a regular file"):
            checkpoint.find_checkpoint(path, "--resume X", print)
        with pytest.raises(UserError, match=r"damaged .step-00000001.safetensors: it is not a regular file"):
            go_on(tmp_path, engine)  # the one before would be taken, if there were one


@pytest.mark.parametrize(
    "content",
    [
        {"format": checkpoint.CHECKPOINT_FORMAT - 1},
        {},
        [],
        {"format": checkpoint.CHECKPOINT_FORMAT, "config": {}, "state": {"x": 1}},
        sound_facts(state=asdict(TrainState(step=2)), config=[1, 2]),
        sound_facts(state=asdict(TrainState(step=2)), data=[1, 2]),
    ],
)
def test_other_content_with_a_right_checksum_is_refused_and_not_passed_over(content, saved, engine, tmp_path):
    """An older checkpoint was taken instead, or training began anew."""
    facts, tensors = saved
    for step, each in ((1, facts), (2, content)):
        checkpoint.write_checkpoint(tmp_path / "checkpoints" / checkpoint.name_of(step), each, tensors)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        UserError, match="another version of hvdtrain wrote this checkpoint: use that one, or train anew"
    ):
        go_on(tmp_path, engine)
    assert [path for path in sorted(tmp_path.rglob("*")) if path.name != ".lock"] == before


# What a run has written, as the report and a restart read it


EVENTS = [
    {"event": "start", "time": 1.0, "world_size": 2, "engine": "horovod", "dataset": "digits", "config": {"lr": 0.1},
     "versions": {"torch": "2"}, "ranks": [{"rank": 0, "host": "a"}]},
    {"event": "train", "time": 2.0, "epoch": 1, "step": 1, "samples": 64, "loss": 1.0, "loading_seconds": 1e-3},
    {"event": "ranks", "time": 2.5, "loading_seconds": [1, 2], "compute_seconds": [1, 2], "communication_seconds": [0, 1],
     "elapsed_seconds": [3, 6]},
    {"event": "evaluate", "time": 3.0, "epoch": 1, "loss": 0.5, "accuracy": 0.9, "count": 10},
    {"event": "checkpoint", "time": 3.5, "file": "step-00000001.safetensors", "step": 1},
    {"event": "start", "time": 9.0, "world_size": 2},
    {"event": "resume", "time": 9.5, "step": 1, "samples": 64},
    {"event": "stop", "time": 10.0, "reason": "SIGTERM"},
    {"event": "error", "time": 10.0, "kind": "failure", "message": "x"},
    {"event": "end", "time": 11.0, "test_accuracy": 0.9, "test_loss": 0.4, "samples": 64, "total_seconds": 9.0},
]  # fmt: skip
RUN = [event | {"elapsed": event["time"]} for event in EVENTS]
WHOLE = [event | {"elapsed": event["time"] - 90.0} for event in LANGUAGE]
RESUMED = [*WHOLE, WHOLE[0], {"event": "resume", "time": 120.0, "step": 2}, *WHOLE[1:]]


@tried(60)
@given(data=st.data())
def test_any_record_of_a_run_makes_a_page_or_is_refused(data, tmp_path):
    events = data.draw(changed(data.draw(st.sampled_from([RUN, RESUMED]))))
    lines = "".join(json.dumps(event) + "\n" for event in events) if isinstance(events, list) else json.dumps(events)
    record = lines.encode()
    (tmp_path / "metrics.jsonl").write_bytes(data.draw(st.just(record) | spoilt(record)))
    written = json.dumps(data.draw(st.just(RUN[-1]) | changed(RUN[-1]))).encode()
    (tmp_path / "summary.json").write_bytes(data.draw(st.just(written) | spoilt(written)))
    try:
        with little_memory():
            (run,) = read_runs([tmp_path])
            shown = page.build([run], [])
            for shares in time_shares(run):
                assert all(0 <= share <= 1 for share in shares.values())
    except UserError as error:
        one_line(error)
        return
    shown.encode()
    assert run.ranks >= 1
