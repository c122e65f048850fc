"""Stop signals, gradients that are not finite, flipped bits, ranks that hang or die: real launchers, bounded time."""

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.lineage import all_struck, attacked
from tests.e2e.launchers import (
    LAUNCHERS,
    PYTHON,
    ROOT,
    environment,
    events,
    free_port,
    launch,
    remaining,
    running,
    wait_for_training,
)

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("launcher", "rank", "point", "kind", "blame"),
    [
        ("starter", 1, "backward", "stop", "does not answer"),
        pytest.param("mpirun", 1, "load", "spin", "keeps the others waiting, at ", marks=SLOW),
        pytest.param("mpirun", 0, "load", "stop", "does not answer", marks=SLOW),
        pytest.param("mpirun", 1, "snapshot", "spin", "keeps the others waiting, at ", marks=SLOW),
    ],
)
def test_a_hung_rank_is_named_and_ends_the_job(launcher, rank, point, kind, blame, tmp_path):
    # More ranks than cores: those that wait in MPI spin, but that does not keep the others from running.
    ranks, attack = 4 if kind == "spin" else 2, dict(rank=rank, point=point, kind=kind, count=5)
    done = attacked(tmp_path, ranks=ranks, launcher=launcher, flags="--step-timeout 4 --epochs 200", attack=attack)
    took = time.time() - all_struck(tmp_path)[0]
    assert done.code not in (0, 2, 75), done
    assert f"rank {rank} on {os.uname().nodename} {blame}" in done.stderr, done
    # And where the others stood. 4 s of silence, 3 s for answers (6 s more before rank 0 is doubted), the launcher's end.
    assert f"rank {1 - rank} on " in done.stderr, done
    assert re.search(r"waits at (mnist|attacked)\.py:\d+", done.stderr), done  # no line of a library
    assert took < 120, done  # on quiet cores 10 to 20; else it would hang for ever


@pytest.mark.slow
def test_a_checkpoint_whose_copy_takes_longer_than_the_timeout_is_not_a_hang(tmp_path):
    """8 s in all: each tensor that has been copied is progress."""
    done = attacked(
        tmp_path, ranks=2, flags="--step-timeout 2", attack=dict(rank=0, point="snapshot", count=2, kind="slow")
    )
    assert done.code == 0, done
    assert time.time() - all_struck(tmp_path)[0] > 8, done


