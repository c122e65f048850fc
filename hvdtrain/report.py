"""Write one page with plots from the output directories of runs: metrics, time by phase, differences between runs.

python -m hvdtrain.report out                                    one run
python -m hvdtrain.report out-1 out-2 --output-dir runs/report   several runs, compared; differences first

DIR is the --output-dir of a run of hvdtrain.mnist, hvdtrain.imagenet or your own program, with any metrics. The run may
still be running, or have been killed. The page (report.html) needs no network and no other file. It shows the state at the
time of the command: repeat the command to update it.
"""

from collections.abc import Sequence
from pathlib import Path

from hvdtrain import cli
from hvdtrain.analysis import plotting
from hvdtrain.analysis.reporting import page, runs
from hvdtrain.engines import atomic, files
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import announced
from hvdtrain.engines.lines import say
from hvdtrain.flags import Flags
from hvdtrain.launching.exit_codes import run


def parse(argv: Sequence[str] | None = None) -> Flags:
    """Return the parsed command line. Raises UserError on bad input."""
    parser = cli.Parser("hvdtrain.report", __doc__)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="--output-dir of a run")
    default = Path("runs/report")
    parser.add_argument("--output-dir", type=Path, default=default, help="for the page (default: runs/report)")
    return parser.parse_args(argv)


def make(directories: Sequence[Path], output_dir: Path) -> Path:
    """Read the runs, write the page, and return its path. Raises UserError."""
    found = runs.read_runs(directories)
    whole = page.build(found, page.draw_all(found))
    path = output_dir / "report.html"
    with files.output_to(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
        atomic.write(path, whole.encode(), sync=False)
    return path


def main() -> int:
    """Run the command. Return its exit code."""
    flags = parse()
    if announced().size > 1:
        raise UserError("hvdtrain.report reads what a run has left: start it without a launcher", everywhere=True)
    plotting.require_matplotlib()
    say(f"{make(flags.directories, flags.output_dir)}: open it in a browser")
    return 0


if __name__ == "__main__":
    run(main)
