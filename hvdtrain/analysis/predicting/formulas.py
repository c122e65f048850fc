"""The time of an all-reduce by closed formulas, in seconds and bytes.

A message of m bytes takes latency + m / bandwidth (Hockney 1994: the alpha-beta model). Sources:

- R. Hockney: The communication challenge for MPP: Intel Paragon and Meiko CS-2. Parallel Computing 20(3), 1994.
- R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH. IJHPCA 19(1), 2005.
- P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations. JPDC 69(2), 2009.
- S. Li et al.: PyTorch Distributed: experiences on accelerating data parallel training. VLDB 13(12), 2020.

Hosts hold the ranks in blocks (a:4,b:4). The link of a host carries one stream in and one out at full rate, and is not
shared between hosts.
"""

from typing import NamedTuple


class Link(NamedTuple):
    """The cost of a message between two ranks."""

    latency: float  # seconds
    bandwidth: float  # bytes per second


class Ranks(NamedTuple):
    """The placement of the ranks."""

    hosts: int
    per_host: int

    @property
    def total(self) -> int:
        """Return the number of ranks."""
        return self.hosts * self.per_host


def doublings(count: int) -> int:
    """Return log2 of `count`, rounded up: other counts cost about as much as the next power of two."""
    return (count - 1).bit_length()


def ring(size: float, ranks: Ranks, inside: Link, between: Link) -> float:
    """Return the seconds of reduce-scatter and all-gather around a ring: 2(n-1) latency + 2(n-1)/n size/bandwidth.

    All ranks send at once, so that each of the 2(n-1) steps takes as long as its slowest link. Bandwidth-optimal; used by
    Gloo, and by MPI and NCCL for large messages (Patarasuk and Yuan 2009).
    """
    links = [inside] * (ranks.per_host > 1) + [between] * (ranks.hosts > 1)
    steps = 2 * (ranks.total - 1)
    return steps * max((link.latency + size / ranks.total / link.bandwidth for link in links), default=0.0)


def halving(size: float, ranks: Ranks, inside: Link, between: Link) -> float:
    """Return the seconds of Rabenseifner's recursive halving and doubling (Thakur et al. 2005).

    2 log2(n) latency + 2(n-1)/n size/bandwidth. Nearest ranks exchange first, inside the host. Over all ranks of a host,
    2(h-1)/h of the size then crosses the network, for h hosts.
    """
    return sum(
        2 * doublings(count) * link.latency + 2 * (count - 1) / count * size / link.bandwidth
        for count, link in ((ranks.per_host, inside), (ranks.hosts, between))
    )


def tree(size: float, ranks: Ranks, inside: Link, between: Link) -> float:
    """Return the seconds of a reduction up a binomial tree and a broadcast down it (Thakur et al. 2005).

    2 log2(n) (latency + size/bandwidth). For small messages; not pipelined.
    """
    return sum(
        2 * doublings(count) * (link.latency + size / link.bandwidth)
        for count, link in ((ranks.per_host, inside), (ranks.hosts, between))
    )


ALGORITHMS = {"ring": ring, "halving": halving, "tree": tree}


def exposed(communication: float, backward: float, buckets: int) -> float:
    """Return the seconds of `communication` that a step waits for if buckets of gradients are reduced during backward.

    The last bucket is ready only when backward ends (Li et al. 2020), so a step waits at least for its share; with one
    bucket, for all of it.
    """
    return max(communication / buckets, communication - backward)
