"""Hosts for tests: namespaces of this machine, each with its own name, network, processes, /run and shared memory.

    with Cluster(tmp_path, ["a", "b"]) as cluster:
        cluster.run("a", ["hostname"])

Joined by a bridge; what lies on disk is shared between them, as on a cluster. Everything lives in namespaces whose first
process is ours, so that nothing is left when it ends. It ends at the latest with the process that made the hosts. Needs
root; ssh between hosts needs OpenSSH's sshd.
"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.hidden_gpus import HIDDEN

from .launchers import MARK, ROOT, Done, environment, kill, new_job, remaining

SSHD = "/usr/sbin/sshd"
# A login has an environment of its own. SetEnv counts once: all in one line.
SET_ENVIRONMENT = "SetEnv " + " ".join(f"{name}={value}" for name, value in HIDDEN.items())
TOOLS = ("ip", "unshare", "nsenter", "setpriv", "tc")
WITH_US = ("setpriv", "--pdeathsig", "KILL")  # a command after it is killed when the thread that started it has ended
ENTER = ("--net", "--uts", "--mount", "--pid", "--ipc")


def why_not() -> str:
    """Return why this machine cannot play several hosts, or an empty string."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)}: apt install iproute2 util-linux"
    tried = subprocess.run(
        ["unshare", *ENTER, "--fork", "ip", "link", "add", "probe0", "type", "veth", "peer", "name", "probe1"],
        capture_output=True, text=True,
    )  # fmt: skip
    return f"the kernel gives no network namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


needs_hosts = pytest.mark.skipif(bool(reason := why_not()), reason=reason or "-")
needs_ssh = pytest.mark.skipif(not Path(SSHD).exists(), reason="no sshd: apt install openssh-server")


