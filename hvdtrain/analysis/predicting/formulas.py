"""How long an all-reduce takes: closed formulas, no measurement. Seconds and bytes everywhere.

A message of m bytes takes latency + m / bandwidth (Hockney 1994: the alpha-beta model). Sources of what follows from it:

- R. Hockney: The communication challenge for MPP: Intel Paragon and Meiko CS-2. Parallel Computing 20(3), 1994.
- R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH. IJHPCA 19(1), 2005.
- P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations. JPDC 69(2), 2009.
- S. Li et al.: PyTorch Distributed: experiences on accelerating data parallel training. VLDB 13(12), 2020.

Hosts hold the ranks in blocks (a:4,b:4). A host's wire carries one stream in and one out at full rate; no two
hosts share it.
"""

from typing import NamedTuple


class Link(NamedTuple):
    """What a message between two ranks costs."""

    latency: float  # seconds
    bandwidth: float  # bytes per second


class Ranks(NamedTuple):
    """Where the ranks are."""

    hosts: int
    per_host: int

    @property
    def total(self) -> int:
        return self.hosts * self.per_host


def doublings(count: int) -> int:
    """Return log2 of `count`, rounded up: other counts cost about what the next power of two does."""
    return (count - 1).bit_length()


def ring(size: float, ranks: Ranks, inside: Link, between: Link) -> float:
    """Reduce-scatter and all-gather around a ring: 2(n-1) latency + 2(n-1)/n size/bandwidth.

    All ranks send at once, so that each of the 2(n-1) steps takes as long as its slowest link. Bandwidth-optimal; what
    Gloo does, and MPI and NCCL for large messages (Patarasuk and Yuan 2009).
    """
    links = [inside] * (ranks.per_host > 1) + [between] * (ranks.hosts > 1)
    steps = 2 * (ranks.total - 1)
    return steps * max((link.latency + size / ranks.total / link.bandwidth for link in links), default=0.0)


def halving(size: float, ranks: Ranks, inside: Link, between: Link) -> float:
    """Rabenseifner's halving, then doubling: 2 log2(n) latency + 2(n-1)/n size/bandwidth (Thakur et al. 2005).

    Nearest ranks first: halves are exchanged inside the host, and what then crosses the wire is, over all ranks of a host,
    2(h-1)/h of the size for h hosts.
    """
    return sum(
        2 * doublings(count) * link.latency + 2 * (count - 1) / count * size / link.bandwidth
        for count, link in ((ranks.per_host, inside), (ranks.hosts, between))
    )


def tree(size: float, ranks: Ranks, inside: Link, between: Link) -> float:
    """Sum up a binomial tree, then send the sum down again: 2 log2(n) (latency + size/bandwidth) (Thakur et al. 2005).

    For few bytes; not pipelined.
    """
    return sum(
        2 * doublings(count) * (link.latency + size / link.bandwidth)
        for count, link in ((ranks.per_host, inside), (ranks.hosts, between))
    )


ALGORITHMS = {"ring": ring, "halving": halving, "tree": tree}


def exposed(communication: float, backward: float, buckets: int) -> float:
    """Return what of `communication` a step waits for, where buckets of gradients travel while backward goes on.

    The last bucket is ready only when backward ends (Li et al. 2020): at least its share is waited for. One
    bucket: all of it.
    """
    return max(communication / buckets, communication - backward)
