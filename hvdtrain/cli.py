"""The command line of every command: one parser, groups of flags, and number types that reject what cannot be meant.

Does not import torch, so that a command line with a mistake fails at once.
"""

import argparse
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import choose_engine
from hvdtrain.flags import MAY_CHANGE, Flags, absolute, absolute_path, expanded, is_url, names_files

ENGINES = ("horovod", "ddp", "dataparallel", "serial")
AMP = ("off", "fp16", "bf16", "auto")
SCHEDULES = ("constant", "onecycle", "cosine", "step")  # optim.schedule_factor
OPTIMIZERS = ("sgd", "adam", "adamw")
TRACKERS = ("mlflow", "wandb")
# Flags that an engine does not support, with the values that it refuses; None: every value.
Refused = dict[str, tuple[str, ...] | None]
IN_ONE_PROCESS: Refused = {
    "compression": ("fp16", "bf16"), "reduction": ("sum",), "gradient_predivide_factor": None,
}  # fmt: skip
UNSUPPORTED: dict[str, Refused] = {
    "horovod": {},
    "ddp": {},
    "dataparallel": IN_ONE_PROCESS,
    "serial": IN_ONE_PROCESS,
}
PREDICTIONS = (".csv", ".safetensors")  # endings of --predict
LARGEST_FLOAT = (
    1e38  # upper limit of floating-point flags: they are combined with float32 weights, whose maximum is 3.4e38
)
Recipes = Mapping[str, Mapping[str, object]]
# Flags of earlier versions, with what to use instead.
GONE = {
    "--debug-page": "call torch.distributed.debug.start_debug_server in the program (a hung job prints its stacks)",
    "--energy": "run nvidia-smi --query-gpu=power.draw --format=csv --loop=1 beside the job",
    "--memory": "read cuda_bytes and resident_bytes in the ranks events of metrics.jsonl, the peak of each rank",
}


