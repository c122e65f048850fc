"""Write one page with plots from the output directories of runs: metrics, time by phase, differences between runs.

python -m hvdtrain.report out                                    one run
python -m hvdtrain.report out-1 out-2 --output-dir runs/report   several runs, compared; differences first
python -m hvdtrain.report out-1 out-2 --figures svg,pdf          also each plot for a paper, one column (85 mm) wide
python -m hvdtrain.report out-1 out-2 --csv runs.csv             no page, but a table of all numbers for other tools

DIR is the --output-dir of a run of hvdtrain.mnist, hvdtrain.imagenet or your own program, with any metrics. The run may
still be running, or have been killed. Runs that differ only in --seed are combined into their mean and spread, unless
--each-run is given. The page (report.html) needs no network and no other file; each plot is also written as PNG. It shows
the state at the time of the command: repeat the command to update it.
"""

from hvdtrain.launching import startup

if __name__ == "__main__":
    startup.begin()

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from hvdtrain import cli
from hvdtrain.analysis import plotting
from hvdtrain.analysis.reporting import groups, page, pictures, runs, table
from hvdtrain.engines import files
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.launchers import announced
from hvdtrain.launching.exit_codes import run


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """Return the parsed command line. Raises UserError on bad input."""
    parser = cli.Parser("hvdtrain.report", __doc__)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="--output-dir of a run")
    parser.add_argument(
        "--output-dir", type=Path, default=Path("runs/report"), help="for the page and PNGs (default: runs/report)"
    )
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="write a table of all recorded numbers to FILE, and no page"
    )
    parser.add_argument(
        "--figures",
        type=cli.some_of(plotting.FORMATS),
        default=[],
        metavar="FORMATS",
        help="svg, pdf or svg,pdf: also write each plot for a paper, one column (85 mm) wide",
    )
    parser.add_argument(
        "--each-run", action="store_true", help="do not combine the seeds of a configuration into their mean"
    )
    return parser.parse_args(argv)


def tabulate(directories: Sequence[Path], path: Path) -> int:
    """Write the numbers of the runs to `path` as comma-separated values, and return the number of rows. Raises UserError."""
    found = runs.read_runs(directories)
    try:
        with files.replacing(path, "wb") as file:
            text, rows = table.comma_separated(found)
            file.write(text.encode())
    except OSError as error:
        raise UserError(f"--csv {path} cannot be written ({error.strerror}): name another") from error
    return rows


def make(directories: Sequence[Path], output_dir: Path, formats: Sequence[str] = (), each_run: bool = False) -> Path:
    """Read the runs, write the page and the plots, and return the page's path. Raises UserError.

    formats: file formats of the plots for papers. each_run: do not combine the seeds of a configuration.
    """
    found = groups.fold(runs.read_runs(directories), each_run)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        whole = page.build(found, list(pictures.draw_all(found, output_dir, formats)))
        path = output_dir / "report.html"
        with files.replacing(path, "wb") as file:
            file.write(whole.encode())
    except OSError as error:
        raise UserError(f"--output-dir {output_dir} cannot be written ({error.strerror}): name another") from error
    return path


def main() -> int:
    """Run the command. Return its exit code."""
    flags = parse()
    if announced().size > 1:
        raise UserError("hvdtrain.report reads what a run has left: start it without a launcher", everywhere=True)
    if flags.csv is not None:
        print(f"{flags.csv}: {tabulate(flags.directories, flags.csv):,} rows")
        return 0
    plotting.require_matplotlib(otherwise="")
    print(f"{make(flags.directories, flags.output_dir, flags.figures, flags.each_run)}: open it in a browser")
    return 0


if __name__ == "__main__":
    run(main)
