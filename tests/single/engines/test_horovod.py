"""What the horovod engine checks before Horovod starts."""

import resource
import sys

import pytest

from hvdtrain.engines.errors import UserError
from hvdtrain.engines.horovod import HorovodEngine
from hvdtrain.engines.library_settings import refuse_too_few_files


def test_where_horovod_cannot_be_imported_one_line_says_how_to_build_it(monkeypatch):
    for name in ("horovod", "horovod.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"^Horovod cannot be imported \(.*horovod.*\): run `make setup`"):
        HorovodEngine(tuning=False, rank=0, size=1, launcher="none")


def test_gloo_has_the_open_files_that_it_needs_or_the_rank_says_how_many(monkeypatch):
    set_: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: set_.append(limits))
    for limits in ((900, 1000), (36, 900)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limits=limits: limits)
        refuse_too_few_files(8, 8, 1)
    ((needed, hard),) = set_  # of the second
    assert 36 < needed < 900 == hard
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (36, 36))
    said = f"^this user may open fewer files than Gloo needs for 8 ranks: raise `ulimit -n` to {needed}, or use fewer"
    with pytest.raises(UserError, match=said):
        refuse_too_few_files(8, 8, 1)
