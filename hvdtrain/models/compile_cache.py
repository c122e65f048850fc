"""Where torch.compile keeps what it has compiled: libraries and pickles, which the next run executes.

torch's own place is torchinductor_USER in the directory for temporary files. Another user may have made it first.
"""

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path
from types import ModuleType

from hvdtrain.engines import files
from hvdtrain.engines.errors import UserError
from hvdtrain.launching.import_timeout import ImportHook

VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}  # read at the first compilation
# Some of its files torch keeps in its own place whatever the variables say, such as compiled headers.
PLACES = ("torch._inductor.runtime.cache_dir_utils", "torch._inductor.runtime.runtime_utils")  # modules that know it


def use_private(*, needed: bool = False) -> None:
    """Have torch.compile keep its files in this user's cache, unless the environment names another place.

    needed: also where this user has no cache; then they are kept until the end of this process.
    """
    unset = [name for name in VARIABLES if not os.environ.get(name)]
    if "TORCHINDUCTOR_CACHE_DIR" in unset:
        kept = files.cache_directory("compiled", "code")
        if kept is None and needed:
            from hvdtrain.inputs.leftovers import tag  # a later start removes it, should this process be killed

            kept = Path(tempfile.mkdtemp(prefix=f"{tag(os.getpid())}-"))
            atexit.register(shutil.rmtree, kept, ignore_errors=True)
        if kept is None:
            return
        os.environ.update({name: str(kept / VARIABLES[name]) for name in unset})
    redirect_places()


@functools.cache  # once in this process
def redirect_places() -> None:
    """Replace torch's own place when it is imported."""
    for name in PLACES:
        ImportHook(name, redirect)


def redirect(module: ModuleType) -> None:
    """Replace torch's own place by that of the variable."""
    place = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if place and hasattr(module, "default_cache_dir"):
        # torch's own place is one name in the directory for temporary files.
        # Another user may have put files there, to be executed.
        vars(module)["default_cache_dir"] = lambda: str(Path(place).absolute())


def require_private() -> None:
    """Do the same, and raise UserError where other users may write: they could have their code executed."""
    use_private(needed=True)
    for name in VARIABLES:
        if not (value := os.environ.get(name)):
            continue
        directory = Path(value)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            open_to_others = files.others_may_write(directory)
        except OSError as error:
            remedy = "name a directory that can be written"
            raise UserError(
                f"{name}={value}: torch.compile keeps its files there ({error.strerror}): {remedy}"
            ) from error
        if open_to_others:
            message = f"{name}={value}: other users may write there, and what is in it is executed"
            raise UserError(f"{message}: chmod -R go-w it, or unset {name}")
