"""What is tuned, checked and refused before Horovod starts: tuning touches nothing that the user asked for."""

import os
import resource
import socket
import sys

import pytest
import torch

from hvdtrain.checkpoint.resume import RUN_LOCK_SECONDS
from hvdtrain.engines.buckets import bucket_bytes, buckets, refuse_small_cache
from hvdtrain.engines.errors import UserError
from hvdtrain.engines.horovod import HorovodEngine
from hvdtrain.engines.library_settings import (
    ABORT_DELAY,
    refuse_absent_server,
    refuse_too_few_files,
    refuse_unknown_own_name,
    tuned_environment,
)


def test_everything_is_set_where_nothing_was():
    assert tuned_environment({}) == {
        "OMPI_MCA_mpi_yield_when_idle": "1", "HOROVOD_WAKE_ON_ENQUEUE": "1", "HOROVOD_CYCLE_TIME": "0.1",
        "HOROVOD_CACHE_CAPACITY": "65536", "HOROVOD_DISABLE_GROUP_FUSION": "1",
    }  # fmt: skip


def test_what_the_user_set_stays():
    assert "HOROVOD_CYCLE_TIME" not in tuned_environment({"HOROVOD_CYCLE_TIME": "5"})
    chosen = {"HOROVOD_CYCLE_TIME": "", "OMPI_MCA_mpi_yield_when_idle": "0", "HOROVOD_DISABLE_GROUP_FUSION": "0"}
    assert tuned_environment(chosen | {"HOROVOD_WAKE_ON_ENQUEUE": "0", "HOROVOD_CACHE_CAPACITY": "2000"}) == {}


def test_a_rank_of_a_killed_mpirun_has_ended_before_the_next_attempt_gives_up():
    (seconds,) = map(int, ABORT_DELAY.values())
    assert 1 + seconds < RUN_LOCK_SECONDS  # 1: Open MPI's own


def test_buckets_hold_every_trainable_parameter_once_last_layer_first():
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 5, 2, 100, 1)]
    parameters[2].requires_grad = False
    numels = [[p.numel() for p in group] for group in buckets(parameters, limit=6 * 4)]
    assert numels == [[1], [100], [5], [3]]
    assert [[p.numel() for p in group] for group in buckets(parameters, limit=8 * 4)] == [[1], [100], [5, 3]]
    assert len(buckets(parameters, limit=10**6)) == 1
    assert buckets([], limit=8) == []
    assert len(buckets([torch.nn.Parameter(torch.empty(0))])) == 1  # the last one of a model without numbers
    small = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2500)]
    assert [len(group) for group in buckets(small)] == [1000, 1000, 500]


@pytest.mark.parametrize(
    ("capacity", "gradients"),
    [(None, 700), ("0", 9000), ("65536", 65_000), ("3300 ", 3000), ("many", 9000), ("-1", 9000)],
)
def test_gradients_that_fit_into_horovods_cache(capacity, gradients):
    refuse_small_cache(gradients, {} if capacity is None else {"HOROVOD_CACHE_CAPACITY": capacity})


@pytest.mark.parametrize(("capacity", "gradients"), [(None, 1000), ("1024", 3000), ("65536", 70_000), ("8e3", 3000)])
def test_a_cache_too_small_for_the_gradients_is_refused(capacity, gradients):
    """Ranks would forget different members of a group, and hang or crash."""
    said = (
        rf"^HOROVOD_CACHE_CAPACITY is [0-9]+, too small for {gradients} gradients: set it to {gradients + 256} or more"
    )
    with pytest.raises(UserError, match=said):
        refuse_small_cache(gradients, {} if capacity is None else {"HOROVOD_CACHE_CAPACITY": capacity})


def test_the_last_bucket_is_a_small_part_of_a_model():
    """Nothing is left to hide its travelling behind."""
    parameters = [torch.nn.Parameter(torch.zeros(2**18)) for _ in range(64)]  # 64 MiB, 1 MiB each
    assert [len(group) for group in buckets(parameters)] == [4] * 16
    assert len(buckets(parameters[:1])) == 1
    assert bucket_bytes(116_136) == 2**20  # the ConvNet: one bucket
    assert bucket_bytes(2**34) == 25 * 2**20
    on_a_gpu = [torch.nn.Parameter(torch.zeros(2**18, device="meta")) for _ in range(64)]  # over faster links
    assert [len(group) for group in buckets(on_a_gpu)] == [25, 25, 14]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere.invalid",
            r"name nowhere\.invalid does not resolve.*: add `127.0.0.1 nowhere\.invalid` to /etc/hosts"),
        ("h" * 64, "does not resolve, and Gloo needs it"),  # which Python cannot encode
        (os.fsdecode(b"\xff\xfex"), "does not resolve, and Gloo needs it"),
        ("192.0.2.1", r"own name 192\.0\.2\.1 resolves to 192\.0\.2\.1, which is not an address of this host"),
    ],
)  # fmt: skip
def test_a_host_whose_own_name_is_not_its_own_is_refused_before_gloo_crashes(name, said):
    refuse_unknown_own_name("localhost")
    with pytest.raises(UserError, match=said):
        refuse_unknown_own_name(name)


GONE = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1"}  # of a job that is over


@pytest.mark.parametrize("port", ["1", "abc", ""])
def test_a_server_of_a_job_that_is_over_is_refused_before_gloo_crashes(port):
    with pytest.raises(UserError, match=r"no rendezvous server at HOROVOD_GLOO_RENDEZVOUS_ADDR='127\.0\.0\.1'"):
        refuse_absent_server(GONE | {"HOROVOD_GLOO_RENDEZVOUS_PORT": port})
    with socket.create_server(("127.0.0.1", 0)) as server:
        refuse_absent_server(GONE | {"HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.getsockname()[1])})


# ---- before Horovod starts


def test_where_horovod_cannot_be_imported_one_line_says_how_to_build_it(monkeypatch):
    for name in ("horovod", "horovod.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"^Horovod cannot be imported \(.*horovod.*\): run `make setup`"):
        HorovodEngine(tuning=False, rank=0, size=1, launcher="none")


def test_gloo_has_the_open_files_that_it_needs_or_the_rank_says_how_many(monkeypatch):
    set_: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: set_.append(limits))
    for limits in ((900, 1000), (36, 900)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limits=limits: limits)
        refuse_too_few_files(8, 8, 1)
    ((needed, hard),) = set_  # of the second
    assert 36 < needed < 900 == hard
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (36, 36))
    said = f"^this user may open fewer files than Gloo needs for 8 ranks: raise `ulimit -n` to {needed}, or use fewer"
    with pytest.raises(UserError, match=said):
        refuse_too_few_files(8, 8, 1)
