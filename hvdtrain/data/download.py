"""Downloads dataset files, verified before they are stored, with limits on time and size.

Import this module only if needed: importing ssl and http takes longer than loading cached data.
"""

import json
import queue
import secrets
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from hvdtrain.data import cache
from hvdtrain.data.published import UNSOUND, DownloadFailed, File, Published, unpacked
from hvdtrain.engines import files
from hvdtrain.engines.errors import one_line

SILENCE_SECONDS = 5.0  # without a byte; also for a mirror's first answer, with name resolution, connection and TLS
TOTAL_SECONDS = 120.0  # for all files together
FAILURE = "download-failed.json"


def last_failure(state: Path) -> bytes:
    """Return the note of the last download that has failed, in directory `state`; b"" if there is none."""
    with suppress(OSError):
        return files.read_small(state / FAILURE)
    return b""


def download(published: Published, missing: Sequence[File], target: Path, state: Path, before: bytes) -> None:
    """Download the files in `missing` to directory `target`, as FILE.gz. The caller holds the lock of directory `state`.

    A failure is noted there. before: `last_failure` before this process waited for the lock. If there is another one now,
    it fails as well, and does not try again. No clock is compared: it may have jumped, or be another host's.
    Raises DownloadFailed.
    """
    failed = last_failure(state)
    if failed != before:
        with suppress(ValueError, TypeError, KeyError):
            raise DownloadFailed(json.loads(failed)["reason"])
    try:
        _download(published, missing, target)
    except DownloadFailed as error:
        with suppress(OSError):
            files.write(state / FAILURE, json.dumps({"id": secrets.token_hex(8), "reason": str(error)}))
        raise


def _download(published: Published, missing: Sequence[File], target: Path) -> None:
    """Download the files. The mirrors are tried in order; one that fails is not used again. Raises DownloadFailed."""
    deadline, left, problems = time.monotonic() + TOTAL_SECONDS, list(missing), []
    for mirror in published.mirrors:
        try:
            while left:
                packed = get(f"{mirror}{left[0].name}.gz", left[0].most_bytes, deadline)
                unpacked(published, left[0], packed)
                _store(target / f"{left[0].name}.gz", packed)
                del left[0]
            return
        except (HTTPException, *UNSOUND) as error:  # HTTPException: a damaged chunk
            problems.append(f"{urlsplit(mirror).netloc}: {one_line(error)}")
    raise DownloadFailed("; ".join(problems))


def _store(path: Path, content: bytes) -> None:
    try:
        files.remove_partial(path.parent, cache.STALE_SECONDS)
        files.write(path, content)
    except OSError as error:
        raise DownloadFailed(f"{path} cannot be written ({error.strerror})") from None


def get(url: str, limit: int, deadline: float) -> bytes:
    """Return the body at `url`. Raises ValueError for more than `limit` bytes, TimeoutError after `deadline`
    (time.monotonic) or in a long silence, and what urllib raises."""
    # urllib's timeout applies to each address of a host separately, and not to name resolution. Only a separate thread,
    # which is abandoned after the time limit, bounds the total.
    parts: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
    over = threading.Event()

    def transfer() -> None:
        try:
            # Takes proxies from the environment. A redirect to http does no harm: the content is verified.
            request = urllib.request.Request(url, headers={"User-Agent": "hvdtrain"})
            # The loop below notices a silence first, and says so.
            with urllib.request.urlopen(request, timeout=2 * SILENCE_SECONDS) as answer:
                while not over.is_set() and (part := answer.read1(1 << 18)):
                    parts.put(part)
            parts.put(b"")
        except Exception as error:
            parts.put(error)

    threading.Thread(target=transfer, daemon=True, name="download").start()
    body = bytearray()
    try:
        while True:
            left = deadline - time.monotonic()
            part = parts.get(timeout=max(0.0, min(left, SILENCE_SECONDS)))
            if isinstance(part, Exception):
                raise part
            if not part:
                return bytes(body)
            body += part
            if len(body) > limit:
                raise ValueError(f"sent more than the {limit:,} bytes that are possible")
    except queue.Empty:
        if left < SILENCE_SECONDS:
            raise TimeoutError(f"not done after {TOTAL_SECONDS:.0f} seconds in total") from None
        raise TimeoutError(f"no answer in {SILENCE_SECONDS:.2g} seconds") from None
    finally:
        over.set()