class RemovedFlag(argparse.Action):
    """A flag that --help no longer lists. const: what to use instead."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, __: object, flag: str | None = None) -> NoReturn:
        raise UserError(f"{flag} is no longer a flag: {self.const}", everywhere=True)


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError on invalid input: one line instead of the usage text from every rank."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized") and (added := re.search(r"--local[-_]rank=\d+", message)):
            remedy = "start the program by torchrun, with the same flags"
            raise UserError(f"torch.distributed.launch adds {added[0]}: {remedy}", everywhere=True)
        where = "; give them before the command" if self._subparsers else ""
        raise UserError(f"{message} (--help lists every flag{where})", everywhere=True)


class Parser(OneLineParser):
    """The parser of a command, or of a program."""

    def __init__(self, name: str, description: str | None):
        super().__init__(
            prog=name,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.may_change: frozenset[str] = MAY_CHANGE

    def add_subparsers(self, **settings: Any) -> Any:
        """The same as argparse's. Flags of the parser itself stand before the command's name."""
        # By default, argparse makes commands of this class, whose constructor takes other arguments.
        return super().add_subparsers(**{"parser_class": OneLineParser} | settings)

    def set_help(self, **texts: str) -> None:
        """Replace the help texts of flags, where a script's default is not the common one."""
        for action in self._actions:
            action.help = texts.get(action.dest, action.help)

    def may_change_on_resume(self, *names: str) -> None:
        """Declare flags of the script that may change when a run is resumed, because they do not affect training.

        names: "workers", or "--workers".
        """
        self.may_change |= {name.lstrip("-").replace("-", "_") for name in names}

    def parse_args(self, args: Sequence[str] | None = None, namespace: object = None) -> Flags:  # type: ignore[override] # ours is Flags
        """The same as `parse`, under argparse's name."""
        return self.parse(args)

    def parse(self, argv: Sequence[str] | None = None, recipes: Recipes | None = None) -> Flags:
        """Parse `argv` (default: sys.argv) and set each flag that is None from the recipe chosen by --recipe.

        Raises UserError for invalid flags and unsupported combinations.
        """
        words = sys.argv[1:] if argv is None else argv
        for word in words:  # trap: argparse takes this value away, and returns the default, or a list
            if word.startswith("--") and word.endswith("=--"):
                self.error(f"argument {word[:-3]}: expected one argument")
        flags = super().parse_args(words, Flags(self, words, self.may_change))
        for name, value in (recipes or {}).get(getattr(flags, "recipe", ""), {}).items():
            if getattr(flags, name) is None:
                setattr(flags, name, value)
        given = flags.given()
        if given.get("predict") is not None and given["evaluate"] is None:
            raise UserError("--predict needs --evaluate, the run whose model predicts", everywhere=True)
        # As typed: where a run is moved with its program, absolute paths are others.
        flags._typed = {name: value for name, value in given.items() if names_files(value)}
        # A program that changes its directory would write its record in one place, and its checkpoints in another.
        absolute(flags, absolute_path if "engine" in given else expanded)
        if "engine" in given:
            if flags.engine == "auto":
                flags.engine, flags._engine_reason = choose_engine(supports=lambda engine: supports(engine, given))
                given["engine"] = flags.engine
            refuse_unsupported(flags.engine, given)
        if given.get("deterministic") and (given["engine"], given["tuning"]) == ("horovod", "off"):
            said = "--deterministic cannot go with --tuning off, with which Horovod sums gradients as they become ready"
            raise UserError(f"{said}: leave one of them out, or use --engine ddp", everywhere=True)
        settle_local_steps(flags)
        if given.get("virtual_ranks") is not None:
            refuse_beside_virtual_ranks(flags)
        if given.get("mirror") and given["evaluate"] is not None:
            raise UserError("--mirror is for training: leave it out with --evaluate", everywhere=True)
        if given.get("weights") and given["evaluate"] is not None:
            raise UserError(
                "--weights is for training: --evaluate has the weights of its run: leave it out", everywhere=True
            )
        if is_url(given.get("resume")) and given["output_dir"] is None:
            raise UserError("--resume URL needs --output-dir, to continue the run there", everywhere=True)
        for name in ("checkpoint_steps", "mirror", "profile", "tensorboard", "track"):
            if given.get(name) and given["output_dir"] is None:
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"{flag} needs --output-dir, to write there", everywhere=True)
        return flags

    def parse_own(self, argv: Sequence[str]) -> tuple[Flags, list[str]]:
        """Parse the flags in front of a program (FILE, or -m MODULE, perhaps after --). Return them and the program's words.

        Raises UserError, as `parse` does.
        """
        alone = {flag for action in self._actions if action.nargs == 0 for flag in action.option_strings}
        end = 0
        while end < len(argv) and argv[end].startswith("-") and argv[end] not in ("-", "-m", "--"):
            end += 1 if "=" in argv[end] or argv[end] in alone else 2
        words = list(argv[end:])
        return self.parse(argv[:end]), words[1:] if words[:1] == ["--"] else words


def settle_local_steps(flags: argparse.Namespace) -> None:
    """Set the defaults of the flags beside --sync-every. Raises UserError where they do not fit the others."""
    every = getattr(flags, "sync_every", 1)
    if every == 1:
        for name, today in (("sync_within", "rank"), ("outer_lr", 1.0), ("outer_momentum", 0.0)):
            if not hasattr(flags, name):
                continue
            if (value := getattr(flags, name)) not in (None, today):
                flag = f"--{name.replace('_', '-')} {value if isinstance(value, str) else format(value, 'g')}"
                raise UserError(f"{flag} is for weights: give --sync-every, of at least 2", everywhere=True)
            setattr(flags, name, today)
        return
    if flags.reduction != "average":
        raise UserError(
            f"--sync-every {every} cannot go with --reduction {flags.reduction}: leave one of them out", everywhere=True
        )
    if flags.engine not in ("horovod", "ddp"):
        raise UserError(
            f"--sync-every {every} is not for --engine {flags.engine}: use --engine horovod or ddp", everywhere=True
        )
    flags.sync_within = flags.sync_within or "rank"
    flags.outer_lr = 1.0 if flags.outer_lr is None else flags.outer_lr
    flags.outer_momentum = 0.5 if flags.outer_momentum is None else flags.outer_momentum


def refuse_beside_virtual_ranks(flags: argparse.Namespace) -> None:
    """Raise UserError for flags with which the bits would depend on the number of processes."""
    others = (
        ("--engine dataparallel", flags.engine == "dataparallel", "use --engine horovod, ddp or serial"),
        (f"--sync-every {flags.sync_every}", flags.sync_every > 1, "leave one of them out"),
        (f"--compression {flags.compression}", flags.compression != "none", "leave one of them out"),
        ("--gradient-predivide-factor", flags.gradient_predivide_factor is not None, "leave one of them out"),
        ("--evaluate", flags.evaluate is not None, "leave --virtual-ranks out"),
    )
    for what, given, remedy in others:
        if given:
            raise UserError(f"--virtual-ranks {flags.virtual_ranks} cannot go with {what}: {remedy}", everywhere=True)


