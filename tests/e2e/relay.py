"""A network between namespaces that delays every frame: for kernels without netem.

python -m tests.e2e.relay --delay 0.01 PID PID

Gives each process's network namespace a TAP device `eth0`, prints "ready", and passes each frame on to all the others
after `delay` seconds. Needs root. TAP devices are given whole TCP segments with their checksums, no larger than the MTU.
"""

import argparse
import collections
import ctypes
import fcntl
import os
import select
import struct
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # of linux/if_tun.h
CLONE_NEWNET = 0x40000000  # of linux/sched.h


def enter(namespace: int) -> None:
    """Move this thread to a network namespace. `os.setns` is of Python 3.12."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def tap(pid: int) -> int:
    """Return a file descriptor of a new device `eth0` in the network namespace of process `pid`."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    enter(there)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TAP | IFF_NO_PI))
    enter(home)
    os.close(home)
    os.close(there)
    return device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=float, required=True, help="seconds from one namespace to another")
    parser.add_argument("pids", type=int, nargs="+", metavar="PID")
    flags = parser.parse_args()
    devices = [tap(pid) for pid in flags.pids]
    print("ready", flush=True)
    on_the_way: collections.deque[tuple[float, int, bytes]] = collections.deque()  # due, sender, frame; in order
    while True:
        wait = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
        for device in select.select(devices, [], [], wait)[0]:
            try:
                for _ in range(64):
                    on_the_way.append((time.monotonic() + flags.delay, device, os.read(device, 65536)))
            except BlockingIOError:
                pass
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, sender, frame = on_the_way.popleft()
            for device in devices:
                if device != sender:
                    os.write(device, frame)


if __name__ == "__main__":
    main()
