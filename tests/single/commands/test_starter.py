"""The starter's arithmetic: places among hosts, and which words of the command line are its own."""

import re
import socket

import pytest

from hvdtrain.engines.launchers import Announced
from hvdtrain.launching.meeting import Place, place_of_rank
from hvdtrain.launching.rendezvous import meeting_point
from hvdtrain.starter import meeting_of, parse


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (["a"], [(0, 1, 0, 1)]),
        (["a", "a", "b", "b"], [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]),
        (["b", "a", "b", "a"], [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]),  # Slurm's cyclic distribution
        (["a", "b", "b"], [(0, 1, 0, 2), (0, 2, 1, 2), (1, 2, 0, 1)]),
    ],
)
def test_places(hosts, expected):
    assert [place_of_rank(rank, hosts) for rank in range(len(hosts))] == [Place(*values) for values in expected]


def test_places_agree_with_horovods_own_launcher():
    hosts = pytest.importorskip("horovod.runner.common.util.hosts")
    slots = hosts.get_host_assignments(hosts.parse_hosts("a:1,b:3,c:2"), 6)
    names = [slot.hostname for slot in slots]
    for slot in slots:
        assert place_of_rank(slot.rank, names) == (slot.local_rank, slot.local_size, slot.cross_rank, slot.cross_size)


@pytest.mark.parametrize(
    ("words", "program"),
    [
        ("-m hvdtrain.mnist --wait 3 -m x", "-m hvdtrain.mnist --wait 3 -m x"),
        ("--port 9000 --wait=3 -m hvdtrain.mnist --port 1", "-m hvdtrain.mnist --port 1"),
        ("--interface eth0 train.py --interface x", "train.py --interface x"),
        ("--local-ranks 8 --oversubscribe /venv/bin/python3.12 -m hvdtrain.mnist --seed 1",
            "-m hvdtrain.mnist --seed 1"),
        ("--local-ranks 8 python train.py", "train.py"),
        ("--local-ranks 8 -- -m hvdtrain.mnist -- x", "-m hvdtrain.mnist -- x"),
    ],
)  # fmt: skip
def test_own_options_end_where_the_program_begins(words, program):
    options, rest = parse(words.split())
    assert rest == program.split()
    assert options.port == (9000 if "9000" in words else None)


@pytest.mark.parametrize("size", [1, 2])
def test_interface_and_port_are_those_that_were_named(size, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "9001")
    monkeypatch.setattr("hvdtrain.launching.meeting.address_of", {"eth7": "127.0.0.7"}.get)
    with socket.create_server(("127.0.0.7", 0)) as server:
        port = server.getsockname()[1]
    options, _ = parse(["--interface", "eth7", "--port", str(port), "x.py"])
    meeting = meeting_of(options, Announced("Slurm", 0, size))
    meeting.come(1)
    meeting.hosts = ["a"]
    told = meeting.environment(0)
    assert re.fullmatch(rf"127\.0\.0\.7:{port}/[0-9a-f]{{64}}", told["HOROVOD_GLOO_RENDEZVOUS_ADDR"])
    assert told["HOROVOD_GLOO_RENDEZVOUS_PORT"] == str(port)
    assert told["HOROVOD_GLOO_IFACE"] == "eth7"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,m[2-3]", "n1"),
        ("n[01,03-04]-ib,m", "n01-ib"),
        ("rack[1-2]n[007-128]", "rack1n007"),
        ("n[4]", "n4"),
    ],
)
def test_the_first_host_of_a_slurm_job(nodes, first, monkeypatch):
    """Also in a container, where Slurm's own commands are not there."""
    monkeypatch.setenv("PATH", "")
    assert meeting_point({"SLURM_JOB_NODELIST": nodes, "SLURM_JOB_ID": "10007"}, "Slurm") == (first, 20007)
