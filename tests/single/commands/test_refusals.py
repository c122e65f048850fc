"""What commands refuse before they train: one line, which names what is wrong and what is allowed.

And any flags and variables of launchers. Mistakes in a program: tests/single/training/test_mistakes.py.
"""

import io
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from hvdtrain import benchmark, cli, doctor, imagenet, lm, mnist, reduce, report, starter
from hvdtrain.checkpoint import checkpoint
from hvdtrain.datasets import make_shards
from hvdtrain.engines import launchers
from hvdtrain.engines.errors import UserError
from hvdtrain.launching import exit_codes, meeting, rendezvous
from hvdtrain.models import classifiers
from tests import image_set
from tests.facts import sound_facts
from tests.single.docs import program_of_the_site
from tests.single.examples import one_line, tried

COMMANDS = {
    "mnist": mnist,
    "imagenet": imagenet,
    "lm": lm,
    "benchmark": benchmark,
    "reduce": reduce,
    "starter": starter,
}
OUT = "--output-dir HERE/out"
FIRST = {  # flags before those of a row, which count; what is not refused ends soon
    "mnist": "--engine serial --no-progress --dataset digits --epochs 1 --train-samples 64",
    "imagenet": "--engine serial --no-progress --workers 0 --epochs 1 --batch-size 4 --image-size 33 --model squeezenet1_1",
    "lm": "--engine serial --no-progress --layers 1 --heads 2 --width 16 --context 8 --sample-tokens 0",
}
# Command -> flags -> what the line has.
REFUSED = {
    "mnist": {
        "--epoch 1": "unrecognized arguments: --epoch",
        "--local-rank=1": "torch.distributed.launch adds --local-rank=1: start the program by torchrun",
        "--lr -1": "argument --lr: '-1' is not a number above 0",
        "--lr nan": "argument --lr: 'nan' is not a number above 0",
        "--momentum 1": "argument --momentum: '1' is not a number of at least 0 and below 1",
        "--batch-size 0": "argument --batch-size: '0' is not a whole number of at least 1 (--help lists every flag)",
        "--batch-size 1.5": "'1.5' is not a whole number",
        "--seed -1": "'-1' is not a whole number of at least 0",
        "--output-dir=": "argument --output-dir: the name is empty: name a directory, such as . for this one",
        "--engine smoke": "invalid choice: 'smoke'",
        "--epochs": "expected one argument",
        "--engine serial --compression fp16": "--compression fp16 is not for --engine serial: leave it out, or use",
        "--engine dataparallel --reduction sum": "--reduction sum is not for --engine dataparallel",
        "--engine serial --gradient-predivide-factor 2": "--gradient-predivide-factor 2.0 is not for --engine serial",
        "--engine serial --compression bf16": "--compression bf16 is not for --engine serial: leave it out, or use",
        "--sync-within host": "--sync-within host is for weights: give --sync-every, of at least 2",
        "--engine horovod --deterministic --tuning off":
            "--deterministic cannot go with --tuning off, with which Horovod sums gradients",
        "--checkpoint-steps 5": "--checkpoint-steps needs --output-dir",
        "--profile 5": "--profile needs --output-dir",
        "--tensorboard": "--tensorboard needs --output-dir",
        "--track mlflow": "--track needs --output-dir",
        "--memory": "--memory is no longer a flag: read cuda_bytes and resident_bytes in the ranks events",
        "--energy --epochs 2": "--energy is no longer a flag: run nvidia-smi --query-gpu=power.draw",
        "--debug-page 25999": "--debug-page is no longer a flag: call torch.distributed.debug.start_debug_server",
        "--debug-page=25999": "--debug-page is no longer a flag: call torch.distributed.debug.start_debug_server",
        # argparse takes two dashes away: --epochs had its default, --data-dir was a list.
        **{f"{flag}=--": f"argument {flag}: expected one argument" for flag in ("--engine", "--epochs", "--data-dir")},
        "--virtual-ranks 2 --engine dataparallel":
            "--virtual-ranks 2 cannot go with --engine dataparallel: use --engine horovod, ddp or",
        "--virtual-ranks 2 --engine ddp --sync-every 2":
            "--virtual-ranks 2 cannot go with --sync-every 2: leave one of them out",
        "--virtual-ranks 2 --engine ddp --compression fp16":
            "--virtual-ranks 2 cannot go with --compression fp16: leave one of",
        "--virtual-ranks 2 --evaluate x": "--virtual-ranks 2 cannot go with --evaluate: leave --virtual-ranks out",
        f"{OUT} --mirror file://HERE/empty/run": "cannot be used",
        f"{OUT} --mirror nosuch://bucket/run": "cannot be used",
        f"{OUT} --resume file://HERE/nothing": "has no run: name another place",
        f"{OUT} --mirror bucket/run": "is not a URL such as",
        f"{OUT} --mirror file://host/run": "is not a URL such as",  # it was a directory of the working directory
        f"{OUT} --mirror file://HERE/out": "is the run's own place: name another",  # which removed the checkpoints
        f"{OUT} --mirror file://HERE/out/checkpoints": "is the run's own place: name another",
        f"{OUT} --mirror memory://run": "is in the memory of this process",
        f"{OUT} --mirror sftp://me:secret@host/run": "a password in the URL",
        f"{OUT} --mirror s3://bucket/run --evaluate y": "leave it out with --evaluate",
        "--mirror s3://bucket/run": "--mirror needs --output-dir",
        "--resume s3://bucket/run": "--resume URL needs --output-dir",
        "--dataset mnist --data-dir HERE/nowhere": "HERE/nowhere",
        "--dataset mnist --data-dir HERE/book": "HERE/book",
        "--output-dir HERE/book/out": "--output-dir HERE/book/out cannot be written",
        "--weights HERE/nowhere": "No such file",
        "--weights HERE/book": "not a file of weights",
    },
    "imagenet": {
        "--track mlflow": "--track needs --output-dir",
        "--workers -1": "'-1' is not a whole number of at least 0",
        "": "--dataset folder needs --data-dir",
        "--data-dir HERE/nowhere": "HERE/nowhere does not exist: name the directory",
        "--data-dir HERE/images/train": "HERE/images/train/train does not exist",
        "--data-dir HERE/without": "Found no valid file for the classes white",
        "--data-dir HERE/other": "train/ has 6 classes, val/ has 5: 'yellow' is only in train/",
        "--data-dir HERE/images --weights HERE/w.pt --model shufflenet_v2_x0_5":
            "fc.weight is (1000, 1024) in the file, (6, 1024) in the model: make the model, with as many",
        "--dataset synthetic --model resnet51": "--model resnet51: torchvision has no such classifier",
        "--dataset synthetic --model vit_b_16 --image-size 33": "--image-size 33",
        "--dataset synthetic --model inception_v3 --image-size 32": "inception_v3 does not support --image-size 32: ",
        "--dataset shards --data-dir HERE/nowhere": "HERE/nowhere does not exist",
        "--dataset shards --data-dir HERE/images": "has neither train/*.tar nor train-*.tar",
        "--dataset shards --data-dir HERE/shards --classes 7": "--classes 7, but",
    },
    "lm": {
        "--width 17": "--width 17 is not a multiple of --heads 2",
        "--steps 5 --epochs 1": "--steps 5 cannot go with --epochs 1: leave one of them out",
        "--text HERE/book --context 1000": "too short: 0 sequences of --context 1000 in its first 90 %, 1 rank",
        "--text HERE/empty": "empty: name files that have text in them",
        "--text HERE/empty --tokens bytes": "empty: name files that have text in them",
        "--text HERE/nowhere": "name a file that can be read",
        "--text HERE/latin": "not UTF-8 (invalid continuation byte)",
        "--text HERE/cut": "not UTF-8 (unexpected end of data)",
        "--text HERE/pipe": "pipe: a pipe or a device, not a file: name a file that can be read",  # it is read twice
        "--text HERE/images": "images: a directory: name the files in it, --text HERE/images/*.txt",
        "--text HERE/book --compile": "and CXX=no-such-compiler is not there: correct CXX, or leave it out",
        "--sample x": "--sample needs a checkpoint: name it with --resume PATH, or its run with --output-dir",
        "--sample x --resume HERE/nowhere": "name a valid checkpoint",
        "--sample x --output-dir HERE": "it has no valid checkpoint",
        "--sample x --resume HERE/other.safetensors": "not a checkpoint of hvdtrain.lm: name one that is",
    },
    "benchmark": {"--model convnet --image-size 32": "takes images of 28 pixels",
        "--output-dir=": "the name is empty",
        "--engine serial --compression fp16": "--compression fp16 is not for --engine serial",
        "--steps 0": "'0' is not a whole number",
        "--model gpt-small --image-size 32": "--model gpt-small takes no images: leave out --image-size",
        "--model gpt2 --channels-last": "--model gpt2 takes no images: leave out --channels-last",
        "--collectives --min-bytes 8 --max-bytes 4": "--min-bytes 8 is more than --max-bytes 4",
        "--collectives --seconds-per-size 0": "'0' is not a number above 0",
        "--np 2 --engines horovod,smoke": "'smoke' is not one of horovod, horovod-gloo",
        "--np 1,x": "'x' is not a whole number", "--np 8 --hosts a:4": "--hosts is no longer a flag: --np measures",
        "--np 2 --interface eth0": "--interface is no longer a flag: --np measures this host",
        **{f"--np 1,2 {flag}": f"{flag.partition(' ')[0].partition('=')[0]} is not for --np, which compares --engines"
           for flag in ("--engine ddp", "--engine=ddp", "--no-communication", "--collectives")},
        "--np 1,2 --rounds 0": "argument --rounds: '0' is not a whole number of at least 1",
        "--np 1,2 --no-such-flag": "unrecognized arguments: --no-such-flag"},
    "reduce": {"--dtype int4": "invalid choice: 'int4'"},
    "starter": {
        "--local-ranks 0 x.py": "argument --local-ranks: '0' is not a whole number",
        "--local-ranks x x.py": "argument --local-ranks: 'x' is not a whole number",
        "--oversubscribe x.py": "--oversubscribe and --import need --local-ranks",
        "--import a x.py": "--oversubscribe and --import need --local-ranks",
        "--port 99999 x.py": "argument --port: '99999' is more than 65535",  # it was an OverflowError of bind()
    },
}  # fmt: skip
CASES = [(command, flags) for command, cases in REFUSED.items() for flags in cases]


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """Files that are wrong in one way each."""
    root = tmp_path_factory.mktemp("here")
    (root / "book").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    (root / "empty").touch()
    (root / "latin").write_bytes(b"caf\xe9 au lait " * 20)
    (root / "cut").write_bytes(b"cut off: \xe8\xaa")
    os.mkfifo(root / "pipe")
    checkpoint.write_checkpoint(root / "other.safetensors", sound_facts(), {"model.x": torch.zeros(1)})
    return root


