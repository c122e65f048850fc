"""Flags and launchers' variables as nobody should set them: one line and exit code 2, or a right answer."""

import io
import sys

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hvdtrain import benchmark, cli, doctor, imagenet, lm, mnist, reduce, report, starter
from hvdtrain.engines import launchers
from hvdtrain.engines.errors import UserError
from hvdtrain.launching import exit_codes, meeting, rendezvous
from tests.single.docs import program_of_the_site
from tests.single.examples import one_line, tried

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
