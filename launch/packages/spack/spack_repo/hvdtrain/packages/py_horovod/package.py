"""Horovod with launch/patches, for Spack 1.0 and newer: `spack repo add launch/packages/spack/spack_repo/hvdtrain`."""

from pathlib import Path

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *

PATCHES = Path(__file__).resolve().parents[6] / "patches"


class PyHorovod(PythonPackage):
    """Horovod for PyTorch, over MPI and Gloo, with the patches of hvdtrain."""

    homepage = "https://horovod.ai"
    pypi = "horovod/horovod-0.28.1.tar.gz"

    license("Apache-2.0")

    version("0.28.1", sha256="92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0")

    # Spack's own package deprecates this version for CVE-2024-10190: 28-signed-pickles.patch closes it, and CVE-2026-31234.
    for _patch in sorted(PATCHES.glob("*.patch")):
        patch(str(_patch))

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("cmake@3.16:", type="build")
    depends_on("gmake", type="build")
    depends_on("py-setuptools", type="build")
    depends_on("mpi")
    depends_on("py-torch@2.1:", type=("build", "link", "run"))
    depends_on("py-cffi@1.4.0:", type=("build", "run"))
    with default_args(type=("build", "run")):
        depends_on("py-cloudpickle")
        depends_on("py-packaging")
        depends_on("py-psutil")
        depends_on("py-pyyaml")

    def setup_build_environment(self, env):
        for name in ("WITH_PYTORCH", "WITHOUT_TENSORFLOW", "WITHOUT_MXNET", "WITH_MPI", "WITH_GLOO"):
            env.set(f"HOROVOD_{name}", "1")
        env.set("HOROVOD_CMAKE", self.spec["cmake"].command.path)
        env.set("CMAKE_POLICY_VERSION_MINIMUM", "3.5")  # CMake 4 refuses the bundled Gloo's older minimum
        env.set("HVDTRAIN_RPATH", join_path(self.spec["mpi"].prefix, "lib"))
        env.set("MAKEFLAGS", f"-j{make_jobs}")