class Cluster:
    """Hosts by name, at 10.77.0.1 and following, on `eth0`.

    rate: shapes what each host sends, in tc's words, such as "100mbit".
    """

    def __init__(self, directory: Path, names: list[str], *, rate: str = "", ssh: bool = False, domain: str = ""):
        self.directory = directory / "cluster"
        self.directory.mkdir()
        self.names = names
        self.job = new_job()
        self._first: dict[str, int] = {}  # the first process in each host's namespaces
        self._holders: list[subprocess.Popen] = []
        self._rate, self._ssh, self._domain = rate, ssh, domain

    def __enter__(self) -> "Cluster":
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        kill(self.job)
        for holder in self._holders:
            holder.kill()
            holder.wait()

    def address(self, name: str) -> str:
        return f"10.77.0.{self.names.index(name) + 1}"

    def network(self, name: str) -> str:
        """Return the network namespace of host `name`, as a file: a container can be started in it."""
        return f"/proc/{self._first[name]}/ns/net"

    def _port(self, name: str) -> str:
        return f"port{self.names.index(name)}"  # of the switch

    def _hold(self, label: str) -> int:
        """Return the process that keeps a new set of namespaces alive."""
        holder = subprocess.Popen(
            [*WITH_US, "unshare", *ENTER, "--fork", "--kill-child", "--mount-proc", "sleep", "infinity"],
            env=environment(**{MARK: self.job}), stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self._holders.append(holder)
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
        until = time.monotonic() + 10
        while not (found := children.read_text().split()):
            assert time.monotonic() < until, f"no namespaces for {label}"
            time.sleep(0.01)
        return int(found[0])

    def _build(self) -> None:
        hosts = self.directory / "hosts"
        lines = [f"{self.address(name)} {name} {name}.{self._domain}\n" for name in self.names]
        hosts.write_text("".join(["127.0.0.1 localhost\n", *lines]))
        if self._ssh:
            self._write_ssh()
        self._first = {name: self._hold(name) for name in self.names}
        self._join_by_switch()
        for name, first in self._first.items():
            # A burst holds the largest packets whole, as for a network card: cut up here, 1 Gbit/s keeps two cores busy.
            shape = (
                f"tc qdisc add dev eth0 root tbf rate {self._rate} burst 128kb latency 100ms" if self._rate else "true"
            )
            self._sh(
                first,
                f"hostname {name} && ip link set dev lo up && ip addr add {self.address(name)}/24 dev eth0 && "
                f"ip link set dev eth0 up && {shape} && mount --bind '{hosts}' /etc/hosts && "
                "mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /run && mkdir /run/sshd",
            )
            if self._ssh:
                self._sh(first, f"mount --bind '{self.directory}/ssh_config' /etc/ssh/ssh_config")
                self._popen(name, [SSHD, "-D", "-e", "-f", f"{self.directory}/sshd_config"], stderr=subprocess.DEVNULL)
        until = time.monotonic() + 20
        while self._ssh and not all("sshd" in {program for _, program in self.listening(name)} for name in self.names):
            assert time.monotonic() < until, "sshd does not listen"
            time.sleep(0.05)

    def _join_by_switch(self) -> None:
        switch = self._switch = self._hold("the switch")
        self._sh(switch, "ip link add br0 type bridge && ip link set dev br0 up")
        for name, first in self._first.items():
            # In our own process namespace, where the two have these numbers.
            port = self._port(name)
            cable = f"ip link add eth0 type veth peer name {port} netns {switch}".split()
            subprocess.run(["nsenter", "--target", str(first), "--net", *cable], check=True, timeout=20)
            self._sh(switch, f"ip link set dev {port} master br0 && ip link set dev {port} up")

    def _write_ssh(self) -> None:
        for key in ("host", "user"):
            path = self.directory / f"{key}_key"
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True, timeout=20)
        public = (self.directory / "host_key.pub").read_text()
        known = "".join(f"{name},{self.address(name)} {public}" for name in self.names)
        (self.directory / "known_hosts").write_text(known)
        (self.directory / "sshd_config").write_text(
            f"HostKey {self.directory}/host_key\nAuthorizedKeysFile {self.directory}/user_key.pub\nStrictModes no\n"
            "PermitRootLogin prohibit-password\nPasswordAuthentication no\nUsePAM no\nPidFile none\n"
            f"{SET_ENVIRONMENT}\n"
        )
        (self.directory / "ssh_config").write_text(
            f"IdentityFile {self.directory}/user_key\nUserKnownHostsFile {self.directory}/known_hosts\n"
            "StrictHostKeyChecking yes\nLogLevel ERROR\n"
        )

    def _command(self, first: int, command: list[str]) -> list[str]:
        return ["nsenter", "--target", str(first), *ENTER, "--", *command]

    def inside(self, name: str, command: list[str]) -> list[str]:
        """Return the command that runs `command` on host `name`."""
        return self._command(self._first[name], command)

    def _sh(self, first: int, script: str) -> None:
        done = subprocess.run(self._command(first, ["sh", "-c", script]), capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, f"{script}: {done.stderr}"

    def sh(self, name: str, script: str) -> None:
        """Run a shell script on host `name`, as its administrator would."""
        self._sh(self._first[name], script)

    def listening(self, name: str) -> set[tuple[str, str]]:
        """Return the local address and the program of every socket that listens on host `name`."""
        command = self._command(self._first[name], ["ss", "-Hltunp"])
        shown = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
        return {
            (line.split()[4].rpartition(":")[0], line.partition('(("')[2].partition('"')[0])
            for line in shown.splitlines()
        }

    def _popen(self, name: str, command: list[str], extra: dict[str, str] | None = None, **options) -> subprocess.Popen:
        options = dict(cwd=ROOT, stdin=subprocess.DEVNULL, text=True, start_new_session=True) | options
        # Also nsenter is killed: it stops itself when its child is stopped, and would keep our pipes open for ever.
        return subprocess.Popen(
            [*WITH_US, *self._command(self._first[name], command)],
            env=environment(**{MARK: self.job, **(extra or {})}),
            **options,
        )

    def start(self, name: str, command: list[str], *, quiet: bool = False, **extra: str) -> subprocess.Popen:
        """Start a command on host `name`; `extra`: variables. Unless `quiet`, its output waits for `finish`."""
        output = subprocess.DEVNULL if quiet else subprocess.PIPE
        return self._popen(name, command, extra, stdout=output, stderr=output)

    def run(self, name: str, command: list[str], *, timeout: float = 60, **extra: str) -> Done:
        return self.finish({name: self.start(name, command, **extra)}, timeout)[name]

    def finish(self, processes: dict[str, subprocess.Popen], timeout: float) -> dict[str, Done]:
        """Wait for all of `processes`. Raises AssertionError where one is not over after `timeout` seconds in all."""
        began, done = time.monotonic(), {}
        for name, process in processes.items():
            try:
                left = max(0.1, timeout - (time.monotonic() - began))
                out, err = process.communicate(timeout=left)
            except subprocess.TimeoutExpired:
                kill(self.job)
                raise AssertionError(f"{name} not over after {timeout:.0f} s: {process.communicate()}") from None
            done[name] = Done(process.returncode, out, err, time.monotonic() - began)
        return done

    def cut(self, name: str) -> None:
        """Pull the cable of host `name`: nothing arrives there, nothing comes back, and nobody is told."""
        self._sh(self._switch, f"ip link set dev {self._port(name)} down")

    def vanish(self, name: str) -> None:
        """Cut the cable, then end every process of the host."""
        self.cut(name)
        os.kill(self._first[name], signal.SIGKILL)

    def processes(self) -> list[str]:
        """Return what stays alive on any host beside the namespaces' own first process and sshd: see `remaining`."""
        return remaining(self.job, own={"sleep", "sshd", "unshare", "nsenter"})