@pytest.fixture(scope="module")
def images(here):
    folder = image_set.write(here / "images", train=12, test=6)
    for split in ("train", "val"):
        make_shards.make_shards(folder / split, here / "shards" / split, per_shard=12, seed=1)
    without, other = (Path(shutil.copytree(folder, here / name)) for name in ("without", "other"))
    (without / "train" / "white").mkdir()
    shutil.rmtree(other / "val" / "yellow")
    torch.save(classifiers.build_model("shufflenet_v2_x0_5", 1000, 224).state_dict(), here / "w.pt")


@pytest.mark.parametrize(("command", "flags"), CASES)
def test_refused_in_one_line(command, flags, here, request, monkeypatch):
    if command == "imagenet" or "images" in flags:
        request.getfixturevalue("images")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    words = f"{FIRST.get(command, '')} {flags}".replace("HERE", str(here)).split()
    monkeypatch.setattr(sys, "argv", [str(COMMANDS[command].__file__), *words])
    with pytest.raises(UserError) as caught:
        COMMANDS[command].main()
    said = str(caught.value)
    assert REFUSED[command][flags].replace("HERE", str(here)) in said
    assert len(said.splitlines()) == 1
    of_flags = any(entry.name == "parse" for entry in caught.traceback)  # which all ranks have: said once, by rank 0
    assert caught.value.everywhere or not of_flags or "--np" in flags
    assert not list(here.rglob("metrics.jsonl"))


