"""Who the ranks are, the connections between them, and what became of those that are gone."""

import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import one_line
from hvdtrain.guards.channel import Channel, accept, listen, say_hello
from hvdtrain.guards.messages import Bye, Fail, Message
from hvdtrain.launching import processes


class Peer(NamedTuple):
    """A rank's process. place: host and pid namespace; ranks with the same place can inspect each other's processes."""

    host: str
    place: str
    pid: int


class Gone(NamedTuple):
    """A rank whose connection has ended. last_words: if there were any. error: of the connection."""

    since: float  # time.monotonic; infinity if it had finished
    last_words: Fail | Bye | None
    error: str = ""


class Peers:
    """All ranks of the job, as rank `me` sees them. channels: its connections, by rank."""

    def __init__(self, me: int, peers: Sequence[Peer], channels: Mapping[int, Channel]):
        self.me, self.all, self.channels = me, list(peers), dict(channels)
        self.gone: dict[int, Gone] = {}

    def name(self, rank: int) -> str:
        """Return "rank N on HOST"."""
        return f"rank {rank} on {self.all[rank].host}"

    def names(self) -> list[str]:
        """Return the names of all ranks."""
        return [self.name(rank) for rank in range(len(self.all))]

    def send_all(self, message: Message) -> None:
        """Send a message over all connections."""
        for channel in list(self.channels.values()):
            channel.send(message)

    def is_here(self, rank: int) -> bool:
        """Return whether the process of `rank` can be inspected from here."""
        return self.all[rank].place == self.all[self.me].place

    def is_stopped(self, rank: int) -> bool:
        """Return whether `rank` is known to be stopped by a signal. Only ranks on this host can be checked."""
        return self.is_here(rank) and processes.is_stopped(self.all[rank].pid)

    # ---- the end of a rank

    def hear_last_words(self, rank: int, words: Fail | Bye) -> None:
        """Note that `rank` has finished, or has failed."""
        self.gone[rank] = Gone(float("inf") if isinstance(words, Bye) else time.monotonic(), words)

    def disconnect(self, rank: int, error: OSError | None) -> None:
        """Note that the connection to `rank` has ended."""
        self.channels.pop(rank, None)
        self.gone.setdefault(rank, Gone(time.monotonic(), None, str(error or "")))

    def has_left(self, rank: int) -> bool:
        """Return whether `rank` has finished."""
        return rank in self.gone and isinstance(self.gone[rank].last_words, Bye)

    def all_have_left(self) -> bool:
        """Return whether all ranks that were connected have finished."""
        return not self.channels and all(map(self.has_left, self.gone))

    def failed_alike(self, rank: int, failure: Fail) -> bool:
        """Return whether `rank` has said that it failed for the same reason as this one."""
        return rank in self.gone and self.gone[rank].last_words == failure

    def fate(self, rank: int) -> str:
        """Return what became of a rank whose connection is gone."""
        gone = self.gone[rank]
        if gone.last_words is not None:
            return f"failed: {one_line(gone.last_words.error)}" if isinstance(gone.last_words, Fail) else "left"
        if self.is_here(rank) and processes.runs(self.all[rank].pid):
            return "is cut off: its connection was lost, but its process runs"
        if self.is_here(rank) or not gone.error:
            return "died: its connection closed unexpectedly"
        return f"died or is cut off: its connection was lost ({gone.error})"


def connect_all(engine: Engine) -> tuple[Peers, str | None]:
    """Return all ranks, connected, and None; or without connections, and why. A collective."""
    host = socket.gethostname()
    gathered = engine.all_gather_object([host, f"{host} {processes.pid_namespace()}", os.getpid()], "hangs.peers")
    peers = [Peer(*peer) for peer in gathered]
    channels, off = connect(engine, [peer.host for peer in peers]) if engine.size > 1 else ({}, None)
    return Peers(engine.rank, peers, channels), off


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