@pytest.mark.slow
def test_no_false_alarm_where_ranks_hardly_get_a_core(tmp_path):
    """Each of the polite ranks has a thousandth of a core for 15 s, which is far below a step in 2 s."""
    autogroup = Path("/proc/sys/kernel/sched_autogroup_enabled")
    if autogroup.exists() and autogroup.read_text().strip() != "0":
        pytest.skip("nice counts only within a session here: echo 0 > /proc/sys/kernel/sched_autogroup_enabled")
    command = f"nice -n 19 {LAUNCHERS['mpirun'].format(ranks=2)} {PYTHON} -m hvdtrain.mnist --dataset digits"
    ranks = subprocess.Popen(
        [*shlex.split(command), "--epochs=30", "--step-timeout=2", "--no-progress", f"--output-dir={tmp_path}"], cwd=ROOT,
        env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    crowd = []
    try:
        wait_for_training(tmp_path)
        crowd = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(16 * os.cpu_count())]
        time.sleep(15)
    finally:
        for process in crowd:
            process.kill()
            process.wait()
    _, errors = ranks.communicate(timeout=120)
    assert ranks.returncode == 0, errors
    times = [event["time"] for event in events(tmp_path)]
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) > 12, "they were not kept from running"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "said"), [(signal.SIGKILL, "died"), (signal.SIGSTOP, "does not answer")])
def test_without_a_launcher_the_others_end_too(number, said, tmp_path):
    """DistributedDataParallel, each rank started by hand: nobody but the ranks themselves can end the job."""
    port = str(free_port())
    command = f"{PYTHON} -m hvdtrain.mnist --engine ddp --dataset digits --epochs 100000 --no-progress"
    ranks = [
        subprocess.Popen(
            [*shlex.split(command), "--step-timeout", "4", "--output-dir", str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE,
            env=environment(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port), text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        wait_for_training(tmp_path)
        ranks[1].send_signal(number)
        _, errors = ranks[0].communicate(timeout=120)
        assert ranks[0].returncode == 1, errors
        assert f"rank 1 on {os.uname().nodename} {said}" in errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [("", ", the loss; "), ("--find-non-finite", ", input of 0 (Conv2d); "), ("--max-skipped 1", ", the loss; ")],
)
def test_gradients_that_are_not_finite_name_step_rank_and_layer(flags, said, tmp_path):
    attack = dict(rank=1, point="load", count=5, kind="nan")
    done = attacked(tmp_path, flags=f"{flags} --epochs 1", attack=attack)
    skipped = "skipped" in flags
    assert done.code == (0 if skipped else 1), done
    (event,) = events(tmp_path, "error")
    assert "step 5: gradients are not finite: rank 1 on " in event["message"]
    assert said in event["message"]
    if skipped:
        assert events(tmp_path, "end")[0]["test_loss"] < 100  # no NaN, in the running statistics either


@pytest.mark.slow
def test_a_flipped_bit_is_found_within_one_interval_and_its_rank_named(tmp_path):
    # Not the lowest bit: the next update may round it away, as on an Intel Xeon, and then the weights are right again.
    attack = dict(rank=2, point="update", count=5, kind="flip", bit=3, parameter=4)
    done = attacked(tmp_path, ranks=3, flags="--model convnet --check-steps 4 --epochs 200", attack=attack)
    assert done.code == 1, done
    assert "rank 2 on " in done.stderr, done
    assert "has different weights than the other ranks: first in 4.weight, between steps " in done.stderr, done
    assert int(re.search(r"between steps \d+ and (\d+)", done.stderr)[1]) in range(5, 9), done
    steps = [line["step"] for line in events(tmp_path, "checkpoint")]
    assert max(steps) < 5  # none with the wrong weights


@pytest.mark.parametrize(
    ("launcher", "number", "whom"),
    [
        ("starter", signal.SIGTERM, "the launcher"),
        # by a patch of ours: to mpirun, and that to each rank
        pytest.param("horovodrun", signal.SIGUSR1, "the launcher", marks=SLOW),
        pytest.param("gloo", signal.SIGTERM, "rank 1", marks=SLOW),
        pytest.param("mpirun", signal.SIGINT, "both ranks", marks=SLOW),
    ],
)
def test_stop_signals_save_the_same_step_and_leave(launcher, number, whom, tmp_path):
    flags = f"--no-progress --dataset digits --epochs 100000 --output-dir {tmp_path}"  # it would train for hours
    command = f"{LAUNCHERS[launcher].format(ranks=2)} {PYTHON} -m hvdtrain.mnist {flags}"
    with running(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as (process, job):
        wait_for_training(tmp_path)
        ranks = [rank["pid"] for rank in events(tmp_path, "start")[0]["ranks"]]
        for pid in {"the launcher": [process.pid], "rank 1": ranks[1:], "both ranks": ranks}[whom]:
            os.kill(pid, number)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 75, output
        (stop,) = events(tmp_path, "stop")
        assert stop["reason"].startswith(f"{number.name} on rank"), stop
        assert events(tmp_path, "checkpoint")[-1]["step"] == stop["step"]
        assert f"saved after step {stop['step']}: run the same command to resume" in output
        assert remaining(job) == []


LEAVING = """
import atexit, os, sys
from pathlib import Path

out, rank = Path(sys.argv[-1]), os.environ["OMPI_COMM_WORLD_RANK"]
atexit.register(lambda: (out / f"left.{rank}").touch())  # first: it is called after the end of MPI
from hvdtrain.mnist import main

code = main()
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "/dev/shm/vader_segment" in line}
(out / f"mapped.{rank}").write_text("\\n".join(mapped))
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_after_ctrl_c_ranks_leave_without_mpiruns_answer(launcher, tmp_path):
    """mpirun does not answer MPI_Finalize while it kills a job."""
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING)
    flags = f"--no-progress --dataset digits --epochs 100000 --output-dir {tmp_path}"
    # Four seconds each from SIGCONT to SIGTERM and to SIGKILL, for a busy machine.
    patience = {"OMPI_MCA_odls_base_sigkill_timeout": "4"}
    command = f"{LAUNCHERS[launcher].format(ranks=2)} {PYTHON} {script} {flags}"
    with running(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=patience) as (process, job):
        wait_for_training(tmp_path)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=120)
        assert {path.name for path in tmp_path.iterdir()} >= {"left.0", "left.1"}, output
        assert events(tmp_path, "stop")[0]["reason"].startswith("SIGTERM on rank")
        mapped = [path for rank in range(2) for path in (tmp_path / f"mapped.{rank}").read_text().splitlines()]
        assert mapped, "MPI has no files in /dev/shm"
        assert not any(map(os.path.exists, mapped)), mapped  # MPI has removed them
        assert remaining(job) == []


@pytest.mark.slow
def test_ranks_with_different_flags_are_refused():
    command = f"{PYTHON} -m hvdtrain.mnist --dataset digits --lr"
    done = launch(f"mpirun --oversubscribe -np 1 {command} 0.1 : -np 1 {command} 0.2", timeout=120)
    assert done.code == 2, done
    assert (
        "ranks 0 and 1 have different flags (--lr 0.1 and 0.2): start every rank with the same command" in done.stderr
    )


@pytest.mark.slow
def test_a_rank_that_never_comes_to_the_start_ends_the_job():
    body = "import sys, time; from hvdtrain import mnist; from hvdtrain.engines import launchers; "
    body += "from hvdtrain.launching.exit_codes import run_command; from hvdtrain.guards import judge, limits; "
    body += "limits.WAITING_LINE_SECONDS = 1.0; judge.PHASE_SECONDS['start-up'] = 3.0; "
    body += "launchers.announced().rank and time.sleep(1000); run_command(mnist.main)"
    start = LAUNCHERS["mpirun"].format(ranks=2)
    done = launch(f'{start} {PYTHON} -c "{body}" --dataset digits --no-progress', timeout=120)
    assert done.code == 1, done
    said = r"rank 0 on .* waits for the other ranks to start the engine, at horovod.py:\d+, __init__"
    assert re.search(rf"warning: {said}, for 1 s", done.stderr), done
    assert re.search(rf"hvdtrain: error: {said}; start-up did not finish within 3 s", done.stderr), done
