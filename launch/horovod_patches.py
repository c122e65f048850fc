"""Horovod 0.28.1 (2023, its last release) on today's compilers, PyTorch, Python, Open MPI: each change, its reason.

Each patch replaces an exact text a known number of times. One that does not apply is an error that names it: the
source is then not the one these were written for, and guessing would build something nobody has tested.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple
from pathlib import Path

import horovod_waiting
from patching import Patch
from steps import BuildFailure

VERSION = "0.28.1"
SDIST = f"horovod-{VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


_RPATH = """set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
set(CMAKE_INSTALL_RPATH "$ENV{HVDTRAIN_RPATH}")
"""

_FAILURE_CLASS = """class RankFailure(RuntimeError):
    def __init__(self, slot, exit_code):
        self.exit_code = exit_code if exit_code >= 0 else 128 - exit_code
        names = {128 + number: ' (%s)' % number.name for number in signal.Signals}
        super().__init__('rank %d on %s ended the job with exit code %d%s'
                         % (slot.rank, slot.hostname, self.exit_code, names.get(self.exit_code, '')))


def _pad_rank(rank, size):
"""

_FAILURE = """        if exit_code != 0:
            raise RuntimeError('Horovod detected that one or more processes exited with non-zero '
                               'status, thus causing the job to be terminated. The first process '
                               'to do so was:\\nProcess name: {name}\\nExit code: {code}\\n'
                               .format(name=name, code=exit_code))
"""

_EXIT = """    try:
        _run(args)
    except RankFailure as failure:
        print(f'horovodrun: {failure}', file=sys.stderr)
        sys.exit(failure.exit_code)
"""

_TERMINATE_CHILDREN = """    for child in p.children():
        try:
            child.terminate()
        except psutil.NoSuchProcess:
            pass

    # Wait for graceful termination.
    gone, alive = psutil.wait_procs(p.children(), timeout=GRACEFUL_TERMINATION_TIME_S)
"""

_TERMINATE_COMMAND = """    try:
        started = p.children() if os.path.samefile(p.exe(), '/bin/sh') else [p]
    except (psutil.Error, OSError):
        started = [p]
    for child in started:
        try:
            child.terminate()
        except psutil.NoSuchProcess:
            pass

    # Wait for graceful termination.
    gone, alive = psutil.wait_procs(started, timeout=GRACEFUL_TERMINATION_TIME_S)
"""


def _asks_the_extension(library: str, name: str) -> str:
    return f"""def {library}_built(verbose=False):
    for ext_base_name in EXTENSIONS:
        built_fn = lambda ext: ext.{library}_built()
        result = _check_extension_lambda(
            ext_base_name, built_fn, 'built with {name}', verbose)
        if result is not None:
            return result
    return None
