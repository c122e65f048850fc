"""The secret that the processes of a job share, by which their rendezvous server knows them."""

import contextlib
import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.engines import atomic, files
from hvdtrain.engines.errors import UserError

SECRET_VARIABLE = "HVDTRAIN_JOB_SECRET"
SHORTEST = 16  # characters
SECRET_REMEDY = f"set {SECRET_VARIABLE} to the same secret on every host, such as the output of `openssl rand -hex 32`"


def job_secret(environment: Mapping[str, str], size: int) -> str:
    """Return the secret of a job of `size` starters. Raises UserError if they could not all know it.

    It is in the environment, or else in a file of this user's cache, which hosts that share the home directory share. Not on
    a command line, which every user of a host can read.
    """
    if given := environment.get(SECRET_VARIABLE):
        if len(given) < SHORTEST:
            raise UserError(f"{SECRET_VARIABLE} has {len(given)} characters, which can be guessed: {SECRET_REMEDY}")
        return given
    if size == 1:
        return secrets.token_hex(32)
    if "KUBERNETES_SERVICE_HOST" in environment:
        # Pods share no home directory, and have no other users. A network policy keeps other pods away.
        return f"a job in Kubernetes at {environment.get('MASTER_ADDR') or environment.get('PET_MASTER_ADDR')}"
    directory = files.cache_directory("job", "secrets")
    if directory is None:
        raise UserError(
            f"this user has no private cache directory, in which the hosts find the job's secret: {SECRET_REMEDY}"
        )
    path = directory / "secret"
    try:
        with contextlib.suppress(FileNotFoundError):
            return read_secret(path)
        own = path.with_name(f".secret.{os.getpid()}-{secrets.token_hex(4)}{atomic.PARTIAL}")
        with os.fdopen(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):  # that of another process, which was first
            path.hardlink_to(own)
        own.unlink()
        return read_secret(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}, the job's secret, cannot be used ({error}): remove it, or {SECRET_REMEDY}") from error


def read_secret(path: Path) -> str:
    """Return the secret in a file. Raises OSError, ValueError."""
    secret = files.read_small(path, most=1000, owner=os.geteuid()).decode()
    if len(secret) < SHORTEST:
        raise ValueError("too short")
    return secret


def token(secret: str, port: int) -> str:
    """Return what a request to the rendezvous server at `port` names to be heard: made from the secret, not itself one."""
    return hmac.digest(secret.encode(errors="surrogateescape"), f"rendezvous at port {port}".encode(), "sha256").hex()
