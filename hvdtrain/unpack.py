"""Write the launch scripts, the container recipes and the files they need from an installed hvdtrain.

python -m hvdtrain.unpack DIR                  launch/, containers/, docs/, the package itself and its build files
python -m hvdtrain.unpack DIR --overwrite      also replace files that differ: edited, or of another version

DIR is then like a fresh clone, without tests: DIR/launch/mpirun.sh and sbatch DIR/launch/slurm.sbatch start training,
`make -C DIR setup` creates an environment, and containers are built in DIR. Identical files are left as they are; if an
existing file differs, nothing is written.
"""

import shutil
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from hvdtrain import cli
from hvdtrain.engines import files
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import announced
from hvdtrain.launching.exit_codes import run

PACKAGE = Path(__file__).resolve().parent
BESIDE = PACKAGE / "_checkout"  # setup.py puts it into the wheel


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """Return the parsed command line. Raises UserError on bad input."""
    parser = cli.Parser("hvdtrain.unpack", __doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory to write to; it need not exist")
    parser.add_argument("--overwrite", action="store_true", help="replace files that differ, and list them")
    return parser.parse_args(argv)


def packed() -> Iterator[tuple[Path, Path]]:
    """Yield each file of the wheel and its path relative to DIR."""
    for root, place in ((BESIDE, Path()), (PACKAGE, Path(PACKAGE.name))):
        for path in sorted(root.rglob("*")):
            inside = path.relative_to(root)
            if (
                path.is_file()
                and "__pycache__" not in inside.parts
                and (root == BESIDE or inside.parts[0] != BESIDE.name)
            ):
                yield path, place / inside


def unpack(directory: Path, overwrite: bool) -> tuple[int, list[Path]]:
    """Write the files, and return their number and those that were replaced. Raises UserError before anything is written."""
    if not BESIDE.is_dir():
        raise UserError(f"this hvdtrain runs from a checkout, which has launch/ and containers/: {PACKAGE.parent}")
    wanted = []
    for path, place in packed():
        there = directory / place
        if not there.is_file() or there.is_symlink() or there.read_bytes() != path.read_bytes():
            wanted.append((path, there))
    differing = [there for _, there in wanted if there.exists() or there.is_symlink()]
    if differing and not overwrite:
        more = f" and {len(differing) - 3} more" * (len(differing) > 3)
        which = f"{', '.join(str(path) for path in differing[:3])}{more}"
        raise UserError(f"{which}: exist with other content: name another DIR, or --overwrite them")
    for path, there in wanted:
        there.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(there, "wb") as file:
            file.write(path.read_bytes())
        shutil.copymode(path, there)
    return len(wanted), differing


def main() -> int:
    flags = parse()
    if announced().size > 1:
        raise UserError("hvdtrain.unpack writes files once: start it without a launcher", everywhere=True)
    try:
        count, replaced = unpack(flags.directory, flags.overwrite)
    except OSError as error:
        raise UserError(
            f"{error.filename or flags.directory} cannot be written ({error.strerror}): name another DIR"
        ) from error
    for path in replaced:
        print(f"replaced {path}")
    print(f"{count} files written to {flags.directory}: start with {flags.directory}/docs/launching.md")
    return 0


if __name__ == "__main__":
    run(main)