"""


PATCHES = (
    Patch(
        "torch's headers need a newer C++ standard than 14",
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD @CXX_STANDARD@)",
    ),
    Patch(
        "torch's headers need a newer C++ standard than 14 (PyTorch extension)",
        "horovod/torch/CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD @CXX_STANDARD@)",
    ),
    Patch(
        "GCC 13 no longer includes <stdexcept> on the way",
        "horovod/common/common.h",
        "#include <memory>\n#include <string>\n",
        "#include <memory>\n#include <stdexcept>\n#include <string>\n",
    ),
    Patch(
        "GCC 13 no longer includes <string> on the way",
        "horovod/common/group_table.h",
        "#include <queue>\n",
        "#include <queue>\n#include <string>\n",
    ),
    Patch(
        "no debug symbols: they double the compiler's memory and make the wheel many times larger",
        "CMakeLists.txt",
        'string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")',
        'set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O3 -DNDEBUG")',
    ),
    Patch(
        # CMake's default is the absolute path of this build's libraries: wrong for a wheel that comes out of the cache.
        "libraries are found relative to the extension, without LD_LIBRARY_PATH, wherever the wheel is installed",
        "CMakeLists.txt",
        "set(CMAKE_CXX_EXTENSIONS OFF)\n",
        _RPATH,
    ),
    Patch(
        "a CPU build does not look for CUDA: an nvcc that lies about (a wrapper, another module's) would break it",
        "CMakeLists.txt",
        "include(CheckLanguage)\ncheck_language(CUDA)\nif(NOT CMAKE_CUDA_COMPILER)\n",
        "include(CheckLanguage)\nif(DEFINED ENV{HOROVOD_GPU_OPERATIONS})\ncheck_language(CUDA)\nendif()\n"
        "if(DEFINED ENV{HOROVOD_GPU_OPERATIONS} AND NOT CMAKE_CUDA_COMPILER)\n",
    ),
    Patch(
        "torch with CUDA beside some CUDA_HOME does not turn a CPU build into a CUDA build",
        "cmake/Modules/FindPytorch.cmake",
        "import torch; from torch.utils.cpp_extension import CUDA_HOME; "
        "print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)",
        "import os, torch; print('HOROVOD_GPU_OPERATIONS' in os.environ and torch.version.cuda is not None)",
    ),
    Patch(
        "CUDA kernels for the old C++ ABI are compiled only if something links them: half of nvcc's time",
        "horovod/common/ops/cuda/CMakeLists.txt",
        "add_library(compatible_horovod_cuda_kernels cuda_kernels.cu)",
        "add_library(compatible_horovod_cuda_kernels EXCLUDE_FROM_ALL cuda_kernels.cu)",
    ),
    Patch(
        "Python 3.12 has no distutils (asking for the headers' directory)",
        "horovod/torch/CMakeLists.txt",
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        "import sysconfig; print(sysconfig.get_path('include'))",
    ),
    Patch(
        "Python 3.12 has no distutils (horovodrun)",
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable",
        "from shutil import which as find_executable",
    ),
    Patch(
        "Open MPI 5 takes long options with two dashes only ('Executable: none'); Open MPI 4 takes both",
        "horovod/runner/mpi_run.py",
        "['-bind-to none', '-map-by slot']",
        "['--bind-to none', '--map-by slot']",
    ),
    Patch(
        "Open MPI's libfabric transport, which two-sided messages do not use, sleeps for a second in MPI_Finalize",
        "horovod/runner/mpi_run.py",
        "'-mca btl ^openib'",
        "'-mca btl ^openib,ofi'",
    ),
    Patch(
        "what is sent to horovodrun over MPI (SIGTERM, say) reaches mpirun and, by it, the ranks, not a shell between them",
        "horovod/runner/mpi_run.py",
        "['/bin/sh', '-c', mpirun_command]",
        "['/bin/sh', '-c', 'exec ' + mpirun_command]",
    ),
    Patch(
        "ssh checks host keys as the user's own configuration says, and fails where it would ask (horovodrun)",
        "horovod/runner/util/remote.py",
        "ssh -o PasswordAuthentication=no -o StrictHostKeyChecking=no",
        "ssh -o BatchMode=yes",
    ),
    Patch(
        "the working directory may have blanks and worse in its name on other hosts too (horovodrun --gloo)",
        "horovod/runner/gloo_run.py",
        ".format(pwd=os.getcwd(), command=command))",
        ".format(pwd=quote(os.getcwd()), command=command))",
    ),
    Patch(
        "the rendezvous server, which knows no passwords, can listen on one address",
        "horovod/runner/http/http_server.py",
        """    def start(self, handler_cls=RendezvousHandler):
        self._httpd, port = find_port(
            lambda addr: RendezvousHTTPServer(
                addr, handler_cls, self._verbose))
""",
        """    def start(self, handler_cls=RendezvousHandler, address=''):
        self._httpd, port = find_port(
            lambda addr: RendezvousHTTPServer(
                (address, addr[1]), handler_cls, self._verbose))
