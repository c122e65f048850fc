"""A Slurm of two nodes for tests: Debian's own, in the namespaces of cluster.py, with a key and files of its own."""

import os
import shutil
import subprocess
import time
from pathlib import Path

from .cluster import Cluster
from .launchers import Done

PACKAGES = ["slurm-wlm", "munge", "libpmix-dev"]  # Slurm opens libpmix.so, which Debian ships with the headers
WANTED = f"as root, apt install {' '.join(PACKAGES)}, or HVDTRAIN_TEST_INSTALL=1"
CONF = """
ClusterName=test
SlurmctldHost=a
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
StateSaveLocation={directory}/state
SlurmdSpoolDir=/run/slurmd
TmpFS=/dev/shm
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%h.log
NodeName=a,b CPUs=4 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=test Nodes=ALL Default=YES PreemptMode=OFF
PartitionName=requeue Nodes=ALL PreemptMode=REQUEUE GraceTime=60
PartitionName=cancel Nodes=ALL PreemptMode=CANCEL GraceTime=60
PartitionName=requeue_at_once Nodes=ALL PreemptMode=REQUEUE GraceTime=0
PartitionName=cancel_at_once Nodes=ALL PreemptMode=CANCEL GraceTime=0
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


def why_not() -> str:
    """Install Slurm where that is asked for; return why there is none, or an empty string."""
    missing = [tool for tool in ("slurmctld", "slurmd", "munged", "sbatch", "srun") if shutil.which(tool) is None]
    if (
        missing + lacks_pmix()
        and os.environ.get("HVDTRAIN_TEST_INSTALL")
        and os.geteuid() == 0
        and shutil.which("apt-get")
    ):
        install(PACKAGES)
        missing = []
    return f"no {', '.join(missing)}: {WANTED}" if missing else ""


def lacks_pmix() -> list[str]:
    """Return what `srun --mpi=pmix` still needs here; an empty list where it has all."""
    return (
        []
        if any(list(Path("/usr").glob(f"{place}/libpmix.so")) for place in ("lib", "lib/*", "lib64"))
        else ["libpmix.so"]
    )


def install(packages: list[str]) -> None:
    """Install Debian packages. Where a policy-rc.d or no init is there, as in containers, none of them starts a service."""
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-q"], ["install", "-qy", "--no-install-recommends", *packages]):
        subprocess.run(["apt-get", *command], env=env, check=True, timeout=240, stdout=subprocess.DEVNULL)


class Slurm:
    """Slurm on hosts a and b of `cluster`; its processes end with the hosts."""

    def __init__(self, cluster: Cluster, directory: Path):
        self.cluster, self.directory = cluster, directory / "slurm"
        (self.directory / "state").mkdir(parents=True)
        (self.directory / "slurm.conf").write_text(CONF.format(directory=self.directory))
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for host in cluster.names:
            # --force: the directory belongs to a test, not to a user called munge.
            munged = f"mkdir -p /run/munge && munged --force --key-file={key} --log-file=/run/munge.log"
            munged += " --seed-file=/run/munge.seed --pid-file=/run/munge.pid"
            assert self(host, "sh", "-c", munged).code == 0
        self.start("a", "slurmctld", "-D")
        for host in cluster.names:
            self.start(host, "slurmd", "-D")
        until = time.monotonic() + 30
        while "idle" not in (nodes := self("a", "sinfo", "-h", "-o", "%T").stdout) or nodes.count("\n") > 1:
            assert time.monotonic() < until, f"{nodes}\n{self.logs()}"
            time.sleep(0.2)

    def __call__(self, host: str, *command: str, timeout: float = 60, **extra: str) -> Done:
        return self.cluster.run(
            host, list(command), timeout=timeout, SLURM_CONF=f"{self.directory}/slurm.conf", **extra
        )

    def start(self, host: str, *command: str) -> subprocess.Popen:
        return self.cluster.start(host, list(command), quiet=True, SLURM_CONF=f"{self.directory}/slurm.conf")

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in self.directory.glob("*.log"))

    def batch(self, script: Path, timeout: float, **extra: str) -> tuple[str, str]:
        """Submit `script`, wait for its end; return its last state in Slurm's words and its log."""
        done = self("a", "sbatch", "--parsable", str(script), **extra)
        assert done.code == 0, done
        job = done.stdout.strip()
        log = script.parent / f"hvdtrain-{job}.log"
        try:
            self.wait_for_end(job, timeout)
        except AssertionError as late:
            raise AssertionError(f"{late}:\n{log.read_text() if log.exists() else self.logs()}") from None
        return self.state(job), log.read_text()

    def wait_for_end(self, job: str, timeout: float) -> None:
        """Wait until the queue has no task of this job."""
        until = time.monotonic() + timeout
        while shown := self("a", "squeue", "-h", "-j", job, "-o", "%i %T").stdout:
            assert time.monotonic() < until, f"{shown} after {timeout:.0f} s"
            time.sleep(0.3)

    def state(self, job: str) -> str:
        shown = self("a", "scontrol", "-o", "show", "job", job).stdout
        return shown.partition("JobState=")[2].split(" ")[0]
