"""Run a script's main several times in one process, as every rank of `launchers.several` does.

several_runs.py MODULE DIRECTORY

DIRECTORY/runs.json: name -> words, variables first. What came of each lies beside it: NAME.RANK.out, .err and .code.
"""

import importlib
import itertools
import json
import os
import re
import sys
import traceback
from pathlib import Path

from hvdtrain.engines.launchers import announced
from hvdtrain.launching import exit_codes

VARIABLE = re.compile(r"[A-Z_]+=")


def once(main, rank: int, path: Path) -> bool:
    """Call `main` as its script does; output and error go into files meanwhile. Tell whether it ended as it should."""
    kept = {}
    for handle, what in ((1, "out"), (2, "err")):
        kept[handle] = os.dup(handle)
        with Path(f"{path}.{rank}.{what}").open("wb") as file:
            os.dup2(file.fileno(), handle)
    code = None
    try:
        exit_codes.run_command(main)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for handle, before in kept.items():
            os.dup2(before, handle)
            os.close(before)
    Path(f"{path}.{rank}.code").write_text(str(code))
    return code is not None


if __name__ == "__main__":
    module, directory = sys.argv[1], Path(sys.argv[2])
    exit_codes.LINGER_SECONDS = 0.0  # no rank ends another by leaving first: the job goes on
    told = announced()
    if told.launcher in ("none", "mpirun (Open MPI)"):
        # MPI can be started once in a process. Where another than Horovod did so, Horovod leaves it running between runs.
        os.environ |= {"OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_ess_singleton_isolated": "1"}
        import mpi4py.MPI  # noqa: F401
    script = importlib.import_module(module)
    environment = dict(os.environ)
    for name, words in json.loads((directory / "runs.json").read_text()).items():
        flags = list(itertools.dropwhile(VARIABLE.match, words))
        os.environ |= dict(word.split("=", 1) for word in words[: len(words) - len(flags)])
        sys.argv = [f"{module.replace('.', '/')}.py", *flags]
        if not once(script.main, told.rank, directory / name):
            sys.exit(
                f"{name}: see {directory / name}.{told.rank}.err"
            )  # the ranks may not agree any more on where they are
        os.environ.clear()
        os.environ.update(environment)
