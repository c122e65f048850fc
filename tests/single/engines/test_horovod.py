"""What the horovod engine checks before Horovod starts."""

import subprocess
import sys

import pytest

from hvdtrain.engines.errors import UserError
from hvdtrain.engines.horovod import HorovodEngine

FILES = """
import resource
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.horovod import refuse_too_few_files
for soft, hard in ((900, 1000), (36, 900), (36, 36)):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        refuse_too_few_files(8, 8, 1)
    except UserError as error:
        print(error)
    else:
        print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_where_horovod_cannot_be_imported_one_line_says_how_to_build_it(monkeypatch):
    for name in ("horovod", "horovod.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"^Horovod cannot be imported \(.*horovod.*\): run `make setup`"):
        HorovodEngine(tuning=False, rank=0, size=1, launcher="none")


def test_gloo_has_the_open_files_that_it_needs_or_the_rank_says_how_many():
    done = subprocess.run([sys.executable, "-c", FILES], capture_output=True, text=True, timeout=100)
    kept, raised, said = done.stdout.splitlines()
    assert kept == "900", done
    assert 36 < int(raised) < 100, done
    assert said == (
        "this user may open 36 files, fewer than Gloo needs for 8 ranks: "
        f"raise `ulimit -n` to {raised}, or use fewer ranks"
    )