# ---- flags and variables as nobody should set them: one line and exit code 2, or a right answer

NUMBERS = st.one_of(
    st.integers(-2, 4).map(str),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["", " ", "0", "-0", "+1", "01", "1_0", "1e400", "1e38", "nan", "-inf", "0x1", "²", "٣", "½"]),
    st.sampled_from([str(2**31 - 1), str(2**31), str(2**63), "9" * 4299, "9" * 5000, "-" + "9" * 5000, "1e-400"]),
)
WORDS = st.one_of(
    st.text(st.characters(exclude_characters="\0"), max_size=12),
    st.sampled_from(["auto", "none", "never", "horovod", "serial", "ddp", "adam", "fp16", "--", "-", "-x", "--lr", "="]),
    st.sampled_from(["a\nb", "a\r\nb\u2028c", "\udc80", "x" * 5000, "{1..3}", "*", "%s %d %(x)s", "a:1", "a:²", "1,2,,"]),
)  # fmt: skip
VALUES = st.one_of(NUMBERS, WORDS)
PARSERS = {
    script.__name__.removeprefix("hvdtrain."): script.parse
    for script in (mnist, imagenet, lm, benchmark, reduce, report, doctor, starter)
}


FLAGS = {
    script: sorted(
        name for flag in program_of_the_site("reference").parser_of(script)._actions for name in flag.option_strings
    )
    for script in PARSERS
}


