"""The garbage collector: off while a command of ours imports torch, on again when it runs."""

import gc
import subprocess
import sys

import pytest

from hvdtrain.engines import exit_codes


@pytest.mark.parametrize(("name", "enabled"), [("-m", False), ("train.py", True)])
def test_it_rests_only_where_a_command_of_ours_is_started(name, enabled):
    program = f"import sys; sys.argv = [{name!r}]; import hvdtrain, gc; print(gc.isenabled())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{enabled}\n", done


def test_it_is_on_when_the_program_runs():
    gc.disable()
    try:
        with pytest.raises(SystemExit) as ended:
            exit_codes.run(lambda: 0 if gc.isenabled() and gc.get_freeze_count() else 1)
    finally:
        gc.enable()
        gc.unfreeze()
    assert ended.value.code == 0
