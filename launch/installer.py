"""Installs packages: with uv where it can be had, which takes a quarter of pip's time, else with pip.

A site's pip configuration (index, mirror, certificates, proxy) holds for both. Where uv fails, pip does it, or says why.
"""

from __future__ import annotations

import ast
import contextlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from steps import LIMITS, BuildFailure, Refusal, open_lock, pins, remedy_of, run, stage, user_cache

# What pip may be configured with, and how uv is told. Anything else, such as no-binary, means that pip is used.
UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "constraint": "UV_CONSTRAINT",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "retries": "UV_HTTP_RETRIES",
    "cache-dir": "UV_CACHE_DIR",
    "no-cache-dir": "UV_NO_CACHE",
}
UV_NEEDS_NOT = {"disable-pip-version-check", "no-input", "progress-bar", "root-user-action", "quiet", "no-color"}
UV_NEEDS_NOT |= {"config-file", "require-virtualenv", "break-system-packages"}
UV_NEEDS_NOT |= {"prefer-binary"}


class Pip:
    """The pip of one interpreter. Online, it uses the user's configuration; offline, only one directory and no network."""

    def __init__(self, python: Path, log: Path, offline: Path | None = None) -> None:
        self.python, self.log, self.offline = python, log, offline

    def __call__(self, *arguments: str | Path, doing: str, env: Mapping[str, str] | None = None) -> None:
        environment = dict(os.environ if env is None else env)
        command: list[str | Path] = [self.python, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
        if self.offline is not None:
            # Without this, pip would still use configured indexes and find-links, such as a mirror mounted as a directory.
            environment = {name: value for name, value in environment.items() if not name.startswith("PIP_")}
            environment["PIP_CONFIG_FILE"] = os.devnull
            command += ["--no-index", "--find-links", self.offline]
        with stage(doing) as current:
            start = self.log.stat().st_size if self.log.exists() else 0

            def note(line: str) -> None:
                current.note = line.strip()[:100]

            if run(command, self.log, env=environment, on_line=note) != 0:
                raise pip_failure(self.log.read_text(errors="replace")[start:], doing, self.offline)

    def configuration(self) -> str:
        """Return what `pip config list` prints: a line SECTION.NAME='VALUE' for each setting."""
        command = [str(self.python), "-m", "pip", "config", "list"]
        return subprocess.run(command, capture_output=True, text=True).stdout


class Installer:
    """Installs into one environment or directory. `again`: ask the index even if uv's cache has every package."""

    def __init__(self, pip: Pip, cache: Path, *, again: bool = False) -> None:
        self.pip, self.cache, self.again = pip, cache, again
        self.use_uv = True

    def __call__(self, *arguments: str | Path, doing: str, bytecode: bool = True) -> None:
        """Install what `arguments` name, which both pip and uv understand. Raises Refusal or BuildFailure."""
        environment = self._uv_environment() if self.use_uv else None
        uv = find_uv(self.pip, self.cache) if environment is not None else None
        if uv is None or environment is None:
            self.use_uv = False
        else:
            command: list[str | Path] = [uv, "pip", "install", "--python", self.pip.python, "--no-progress", *arguments]
            if bytecode:  # as pip does: else the first import of each user is slow
                command.append("--compile-bytecode")
            withhold_locks(self.pip.python, environment)
            with stage(f"{doing}, with uv") as current:
                # First from uv's cache alone: a second clone needs no network, and gets the same versions.
                for offline in ([] if self.again else ["--offline"]), []:
                    with contextlib.suppress(OSError):  # it cannot be run here
                        if run([*command, *offline], self.pip.log, env=environment) == 0:
                            return
                current.result = "uv could not: "
                self.use_uv = False
        self.pip("install", *([] if bytecode else ["--no-compile"]), *arguments, doing=doing)

    def _uv_environment(self) -> dict[str, str] | None:
        if self.pip.offline is None:
            settings = uv_settings(self.pip.configuration())
            return None if settings is None else settings | os.environ
        clean = {name: value for name, value in os.environ.items() if not name.startswith("UV_") or "CACHE" in name}
        return clean | {"UV_NO_INDEX": "1", "UV_FIND_LINKS": str(self.pip.offline), "UV_NO_CONFIG": "1"}


def withhold_locks(python: Path, environment: Mapping[str, str]) -> None:
    """Keep other users from locking what uv locks, in the environment and in its cache: it lets everybody open its files."""
    cache = Path(environment["UV_CACHE_DIR"]) if environment.get("UV_CACHE_DIR") else uv_cache()
    for directory, sign in ((python.parent.parent, "pyvenv.cfg"), (cache, "CACHEDIR.TAG")):
        with contextlib.suppress(OSError):
            if (directory / sign).exists():
                os.close(open_lock(directory / ".lock"))


def uv_settings(configuration: str) -> dict[str, str] | None:
    """Return pip's configuration as variables for uv, or None if it has a setting that uv could not be told."""
    found: dict[str, str] = {}
    lines = [line.partition("=") for line in configuration.splitlines() if "=" in line]
    for section in ("global", "install", ":env:"):  # each one overrides those before
        for key, _, value in lines:
            if key.rpartition(".")[0] == section:
                found[key.rpartition(".")[2]] = str(ast.literal_eval(value))
    if set(found) - set(UV_NAMES) - UV_NEEDS_NOT:
        return None
    for_uv = {UV_NAMES[name]: " ".join(value.split()) for name, value in found.items() if name in UV_NAMES}
    if "UV_FIND_LINKS" in for_uv:
        for_uv["UV_FIND_LINKS"] = for_uv["UV_FIND_LINKS"].replace(" ", ",")
    if "cache-dir" in found:  # 6 GB: where pip's cache was moved, HOME is likely to be small
        for_uv["UV_CACHE_DIR"] = str(Path(found["cache-dir"]).expanduser() / "uv")
    if "no-cache-dir" in found:  # as pip takes it, whatever its value
        for_uv["UV_NO_CACHE"] = "1"
    # As pip does: of all indexes the newest version, and the certificates that the system trusts.
    return for_uv | {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_NATIVE_TLS": "1", "UV_SYSTEM_CERTS": "1"}


def find_uv(pip: Pip, cache: Path) -> Path | None:
    """Return the uv on PATH, or one in the cache, which pip gets from the package index; or None."""
    on_path = shutil.which("uv")
    with contextlib.suppress(OSError):  # one for another processor, in a home directory that two kinds of hosts share
        if on_path and subprocess.run([on_path, "--version"], capture_output=True).returncode == 0:
            return Path(on_path)
    if pip.offline is not None and not any(pip.offline.glob("uv-*.whl")):
        return None
    kept = cache / f"uv-{pins()['uv']}-{platform.machine()}"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            where = Path(scratch) / "uv"
            try:
                pip("install", "--only-binary=:all:", "--target", where, f"uv=={pins()['uv']}", doing="get uv")
            except (Refusal, BuildFailure):
                return None
            with contextlib.suppress(OSError):  # another set-up was first
                where.rename(kept)
    return kept / "bin" / "uv"


def uv_cache() -> Path:
    """Return where uv keeps packages. It links them into environments on the same file system."""
    return Path(os.environ.get("UV_CACHE_DIR") or Path(os.environ.get("PIP_CACHE_DIR") or user_cache()) / "uv")


def pip_failure(output: str, doing: str, offline: Path | None) -> Exception:
    """Return an exception with the relevant line of pip's output and the remedy."""
    errors = [line.strip() for line in output.splitlines() if re.match(r"\s*ERROR:", line)]
    what = errors[0].removeprefix("ERROR:").strip() if errors else (output.strip().splitlines() or ["no output"])[-1]
    if "DO NOT MATCH THE HASHES" in output:
        return Refusal(f"{doing}: the file's sha256 is not the expected one; it was not run. Ask who serves your index")
    if remedy := remedy_of(output, LIMITS):
        return Refusal(f"{doing}: {what}: {remedy}")
    if offline is not None:
        return Refusal(f"{doing}: {what}; to fill {offline}: launch/setup --download DIR where there is a network")
    network = r"NewConnectionError|Max retries|ConnectTimeout|ReadTimeout|Name or service|ProxyError|SSLError"
    if re.search(network, output):
        return Refusal(f"{doing}: no package index answers: check network, proxy, `pip config list`; or --offline DIR")
    if found := re.search(r"No matching distribution found for (\S+)", output):
        there = re.search(r"\(from versions: (?!none)(.*?)\)", what)
        version = ".".join(platform.python_version_tuple()[:2])
        return Refusal(
            f"no {found[1]} for Python {version} on {platform.machine()} in the package index"
            + (f", which has {there[1]}: take one of these" if there else "")
            + ", or another Python (make PYTHON=...)"
        )
    return BuildFailure(f"{doing}: {what}")
