"""File systems that are full or lack something, directories that change during training, clocks, limits, shells."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.chaos.attempts import ROOT, Attempt, Job, wait_for

Prepare = Callable[[Path], Mapping[str, str | None] | None]
FLAGS = "--dataset digits --epochs 1 --train-samples 256 --model convnet --no-progress --output-dir out"
MNIST = f"python -m hvdtrain.mnist --engine serial {FLAGS}"
TWO = f"mpirun --oversubscribe -np 2 python -m hvdtrain.mnist {FLAGS}"
STARTER = f"python -m hvdtrain.starter --oversubscribe --local-ranks 2 -m hvdtrain.mnist {FLAGS}"
LONG = f"{MNIST} --epochs 12 --checkpoint-steps 4"  # argparse takes the last --epochs
ROOTS = ("root",)


def mounted(options: str, at: str, then: str) -> str:
    """Return a command that runs `then` with a tmpfs at `at` in a mount namespace of its own."""
    return f"mkdir -p {at}; exec unshare -m bash -c 'mount -t tmpfs -o {options} tmpfs {at}; cd .; {then}'"


def fill(directory: str) -> str:
    return f"cat /dev/zero > {directory}/fill 2> /dev/null; "


def shim(faults: str = "", clock: str = "", **more: str) -> Prepare:
    """Return the set-up of calls that fail (faults.c)."""

    def prepare(here: Path) -> dict[str, str]:
        library = here / "faults.so"
        source = ROOT / "tests" / "chaos" / "faults.c"
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        return {"LD_PRELOAD": str(library), "FAULTS": faults} | ({"CLOCK": clock} if clock else {}) | more

    return prepare


def no_checkpoint_left_half(here: Path, output: str) -> str:
    left = [path.name for path in (here / "out" / "checkpoints").glob(".*")]
    return f"temporary checkpoints left: {left}" if left else ""


def once(do: Callable[[Path], object], after: str = "checkpoints") -> Callable[[Path, Job], None]:
    """Return what calls `do` as soon as the run has written `after`: "checkpoints" (one event) or "train"."""
    pattern = {"checkpoints": '"event": "checkpoint"', "train": '"event": "train"'}[after]

    def during(here: Path, job: Job) -> None:
        wait_for(here / "out" / "metrics.jsonl", job, pattern)
        do(here)

    return during


NO_SPACE = [
    Attempt("tmp-full-starter", "no space", "TMPDIR is full under the starter",
            mounted("size=64k", "tmp", fill("tmp") + STARTER), bits_of=STARTER, needs=ROOTS),
    Attempt("tmp-read-only", "no space", "/tmp and TMPDIR are read-only, starter",
            mounted("size=64k,ro", "tmp", STARTER), bits_of=STARTER, needs=ROOTS),
    Attempt("shm-full-starter", "no space", "/dev/shm is full, starter",
            f"exec unshare -m bash -c 'mount -t tmpfs -o size=4k tmpfs /dev/shm; {fill('/dev/shm')} {STARTER}'",
            bits_of=STARTER, needs=ROOTS),
    Attempt("out-small", "no space", "--output-dir has room for records, not for a checkpoint",
            mounted("size=200k", "out", MNIST), code=1, says="No space left.*free some space", needs=ROOTS),
    Attempt("file-size-limit", "no space", "ulimit -f 100: files of at most 100 KiB",
            f"ulimit -f 100; {MNIST}", code=1, says="File too large", check=no_checkpoint_left_half),
    Attempt("quota", "no space", "each write of a checkpoint fails with EDQUOT",
            MNIST, code=1, says="quota exceeded.*free some space", prepare=shim("write:step-:122"), needs=("gcc",)),
    Attempt("cache-full", "no space", "the cache directory is full: a text is converted in memory",
            mounted("size=64k", "cache", fill("cache") + "yes This is a text. | head -c 300000 > text; "
            "python -m hvdtrain.lm --text text --engine serial --steps 2 --no-progress --sample-tokens 0"), needs=ROOTS),
    Attempt("turns-read-only", "no space", "--output-dir turns read-only (EROFS) while it trains", LONG, code=1,
            says="Read-only file system.*make it writable", prepare=shim("write:/out/:30:9 create:/out/:30:3 rename:/out/:30:3"), needs=("gcc",)),
]  # fmt: skip

ODD_FILE_SYSTEMS = [
    Attempt(f"no-{name}", "file systems that lack something", what, command, prepare=shim(faults), needs=("gcc",), **more)
    for name, what, command, faults, more in [
        ("locks", "flock and fcntl fail with ENOLCK", MNIST, "flock::37 fcntl::37", dict(bits_of=MNIST)),
        ("rename", "rename of a checkpoint fails with EXDEV", MNIST, "rename:step-:18",
         dict(code=1, says="the last checkpoint could not be written", check=no_checkpoint_left_half)),
        ("fsync", "fsync fails with EINVAL on directories, as on some network file systems", MNIST,
         "fsync:checkpoints:22:1", dict(bits_of=MNIST)),
        ("fsync-once", "fsync fails with EIO once", LONG, "fsync:step-:5:0:1",
         dict(says="training continues", bits_of=LONG, check=no_checkpoint_left_half)),
        ("links", "hard links are not permitted", MNIST, "link::1", dict(bits_of=MNIST)),
        ("unlink", "no checkpoint can be removed (EPERM)", LONG, "unlink:checkpoints/step-:1", dict(bits_of=LONG)),
        ("whole-writes", "every write to a checkpoint takes half of its bytes", MNIST, "write:step-:0", dict(bits_of=MNIST)),
        ("whole-records", "every write to metrics.jsonl takes half of its bytes", MNIST, "write:metrics:0",
         dict(bits_of=MNIST, says="cannot be written for now")),
        ("quiet-writes", "every second write is interrupted (EINTR)", MNIST, "write:/out/:4:1:3 read:/out/:4:1:3",
         dict(bits_of=MNIST)),
        ("truncate", "a full disk whose metrics.jsonl cannot be truncated", MNIST, "write:metrics:28:1:1 truncate:metrics:5",
         dict(bits_of=MNIST, says="cannot be written for now")),
        ("stale", "metrics.jsonl turns stale (ESTALE) after five writes", LONG, "write:metrics:116:5",
         dict(says="cannot be written for now", bits_of=LONG)),
    ]
]  # fmt: skip
ODD_FILE_SYSTEMS += [
    Attempt("no-mmap-of-checkpoints", "file systems that lack something", "checkpoints cannot be mapped (ENODEV) on resume",
            f"{MNIST} && LD_PRELOAD=$PWD/faults.so FAULTS='mmap:step-:19' {MNIST}", code=(0, 2),
            prepare=lambda here: {"LD_PRELOAD": None} if shim()(here) else None, needs=("gcc",)),
]  # fmt: skip


def replaced_by_file(here: Path) -> None:
    shutil.rmtree(here / "out" / "checkpoints", ignore_errors=True)
    shutil.rmtree(here / "out" / "checkpoints", ignore_errors=True)
    (here / "out" / "checkpoints").write_text("")


def link_to_null(here: Path) -> None:
    (here / "out" / "metrics.jsonl").unlink()
    (here / "out" / "metrics.jsonl").symlink_to("/dev/null")


def forbid(here: Path) -> None:
    (here / "out" / "checkpoints").chmod(0)
    (here / "out").chmod(0o500)


# Root without what lets root pass permissions: others may not be allowed to run the interpreter.
ORDINARY = "setpriv --bounding-set -dac_override,-dac_read_search --inh-caps -all "
CHANGED = [
    Attempt("removed", "directories that change", "--output-dir is removed while it trains", LONG, code=(0, 1, 2),
            during=once(lambda here: shutil.rmtree(here / "out", ignore_errors=True))),
    Attempt("checkpoints-become-file", "directories that change", "checkpoints/ becomes a file", LONG, code=1,
            says="could not be written", during=once(replaced_by_file)),
    Attempt("permission-lost", "directories that change", "an ordinary user's directory becomes read-only", ORDINARY + LONG, code=1,
            says="Permission denied.*make it writable", during=once(forbid), needs=("root", "setpriv")),
    Attempt("record-removed", "directories that change", "metrics.jsonl is removed while it trains", LONG, bits_of=LONG,
            during=once(lambda here: (here / "out" / "metrics.jsonl").unlink())),
    Attempt("record-becomes-link", "directories that change", "metrics.jsonl becomes a link to /dev/null, then resume",
            f"{LONG}; {LONG} --epochs 13", code=(0, 2), during=once(link_to_null)),
    Attempt("tmp-removed", "directories that change", "TMPDIR is removed while it trains",
            f"{LONG}", during=once(lambda here: shutil.rmtree(here / "tmp")), bits_of=LONG),
    Attempt("checkpoint-is-zero", "checkpoints of new kinds", "a link to /dev/zero is called step-99999999.safetensors",
            f"mkdir -p out/checkpoints; ln -s /dev/zero out/checkpoints/step-99999999.safetensors; ulimit -v 20000000; {MNIST}",
            bits_of=MNIST, limit=120),
    Attempt("checkpoint-is-sparse", "checkpoints of new kinds", "a checkpoint of 1 TB, without a block on the disk",
            f"mkdir -p out/checkpoints; truncate -s 1T out/checkpoints/step-99999999.safetensors; {MNIST}", bits_of=MNIST),
    Attempt("resume-from-proc", "checkpoints of new kinds", "--resume /proc/self/mem, /dev/stdin, /dev/tty, /sys",
            f"for at in /proc/self/mem /dev/stdin /dev/full /sys /proc/kcore; do {MNIST} --resume $at; "
            "[ $? = 2 ] || exit 9; done; exit 0", limit=240),
]  # fmt: skip


def wall_clock(by: int, after: int = 8) -> Prepare:
    return shim(clock=f"{after}:{by}")


def rates_are_sane(here: Path, output: str) -> str:
    summary = json.loads((here / "out" / "summary.json").read_text())
    if not 0 < summary["train_seconds"] < 1000 or not 0 < summary["total_seconds"] < 1000:
        return f"train_seconds {summary['train_seconds']}, total_seconds {summary['total_seconds']}"
    return ""


CLOCKS = [
    Attempt("clock-forward-mpirun", "clock jumps", "the clock goes two hours forward, two ranks under mpirun", TWO, bits_of=TWO,
            prepare=wall_clock(7200), check=rates_are_sane, needs=("gcc",)),
    Attempt("clock-1970-starter", "clock jumps", "the clock stands in 1970, starter", STARTER, bits_of=STARTER,
            prepare=wall_clock(-1_795_000_000, 0), check=rates_are_sane, needs=("gcc",)),
    Attempt("clock-back-at-resume", "clock jumps", "the run is continued a day before it began, then reported",
            f"{MNIST}; rm out/summary.json; LD_PRELOAD=$PWD/faults.so CLOCK=0:-86400 {MNIST} && python -m hvdtrain.report out",
            prepare=lambda here: {"LD_PRELOAD": None} if shim()(here) else None, bits_of=MNIST, needs=("gcc",)),
]  # fmt: skip


def env(**values: str | None) -> Prepare:
    return lambda here: values


def odd_directory(slug: str, name: bytes) -> Attempt:
    """Return the attempt to write to a directory of this name, and to report it."""
    path = os.fsdecode(name)
    return Attempt(
        f"output-dir-{slug}", "names, locales, shells", f"--output-dir {name[:40]!r}",
        MNIST.replace("dir out", 'dir="$ODD"') + ' && python -m hvdtrain.report --output-dir report -- "$ODD"',
        prepare=lambda here: {"ODD": path}, check=lambda here, said: "" if (here / path / "summary.json").exists() else "no summary there",
    )  # fmt: skip


SHELLS = [
    Attempt(f"env-{name}", "names, locales, shells", what, MNIST, bits_of=MNIST, prepare=env(**values))
    for name, what, values in [
        ("c-locale", "LC_ALL=C, coercion and UTF-8 mode off", dict(LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")),
        ("no-home", "HOME is unset", dict(HOME=None, XDG_CACHE_HOME=None)),
        ("home-proc", "HOME is below /proc, where nothing can be made", dict(HOME="/proc/self", XDG_CACHE_HOME="/proc/1/x")),
        ("dumb", "TERM=dumb, COLUMNS=0, LINES=-1", dict(TERM="dumb", COLUMNS="0", LINES="-1")),
        ("ascii-io", "PYTHONIOENCODING=ascii:strict", dict(PYTHONIOENCODING="ascii:strict")),
        ("many-variables", "3,000 variables, one of 100 kB", {f"V{i}": "x" * 300 for i in range(3000)} | {"LONG": "y" * 100_000}),
        ("omp", "OMP_NUM_THREADS=0, MKL_NUM_THREADS=abc", dict(OMP_NUM_THREADS="0", MKL_NUM_THREADS="abc")),
        ("cuda", "CUDA_VISIBLE_DEVICES=-7,x", dict(CUDA_VISIBLE_DEVICES="-7,x", NVIDIA_VISIBLE_DEVICES="void")),
    ]
]  # fmt: skip
SHELLS += [
    Attempt("no-path-starter", "names, locales, shells", "PATH is unset, starter", f"py=$(command -v python); unset PATH; $py{STARTER[6:]}", bits_of=STARTER),
    Attempt("umask-777", "names, locales, shells", "umask 777, an ordinary user", f"umask 777; {ORDINARY}{MNIST}", code=2, says="Permission denied",
            needs=("root", "setpriv")),
    Attempt("python-O", "names, locales, shells", "python -OO", MNIST.replace("python", "python -OO", 1), bits_of=MNIST),
    Attempt("python-W-error-starter", "names, locales, shells", "python -W error, starter", STARTER.replace("python", "python -W error", 1), bits_of=STARTER, unsaid="x^"),
    Attempt("stdin-directory", "names, locales, shells", "standard input is a directory, at which Python itself ends", f"{STARTER} < /tmp", 1, "is a directory"),
    Attempt("cwd-not-utf8-starter", "names, locales, shells", "the same under the starter",
            f"d=$(printf 'a\\xffb'); mkdir $d; cd $d; {STARTER} && mv out ..", bits_of=STARTER),
    Attempt("cwd-plants", "names, locales, shells", "the working directory has secrets.py, json/, selectors.py and torch.py, python FILE elsewhere",
            "mkdir x; cp $ROOT/hvdtrain/mnist.py prog.py; cd x; for m in secrets selectors filelock fcntl; do echo 'raise SystemExit(66)' > $m.py; "
            f"done; python ../prog.py {FLAGS} --engine serial && mv out ..", bits_of=MNIST),
    *[odd_directory(slug, name) for slug, name in [
        ("newline", b"new\nline"), ("dash", b"-"), ("quotes", b"a'b\"c;$(touch x)`id`"), ("not-utf8", b"\xff\xfe"),
    ]],
]  # fmt: skip

LIMITS = [
    Attempt("ulimit-n-huge", "limits", "ulimit -n 1000000, starter: nobody closes them one by one", f"ulimit -n 1000000; {STARTER}", bits_of=STARTER),
    Attempt("ulimit-t", "limits", "ulimit -t 4: 4 s of CPU time (SIGXCPU)", f"ulimit -S -t 4; {MNIST} --epochs 200", code=75),
    Attempt("one-core", "limits", "one core for two ranks", f"taskset -c 0 {STARTER}", bits_of=STARTER),
]  # fmt: skip

LONG_NAME = "d" * 200  # Unix sockets have 108 bytes for a path
STREAMS = [
    Attempt("streams-full", "standard streams", "standard output and error are /dev/full, starter", f"{STARTER} > /dev/full 2>&1", bits_of=STARTER),
    Attempt("streams-closed", "standard streams", "all three are closed, starter", f"{STARTER} <&- >&- 2>&-", bits_of=STARTER),
    Attempt("streams-reader-gone", "standard streams", "the reader ends after one line", f"{LONG} -v | head -1", bits_of=LONG),
]  # fmt: skip
ODD_NAMES = [
    Attempt("tmp-long", "names, locales, shells", "TMPDIR has 240 characters, starter",
            f"mkdir tmp/{LONG_NAME}; TMPDIR=$PWD/tmp/{LONG_NAME} {STARTER}", bits_of=STARTER, leaves="^d"),
    Attempt("tmp-odd", "names, locales, shells", "TMPDIR has a space, a colon, a line break and quotes, mpirun",
            f"d=$'a b:c\\nd\\'\"'; mkdir \"$d\"; export TMPDIR=\"$PWD/$d\"; {TWO}", bits_of=TWO),
    Attempt("names-empty", "names, locales, shells", "HOME, TMPDIR and the cache are empty strings, starter", STARTER, bits_of=STARTER,
            prepare=env(HOME="", TMPDIR="", XDG_CACHE_HOME="")),
]  # fmt: skip

SURROUNDINGS = [*NO_SPACE, *ODD_FILE_SYSTEMS, *CHANGED, *CLOCKS, *SHELLS, *LIMITS, *STREAMS, *ODD_NAMES]
