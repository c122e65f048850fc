"""Write the launch scripts, the container recipes and the files they need from an installed hvdtrain.

python -m hvdtrain.unpack DIR                  launch/, containers/, docs/, the package itself and its build files

DIR must not exist, or be empty. It is then like a fresh clone, without tests: DIR/launch/mpirun.sh and sbatch
DIR/launch/slurm.sbatch start training, `make -C DIR setup` creates an environment, and containers are built in DIR.
"""

import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from hvdtrain import cli
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import announced
from hvdtrain.engines.lines import say
from hvdtrain.flags import Flags
from hvdtrain.launching.exit_codes import run_command

INSTALLED = Path(__file__).resolve().parent
CHECKOUT = INSTALLED / "_checkout"  # setup.py puts it into the wheel


def parse(argv: Sequence[str] | None = None) -> Flags:
    """Return the parsed command line. Raises UserError on bad input."""
    parser = cli.Parser("hvdtrain.unpack", __doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory to write to; new, or empty")
    return parser.parse_args(argv)


def unpack_files(directory: Path) -> None:
    """Write the files. Raises UserError before anything is written; OSError, shutil.Error."""
    if not CHECKOUT.is_dir():
        raise UserError(f"this hvdtrain runs from a checkout, which has launch/ and containers/: {INSTALLED.parent}")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} exists and is not empty: name another DIR")
    shutil.copytree(CHECKOUT, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    let_owner_write(directory)  # an installation may be read-only
    without = shutil.ignore_patterns("__pycache__", CHECKOUT.name)
    shutil.copytree(INSTALLED, directory / INSTALLED.name, ignore=without)
    let_owner_write(directory)


def let_owner_write(directory: Path) -> None:
    """Let the owner write in a directory, and all that is in it."""
    for path in (directory, *directory.rglob("*")):
        path.chmod(path.stat().st_mode | stat.S_IWUSR)


def main() -> int:
    flags = parse()
    if announced().size > 1:
        raise UserError("hvdtrain.unpack writes files once: start it without a launcher", everywhere=True)
    try:
        unpack_files(flags.directory)
    except OSError as error:  # shutil.Error is one
        why = error.strerror or str(error)[:200]
        raise UserError(f"{error.filename or flags.directory} cannot be written ({why}): name another DIR") from error
    say(f"written to {flags.directory}: start with {flags.directory}/docs/run.md")
    return 0


if __name__ == "__main__":
    run_command(main)
