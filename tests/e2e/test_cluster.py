"""Hosts for tests end with the process that made them, also where it is killed while a rank there is stopped."""

import signal
import subprocess
import sys

from hvdtrain.launching.processes import is_stopped
from tests.e2e.cluster import needs_hosts
from tests.e2e.launchers import MARK, ROOT, environment, members, new_job
from tests.waiting import wait_for

MAKES = """
import sys
from pathlib import Path
from tests.e2e.cluster import Cluster
with Cluster(Path(sys.argv[1]), ["a"]) as cluster:
    rank = cluster.start("a", ["sh", "-c", "kill -STOP $$"])
    print(cluster.job, flush=True)
    rank.wait()
"""


@needs_hosts
def test_hosts_end_with_the_process_that_made_them(tmp_path):
    made_by = subprocess.Popen(
        [sys.executable, "-c", MAKES, str(tmp_path)],
        cwd=ROOT, env=environment(**{MARK: new_job()}), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert made_by.stdout is not None
    job = made_by.stdout.readline().strip()
    wait_for(lambda: any(map(is_stopped, members(job))), lambda: f"nothing is stopped: {members(job)}")
    made_by.send_signal(signal.SIGKILL)
    made_by.wait()
    wait_for(lambda: not members(job), lambda: f"left behind: {members(job)}")