def ends(main) -> int:
    """Run `main` as a script does; return its exit code, having seen that what it says is one line where it says no."""
    shown = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace")  # as Python's own standard error
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exit_codes.time, "sleep", lambda seconds: None)  # other ranks than 0 linger
        patch.setattr(sys, "stderr", shown)
        with pytest.raises(SystemExit) as ended:
            exit_codes.run_command(main)
    shown.flush()
    said = shown.buffer.getvalue().decode()
    if ended.value.code != 0:
        assert ended.value.code == 2
        assert ": error: " in said
        assert said.splitlines()[-1:] == [said.removesuffix("\n").rpartition("\n")[2]]
        assert all(line.startswith("warning: ") for line in said.splitlines()[:-1])
    return ended.value.code


@pytest.mark.parametrize("script", PARSERS)
@tried(15)
@given(data=st.data())
def test_any_flags_give_a_namespace_or_one_line(script, data):
    flag = st.sampled_from(FLAGS[script])
    pair = st.tuples(flag, VALUES).map(list) | st.tuples(flag, VALUES).map(lambda both: ["=".join(both)])
    drawn = data.draw(st.lists(pair | VALUES.map(lambda text: [text]) | flag.map(lambda f: [f]), max_size=4))
    argv = [text for part in drawn for text in part]
    assume(not {"-h", "--help"} & set(argv))
    kept: list = []
    code = ends(lambda: kept.append(PARSERS[script](argv)) or 0)
    assert (code == 0) == (len(kept) == 1)


WHOLE = [("positive_int", 1, 2**31 - 1), ("count", 0, 2**31 - 1), ("thread_number", 1, 1024), ("seed", 0, 2**63 - 1)]


