"""Ask this host, before each attempt, for what would cost a run. launch/restarts.sh and launch/slurm.sbatch do.

python -m hvdtrain.checks.quick --now "$(date +%s)"                     this host; exit code 4: a line says what is wrong
python -m hvdtrain.checks.quick --now "$(date +%s)" --sum 1/3@a:9000    also a sum by the first of three hosts

Does not import torch, as the rest of the doctor does: it takes a tenth of a second.
"""

import contextlib
import socket
import sys
import time
from collections.abc import Sequence

from hvdtrain.checks import gpus, host
from hvdtrain.checks.findings import Findings, Here
from hvdtrain.cli import Parser, non_negative
from hvdtrain.engines.lines import put
from hvdtrain.launching.exit_codes import run

SICK, NO_SUM = 4, 5  # exit codes. 1, 126, 127 and 255: Python, a shell or ssh has failed
CHECKS = (host.check_name, host.check_memory_and_disk, host.check_clock, gpus.check_gpu_errors)
MEET_SECONDS = 5.0  # for others to connect


def meeting(text: str) -> tuple[int, int, str, int]:
    """Return number, count, first host and port of NUMBER/COUNT@HOST:PORT. Raises ValueError."""
    place, _, where = text.partition("@")
    number, _, count = place.partition("/")
    name, _, port = where.rpartition(":")
    return int(number), int(count), name, int(port)


def check_sum(findings: Findings, number: int, count: int, name: str, port: int) -> None:
    """Have the first host, `name`, add up two numbers over TCP: the other ones find out whether they reach it."""
    until = time.monotonic() + MEET_SECONDS
    try:
        if number == 0:
            serve(count, port, until)
        elif (total := ask(number, name, port, until)) != number + count:
            findings.problem(f"the sum by {name} is {total}", "gradients would be wrong, too", "use another host")
    except (OSError, ValueError) as error:  # ValueError: another program has the port
        do = "look at firewalls, routes and /etc/hosts, and who uses the port"
        findings.problem(f"no sum by {name}, port {port} ({error})", "ranks would wait for each other", do)


def serve(count: int, port: int, until: float) -> None:
    """Answer the others, until all have come or the time is over. Raises OSError if the port is taken."""
    with socket.create_server(("", port)) as server:  # a host may resolve its own name to 127.0.1.1
        for _ in range(count - 1):
            with contextlib.suppress(OSError, ValueError):  # one that does not come says so itself; a stranger
                server.settimeout(max(0.001, until - time.monotonic()))
                member, _ = server.accept()
                with member:
                    member.settimeout(1.0)
                    member.sendall(str(int(member.recv(32)) + count).encode())


def ask(number: int, name: str, port: int, until: float) -> int:
    """Return the sum that the first host tells."""
    while True:
        try:
            with socket.create_connection((name, port), max(0.001, until - time.monotonic())) as server:
                server.sendall(str(number).encode())
                return int(server.recv(32) or -1)
        except ConnectionRefusedError:  # it may not listen yet
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code. Raises UserError."""
    parser = Parser("hvdtrain.checks.quick", __doc__)
    parser.add_argument("--now", type=non_negative, required=True, help="seconds since 1970, by the clock of who asks")
    parser.add_argument("--name", default=socket.gethostname(), help="of this host, for messages")
    parser.add_argument("--sum", type=meeting, metavar="NUMBER/COUNT@HOST:PORT", help="which of the hosts, from 0")
    findings, here = Findings(), Here(parser.parse(argv))
    for check in CHECKS:
        with findings.check(check.__name__):
            check(findings, here)
    code = SICK if findings.worst() == "problem" else 0
    if here.flags.sum is not None and not code:
        check_sum(findings, *here.flags.sum)
        code = NO_SUM if findings.worst() == "problem" else 0
    problems = [finding for finding in findings.all if finding["level"] == "problem"]
    for problem in problems:
        put(sys.stderr, f"{here.flags.name}: {problem['what']}: {problem['do']}\n")
    return code


if __name__ == "__main__":
    run(main)