""",
    ),
    Patch(
        "and it listens on the address that the ranks are told (horovodrun --gloo)",
        "horovod/runner/gloo_run.py",
        "    global_rendezv_port = rendezvous.start()\n    rendezvous.init(host_alloc_plan)",
        "    global_rendezv_port = rendezvous.start(address=server_ip)\n    rendezvous.init(host_alloc_plan)",
    ),
    Patch(
        # As released, a scope that is complete makes the server forget who has come to the others: depending on who is
        # faster, "local_HOST" keeps the addresses of closed sockets, and the next hvd.init ends in SIGABRT or never.
        "hvd.shutdown and hvd.init again, over Gloo: the rendezvous server forgets each scope once all its ranks have met",
        "horovod/runner/http/http_server.py",
        "                        self.server.finished_list.clear()\n                        if self.server.verbose:\n",
        "                        del self.server.finished_list[scope]\n                        if self.server.verbose:\n",
    ),
    Patch(
        "the shell becomes the rank: no shell that says 'Terminated' for each",
        "horovod/runner/gloo_run.py",
        "shell='env',",
        "shell='exec env',",
    ),
    # To choose between MPI and Gloo, horovodrun would load torch and the extension in a process of its own: 1.6 s.
    Patch(
        "horovodrun knows whether this wheel was built with MPI",
        "horovod/common/util.py",
        _asks_the_extension("mpi", "MPI"),
        "def mpi_built(verbose=False):\n    return @MPI@\n",
    ),
    Patch(
        "horovodrun knows that this wheel was built with Gloo",
        "horovod/common/util.py",
        _asks_the_extension("gloo", "Gloo"),
        "def gloo_built(verbose=False):\n    return True\n",
    ),
    # horovodrun --gloo: over MPI, mpirun's exit code is the first failed rank's; so it is here.
    Patch(
        "the rank that ended the job has a class of its own; horovod.run() raises it: it is a RuntimeError as before",
        "horovod/runner/gloo_run.py",
        "def _pad_rank(rank, size):\n",
        _FAILURE_CLASS,
    ),
    Patch(
        "the rank that ended the job is named with its host (not the elastic driver's: it counts otherwise)",
        "horovod/runner/gloo_run.py",
        _FAILURE,
        "        if exit_code != 0:\n            raise RankFailure(host_alloc_plan[name], exit_code)\n",
    ),
    Patch(
        "horovodrun --gloo ends with that rank's exit code and one line, not with 1 and its own traceback",
        "horovod/runner/launch.py",
        "    _run(args)\n\n\nif __name__",
        f"{_EXIT}\n\nif __name__",
    ),
    Patch(
        "horovodrun --gloo ends with that rank's exit code and one line (import)",
        "horovod/runner/launch.py",
        "from horovod.runner.gloo_run import gloo_run, gloo_run_elastic\n",
        "from horovod.runner.gloo_run import RankFailure, gloo_run, gloo_run_elastic\n",
    ),
    Patch(
        "ranks stopped because another ended the job are not reported as if they had failed",
        "horovod/runner/gloo_run.py",
        "            if exit_code != 0:\n                print('Process",
        "            if exit_code != 0 and (settings.verbose or settings.elastic):\n                print('Process",
    ),
    Patch(
        "that the other ranks are stopped is said with the rank that ended the job",
        "horovod/runner/gloo_run.py",
        "            if not any(ev.is_set() for ev in all_events):\n",
        "            if settings.verbose and not any(ev.is_set() for ev in all_events):\n",
    ),
    Patch(
        # bash (/bin/sh on Red Hat) becomes a single command that it is given. Such a rank was frozen, then killed after 5 s.
        "horovodrun --gloo tells ranks to end, and gives them 5 s to save, whatever /bin/sh is",
        "horovod/runner/common/util/safe_shell_exec.py",
        _TERMINATE_CHILDREN,
        _TERMINATE_COMMAND,
    ),
    *horovod_waiting.PATCHES,
)


def cxx_standard(torch_version: str) -> int:
    """What torch's headers ask for: 17 from 2.1 on, 20 from 2.14 on."""
    major, minor = (int(part) for part in torch_version.split(".")[:2])
    return 20 if (major, minor) >= (2, 14) else 17


def apply(source: Path, torch_version: str, mpi: bool = True) -> None:
    words = {"@CXX_STANDARD@": str(cxx_standard(torch_version)), "@MPI@": str(mpi)}
    for patch in PATCHES:
        path = source / patch.file
        text = path.read_text() if path.is_file() else ""
        found = text.count(patch.old)
        if found != patch.count:
            raise BuildFailure(
                f"patch does not apply: {patch.file}: {patch.reason}: its text is there {found} times, "
                f"not {patch.count}; this source is not Horovod {VERSION} as released"
            )
        new = patch.new
        for word, value in words.items():
            new = new.replace(word, value)
        path.write_text(text.replace(patch.old, new))


def fingerprint() -> str:
    """Changes whenever a patch or the source does: part of the wheel cache's key."""
    definition = [SDIST_SHA256, [astuple(patch) for patch in PATCHES]]
    return hashlib.sha256(json.dumps(definition).encode()).hexdigest()[:12]
