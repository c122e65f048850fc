"""Fetches, verifies, unpacks and patches the source of Horovod 0.28.1 (2023, its last release).

launch/patches/NN-name.patch are unified diffs, applied in the order of their names. The header of each says why it is needed
and what it is safe against. launch/patches/optional/ has one for builds without MPI, and one for `build_horovod.py --patch`.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
import tempfile
from pathlib import Path

from installer import Pip
from steps import BuildFailure, Refusal

VERSION = "0.28.1"
SDIST = f"horovod-{VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
PATCHES = Path(__file__).resolve().parent / "patches"


def checked_sdist(path: Path) -> Path:
    """Return `path` if it has the expected checksum. Raises Refusal."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SDIST_SHA256:
        raise Refusal(f"{path}: sha256 is {found}, not {SDIST_SHA256}: damaged, or not it. Remove it")
    return path


def local_sdist(cache: Path, offline: Path | None) -> Path | None:
    """Return Horovod's verified source archive if it is on this machine, else None. Raises Refusal if `offline` lacks it."""
    path = offline / SDIST if offline else cache / "sources" / SDIST
    if path.is_file():
        return checked_sdist(path)
    if offline:
        raise Refusal(f"{offline} lacks {SDIST}: fill it with launch/setup --download DIR where the network is")
    return None


def fetch_sdist(cache: Path, pip: Pip, build_env: dict[str, str]) -> Path:
    """Download Horovod's source archive. pip verifies its hash before it runs setup.py for metadata."""
    kept = cache / "sources" / SDIST
    kept.parent.mkdir(parents=True, exist_ok=True)
    # With HOROVOD_LOCAL_VERSION, setup.py would report another version than the requested one, and pip would reject it.
    env = {name: value for name, value in build_env.items() if not name.startswith("HOROVOD_")}
    with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
        wanted = Path(scratch) / "requirements.txt"
        wanted.write_text(f"horovod=={VERSION} --hash=sha256:{SDIST_SHA256}\n")
        arguments = ("download", "--no-deps", "--no-binary=horovod", "--no-build-isolation", "--require-hashes")
        pip(*arguments, "-r", wanted, "-d", scratch, doing=f"fetch Horovod {VERSION}", env=env)
        checked_sdist(Path(scratch) / SDIST).replace(kept)
    return kept


def unpack(sdist: Path, directory: Path) -> Path:
    """Unpack the archive in `directory`, and return the source's directory."""
    with tarfile.open(sdist) as archive:
        # Debian 12's Python 3.11.2 has no filters; the archive's checksum is verified.
        if hasattr(tarfile, "data_filter"):
            archive.extractall(directory, filter="data")
        else:
            archive.extractall(directory)
    return directory / f"horovod-{VERSION}"


def cxx_standard(torch_version: str) -> int:
    """Return the C++ standard of torch's headers: 17 from 2.1 on, 20 from 2.14 on."""
    major, minor = (int(part) for part in torch_version.split(".")[:2])
    return 20 if (major, minor) >= (2, 14) else 17


def patches(mpi: bool, *more: Path) -> list[Path]:
    """Return the patches for this build, in the order in which they apply: `more` at the end."""
    return [*sorted(PATCHES.glob("*.patch")), *([] if mpi else [PATCHES / "optional" / "without-mpi.patch"]), *more]


def apply_patch(source: Path, patch: Path) -> None:
    """Apply a patch like `patch -p1`, but only at exactly the lines that it names. Raises BuildFailure.

    As the source's checksum is known, the offsets and fuzz of `patch` could only do harm. Minimal containers have neither
    `patch` nor `git`.
    """
    _, *files = re.split(r"^--- a/(.+)\n\+\+\+ b/.+\n", patch.read_text(), flags=re.MULTILINE)
    for name, diff in zip(files[::2], files[1::2], strict=True):
        path = source / name
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        _, *hunks = re.split(r"^@@ -(\d+).*\n", diff, flags=re.MULTILINE)
        # From the last hunk to the first, so that the line numbers of earlier hunks remain valid.
        for first, hunk in reversed(list(zip(hunks[::2], hunks[1::2], strict=True))):
            changes = hunk.splitlines(keepends=True)
            old = [line[1:] for line in changes if line[0] in " -"]
            start = int(first) - 1
            if lines[start : start + len(old)] != old:
                raise BuildFailure(
                    f"{patch.name} does not apply to {name} at line {first}: this is not Horovod {VERSION} as released"
                )
            lines[start : start + len(old)] = [line[1:] for line in changes if line[0] in " +"]
        path.write_text("".join(lines))


def apply_patches(source: Path, mpi: bool = True, *more: Path) -> None:
    """Apply the patches for this build. Raises BuildFailure."""
    for patch in patches(mpi, *more):
        apply_patch(source, patch)


def fingerprint(*more: Path) -> str:
    """Return a digest for the wheel cache's key. It changes with the source and the diffs, not with a patch's header."""
    digest = hashlib.sha256(SDIST_SHA256.encode())
    for patch in patches(False, *more):  # all that a build may apply
        digest.update(patch.read_text().partition("\n--- a/")[2].encode())
    return digest.hexdigest()[:12]