def resumed(text: str) -> str | Path:
    """Return "auto", "never" and URLs as they are, and anything else as a path. Raises ArgumentTypeError."""
    return text if text in ("auto", "never") else url_or_path(text)


def path(text: str) -> Path:
    """Return a path that is not empty, as "$UNSET" is in a shell: that would be the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty: name a directory, such as . for this one")
    return Path(text)


def url_or_path(text: str) -> str | Path:
    """Return a URL as it is, and anything else as a path. Raises ArgumentTypeError."""
    return url(text) if "://" in text else Path(text)


def url(text: str) -> str:
    """Return `text`, a URL for fsspec, without a slash at its end. Raises ArgumentTypeError."""
    if not is_url(text) or re.match(r"(file|local)://[^/$]", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL such as s3://bucket/run or file:///directory")
    if text.startswith("memory:"):
        raise argparse.ArgumentTypeError(f"{text!r} is in the memory of this process, and ends with it")
    if re.search("://[^/]*:[^/]*@", text):  # it would be in the record
        raise argparse.ArgumentTypeError("a password in the URL: give it in the settings of fsspec, or use a key")
    return text.rstrip("/")


def supports(engine: str, given: Mapping[str, object]) -> bool:
    """Return whether the engine supports all of the flags given."""
    try:
        refuse_unsupported(engine, given)
    except UserError:
        return False
    return engine in ("horovod", "ddp") or given.get("sync_every", 1) == 1


def refuse_unsupported(engine: str, given: Mapping[str, object]) -> None:
    """Raise UserError if the engine does not support one of the flags given (None: not given)."""
    for name, refused in UNSUPPORTED[engine].items():
        value = given.get(name)
        if value is None or (refused is not None and value not in refused):
            continue
        if name == "reduction" and given.get("virtual_ranks") is not None:  # one process adds up its ranks, too
            continue
        lacking = {other: UNSUPPORTED[other].get(name, ()) for other in ENGINES}
        able = [other for other, values in lacking.items() if values is not None and value not in values]
        flag, how = f"--{name.replace('_', '-')} {value}", f"leave it out, or use --engine {' or '.join(able)}"
        raise UserError(f"{flag} is not for --engine {engine}: {how}", everywhere=True)


def training_parser(name: str, description: str | None, **defaults: object) -> Parser:
    """Return a parser with the flags of every training run.

    name: of the program, used in messages. defaults: default values of these flags, such as `epochs=20, batch_size=64`.
    """
    made = Parser(name, description)
    add_run(made)
    add_fault_tolerance(made)
    for flag, instead in GONE.items():
        made.add_argument(
            flag, action=RemovedFlag, const=instead, nargs="?", dest=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    made.set_defaults(**defaults)
    return made


# fmt: off
def add_run(group: Parser) -> None:
    """Add the flags for the length of training, batches, precision, devices and output."""
    add = group.add_argument
    add("--epochs", type=positive_int, default=10, help="passes through the training set")
    add("--batch-size", type=positive_int, default=32, help="samples per rank and micro-batch")
    add("--accumulate", "--gradient-accumulation-steps", type=positive_int, default=1,
        help="micro-batches per step; their gradients are averaged")
    add("--amp", choices=AMP,
        help="compute in this type where it is safe; auto: bf16 where possible (default: auto on GPUs, else off)")
    add_compression(group)
    add("--gradient-predivide-factor", type=positive,
        help="divide gradients by this before the sum over ranks (default: 1; more with --compression fp16)")
    add("--reduction", choices=("average", "sum"), default="average",
        help="how gradients are reduced over ranks (default: average)")
    add("--virtual-ranks", type=positive_int, metavar="V",
        help="the same bits as V ranks, on any smaller number of processes (default: as many ranks as processes)")
    add("--sync-every", type=positive_int, default=1, metavar="H",
        help="exchange weights every H steps, which each rank takes alone, instead of gradients in every step (default: 1)")
    add("--sync-within", choices=("rank", "host"),
        help="with --sync-every: host: the ranks of a host average gradients in every step (default: rank)")
    add("--outer-lr", type=positive, help="with --sync-every: learning rate of the shared weights (default: 1)")
    add("--outer-momentum", type=fraction, help="with --sync-every: their Nesterov momentum (default: 0.5)")
    add("--weights", type=Path, help="start from the state_dict in this file (.pt or .safetensors)")
    add("--evaluate", type=url_or_path, metavar="PATH|URL",
        help="do not train: evaluate this checkpoint, or the newest of a run; flags not given are the run's")
    add("--predict", type=prediction_file, metavar="FILE",
        help="with --evaluate: also write what the model says about each sample (.csv or .safetensors)")
    add_engine(group)
    add("--seed", type=seed, default=1, help="seed of the weights and of the order of the samples (default: 1)")
    add("--deterministic", action="store_true",
        help="on GPUs: the same bits in each run, slower (on CPUs: without it, too)")
    add("--output-dir", type=path,
        help="write metrics.jsonl, summary.json and checkpoints to this directory (default: write nothing)")
    add("--log-steps", type=positive_int, default=50,
        help="steps between two train events in metrics.jsonl (default: 50)")
    add("--no-progress", action="store_true", help="show no progress")
    add("-v", "--verbose", action="store_true", help="print each automatic setting, one per line")
    add("--tensorboard", action="store_true", help="also write scalars to --output-dir/tensorboard")
    add("--track", choices=TRACKERS,
        help="also record the run, in --output-dir unless MLFLOW_TRACKING_URI or WANDB_API_KEY say where")
    add("--profile", type=positive_int, metavar="STEPS",
        help="record this many steps, a file per rank in --output-dir/profile (for ui.perfetto.dev)")
    add("--mfu", action="store_true", help="record the share of its peak at which rank 0's device computes")


def add_fault_tolerance(group: Parser) -> None:
    """Add the flags for checkpoints, restarts and failures (docs/restarts.md)."""
    add = group.add_argument
    add("--checkpoint-steps", type=count, metavar="N",
        help="save every N steps, and after each epoch (default: as often as costs 1 %%; 0: epochs only)")
    add("--keep", type=positive_int, default=3,
        help="how many of the newest checkpoints to keep, besides the best (default: 3; automatic ones do not count)")
    add("--resume", type=resumed, default="auto", metavar="auto|never|PATH|URL",
        help="auto: continue the run in --output-dir or --mirror; PATH: start from it; URL: continue that run")
    add("--mirror", type=url, metavar="URL",
        help="also keep checkpoints and records there, such as s3://bucket/run (docs/restarts.md)")
    add("--mirror-timeout", type=non_negative, default=60.0, metavar="SECONDS",
        help="how long the end of the run waits for what is not yet there (default: 60)")
    add("--check-steps", type=count, default=100,
        help="steps between checks that all ranks have the same weights (default: 100; 0: only before a checkpoint)")
    add("--max-skipped", type=count,
        help="skip up to this many steps in a row whose gradients are not finite (default: 0; 20 with --amp fp16)")
    add("--find-non-finite", action="store_true",
        help="name the layer in which gradients cease to be finite: slow, for a second run")
    add("--step-timeout", type=non_negative, metavar="SECONDS",
        help="end the job after so long without progress (default: 30, or 20 times the longest step; 0: never)")


def add_optimization(group: Parser) -> None:
    """Add the optimization flags of classifiers. Those not given are set from the recipe."""
    add = group.add_argument
    add("--lr", type=positive, help="peak learning rate, before scaling")
    add("--lr-scaling", choices=("none", "linear"), help="linear: multiply --lr by the ranks and by --accumulate")
    add("--lr-schedule", choices=SCHEDULES, help="how the learning rate changes during training (docs/choosing.md)")
    add("--warmup-epochs", type=non_negative, help="linear warm-up, in epochs (fractions allowed)")
    add("--optimizer", choices=OPTIMIZERS, help="what applies the gradients (default: that of the recipe)")
    add("--momentum", type=fraction, help="sgd: momentum; adam, adamw: beta 1")
    add("--weight-decay", type=non_negative, help="L2 penalty; adamw: decoupled weight decay")
    add("--label-smoothing", type=fraction, help="share of each label that is spread over all classes")
    add("--target-accuracy", type=accuracy,
        help="stop when the test accuracy (0 to 1) is reached; exit code 3 if it is not")
    group.may_change_on_resume("recipe", "target_accuracy")


def add_engine(group: Parser) -> None:
    """Add the flags for the arguments of `start`: engine, device, threads, tuning."""
    add = group.add_argument
    add("--engine", choices=("auto", *ENGINES), default="auto",
        help="what reduces the gradients; auto: ddp under torchrun, Horovod under others, serial alone (default: auto)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="where to compute (default: a GPU if there is one)")
    add("--threads", type=thread_number, help="torch threads per rank (default: this rank's share of the cores)")
    add("--tuning", choices=("auto", "off"), default="auto",
        help="auto: settings that make Horovod, MPI and malloc fast, unless you set them; off: keep all defaults")


def add_compression(group: Parser) -> None:
    """Add the flags for gradient compression."""
    add = group.add_argument
    add("--compression", choices=("none", "fp16", "bf16", "auto"), default="none",
        help="of gradients on the network; auto: fp16 between hosts, none within a host (default: none)")
    add("--fp16-allreduce", dest="compression", action="store_const", const="fp16", help="--compression fp16")
# fmt: on


def names_from(able: Collection[str]) -> Callable[[str], list[str]]:
    """Return an argparse type for a comma-separated list of names from `able`. Duplicates are removed.

    The returned function raises ArgumentTypeError for a name that is not in `able`.
    """

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in able:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(able)}")
        return list(dict.fromkeys(names))

    return parse


def prediction_file(text: str) -> Path:
    """Return `text` as the path of a file for predictions. Raises ArgumentTypeError."""
    if Path(text).suffix not in PREDICTIONS:
        raise argparse.ArgumentTypeError(f"{text!r} does not end in {' or '.join(PREDICTIONS)}")
    return Path(text)


def positive_int(text: str) -> int:
    """Return `text` as an int of at least 1. Raises ArgumentTypeError."""
    return whole(text, 1)


def port(text: str) -> int:
    """Return `text` as the number of a port. Raises ArgumentTypeError."""
    return whole(text, 1, 65535)


def count(text: str) -> int:
    """Return `text` as an int of at least 0. Raises ArgumentTypeError."""
    return whole(text, 0)


def seed(text: str) -> int:
    """Return `text` as a random seed from 0 to 2**63 - 1. Raises ArgumentTypeError."""
    return whole(text, 0, 2**63 - 1)


def byte_count(text: str) -> int:
    """Return `text` as a number of bytes from 1 to 2**50. Raises ArgumentTypeError."""
    return whole(text, 1, 2**50)


def thread_number(text: str) -> int:
    """Return `text` as a number of threads from 1 to 1024. Raises ArgumentTypeError."""
    return whole(text, 1, 1024)  # torch itself has no limit


def non_negative(text: str) -> float:
    """Return `text` as a float of at least 0. Raises ArgumentTypeError."""
    return number_that(text, "of at least 0", lambda value: value >= 0)


def positive(text: str) -> float:
    """Return `text` as a float greater than 0. Raises ArgumentTypeError."""
    return number_that(text, "above 0", lambda value: value > 0)


def accuracy(text: str) -> float:
    """Return `text` as a float greater than 0 and at most 1. Raises ArgumentTypeError."""
    return number_that(text, "above 0 and at most 1 (99 % is 0.99)", lambda value: 0 < value <= 1)


def fraction(text: str) -> float:
    """Return `text` as a float of at least 0 and less than 1. Raises ArgumentTypeError."""
    return number_that(text, "of at least 0 and below 1", lambda value: 0 <= value < 1)


def whole(text: str, least: int, most: int = 2**31 - 1) -> int:
    """Return `text` as an int from `least` to `most`. Raises ArgumentTypeError."""
    # int() also accepts 1_000, and raises a different error for more than 4,300 digits.
    value = int(text) if re.fullmatch("[+-]?[0-9]{1,4000}", text) else least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a whole number of at least {least}")
    if value > most:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is more than {most}, the largest value allowed")
    return value


def number_that(text: str, kind: str, fits: Callable[[float], bool]) -> float:
    """Return `text` as a float that `fits`. kind: which these are, in words. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not fits(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {kind}")
    if value > LARGEST_FLOAT:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {LARGEST_FLOAT:g}, the largest value allowed")
    return value