@pytest.mark.parametrize(("name", "least", "most"), WHOLE)
@tried(50)
@given(text=VALUES)
def test_whole_numbers_are_what_they_say(name, least, most, text):
    try:
        value = getattr(cli, name)(text)
    except cli.argparse.ArgumentTypeError:
        value = None
    try:
        meant = int(text) if text.isascii() and "_" not in text and text == text.strip() else None
    except ValueError:
        meant = None
    assert value == (meant if meant is not None and least <= meant <= most else None)


def test_choices_with_commas_are_kept_once_and_in_their_order():
    parse = cli.names_from(["svg", "pdf", "png"])
    assert parse("pdf,svg,pdf") == ["pdf", "svg"]
    with pytest.raises(cli.argparse.ArgumentTypeError, match="'gif' is not one of svg, pdf, png"):
        parse("svg,gif")


# What a fuzzer of the parser cannot see: values that it lets through and that something later may not bear.
@pytest.mark.parametrize(
    "flags",
    [
        "--threads 2147483648", "--lr 1e300", "--weight-decay 1e300", "--batch-size 9223372036854775808", "--lr 1e38",
        f"--data-dir {'x' * 300}", f"--resume {'x' * 300}", f"--output-dir {'x' * 300}", f"--weights {'x' * 300}",
        "--resume /dev/null", "--weights /dev/null", "--output-dir /dev/null/x", "--output-dir /proc/x",
        "--batch-size 2147483647 --accumulate 2147483647", "--log-steps 2147483647 --check-steps 2147483647",
    ],
)  # fmt: skip
def test_extremes_train_or_give_one_line(flags, tmp_path, monkeypatch):
    base = "mnist --dataset digits --engine serial --no-progress --train-samples 8 --epochs 1 --threads 1 --output-dir"
    monkeypatch.setattr(sys, "argv", [*base.split(), str(tmp_path / "out"), *flags.split()])
    load = mnist.load_images

    def little(*arguments):
        dataset = load(*arguments)
        return dataset._replace(test_images=dataset.test_images[:8], test_labels=dataset.test_labels[:8])

    monkeypatch.setattr(mnist, "load_images", little)
    assert ends(mnist.main) in (0, 2)


VARIABLES = sorted({name for launcher in launchers.LAUNCHERS for name in (launcher.rank, launcher.size)})
ENVIRONMENTS = st.dictionaries(st.sampled_from(VARIABLES), VALUES.filter(lambda text: "\0" not in text), max_size=10)


@tried(200)
@given(environment=ENVIRONMENTS)
def test_any_announcement_is_a_rank_of_so_many_or_refused(environment):
    try:
        told = launchers.announced(environment)
    except UserError as error:
        one_line(error)
        return
    assert 0 <= told.rank < told.size
    if told.launcher == "none":
        assert told == ("none", 0, 1)
    else:
        by = launchers.BY_NAME[told.launcher]
        assert told[1:] == (int(environment[by.rank]), int(environment[by.size]))


PLACES = ["MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"]


@pytest.mark.parametrize("launcher", ["Slurm", "torchrun", "mpirun (Open MPI)"])
@tried(80)
@given(environment=st.dictionaries(st.sampled_from(PLACES), VALUES, max_size=5))
def test_any_meeting_point_is_a_host_and_a_port_or_refused(launcher, environment):
    try:
        host, port = rendezvous.meeting_point(environment, launcher)
    except UserError as error:
        one_line(error)
        return
    assert host
    assert 0 < port < 65536
    if environment.get("MASTER_ADDR") and environment.get("MASTER_PORT"):
        assert (host, port) == (environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))


@tried(60)
@given(
    name=st.text(st.characters(exclude_characters="\0"), max_size=5)
    | st.sampled_from(["a..b", "x" * 70, ".", "é" * 64])
)
def test_a_host_name_that_is_none_is_refused(name):
    def no_network(host, *_):
        host.encode("idna")  # as socket.getaddrinfo does first
        raise OSError("no such host")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting.socket, "getaddrinfo", no_network)
        with pytest.raises(UserError, match="check MASTER_ADDR"):
            meeting.resolve(name, deadline=0)
