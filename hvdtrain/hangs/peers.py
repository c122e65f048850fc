"""Who the other ranks are, and the connections between them. Collectives over the engine."""

import os
import secrets
import socket
from collections.abc import Sequence
from typing import NamedTuple

from hvdtrain.engines.base import Engine
from hvdtrain.hangs.channel import Channel, accept, listen, say_hello
from hvdtrain.launching import processes


class Peer(NamedTuple):
    """A rank's process. place: host and pid namespace; ranks with the same place can inspect each other's processes."""

    host: str
    place: str
    pid: int


def peers_of(engine: Engine) -> list[Peer]:
    """Return all ranks. A collective."""
    host = socket.gethostname()
    peers = engine.all_gather_object([host, f"{host} {processes.pid_namespace()}", os.getpid()], "hangs.peers")
    return [Peer(*peer) for peer in peers]


def connect(engine: Engine, hosts: Sequence[str]) -> tuple[dict[int, Channel], str | None]:
    """Return this rank's channels: to all ranks on rank 0, to rank 0 on the others. Without them, why there are none.

    A collective. hosts: host name of every rank.
    """
    key = bytes.fromhex(engine.broadcast_object(secrets.token_hex(32), "hangs.secret"))
    listeners: list[socket.socket] = []
    channels: dict[int, Channel] = {}
    where, error = None, None
    if engine.rank == 0:
        try:
            listeners, where = listen(hosts)
        except OSError as problem:
            error = f"rank 0 on {hosts[0]} cannot listen: {problem}"
    where = engine.broadcast_object(where, "hangs.where")
    if where is not None:
        try:
            if engine.rank == 0:
                channels = accept(listeners, key, engine.size)
            else:
                host, port = where[hosts[engine.rank]]
                channels = {0: say_hello((host, port), key, engine.rank)}
        except OSError as problem:
            error = f"rank {engine.rank} on {hosts[engine.rank]}: {problem}"
    for listener in listeners:
        listener.close()
    errors = [error for error in engine.all_gather_object(error, "hangs.errors") if error]
    if not errors:
        return channels, None
    for channel in channels.values():
        channel.socket.close()
    return {}, errors[0]
