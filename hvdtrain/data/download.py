"""Downloads dataset files once per host: https only, with limits on time and size, verified before they are stored.

Import this module only if needed: importing ssl and http takes longer than loading cached data.
"""

import json
import os
import queue
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from hvdtrain.data import cache
from hvdtrain.engines import files

SCHEMES = ("https",)  # allowed for mirrors and redirects
ANSWER_SECONDS = 5.0  # for a mirror's first answer, including name resolution, connection, TLS and headers
SILENCE_SECONDS = 3.0  # for a connection attempt to one address, and for a stalled transfer
TOTAL_SECONDS = 120.0  # for all files together
FAILURE = "download-failed.json"


class DownloadFailed(Exception):
    """The download failed. The message is one line with each mirror and its error."""


def download(
    mirrors: Sequence[str],
    sizes: dict[str, int],
    target: Path,
    state: Path | None,
    unpack: Callable[[str, bytes], bytes],
) -> None:
    """Download, unpack and verify the files in `sizes` that are missing in directory `target`.

    mirrors: URLs that end in "/", with FILE.gz. They are tried in order; a mirror that fails is not used again.
    sizes: file name -> size of the unpacked content in bytes.
    state: directory for the lock and the record of a failure; None: `target`.
    unpack(file, packed): returns the content; raises DownloadFailed if it is wrong.

    All processes of a host may call this at once: the first one downloads, the others wait for its files or its failure.
    Raises DownloadFailed.
    """
    started, deadline = time.time(), time.monotonic() + TOTAL_SECONDS
    there = next(path for path in (target, *target.absolute().parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        raise DownloadFailed(f"{there} cannot be written")
    if state is None or not os.access(state, os.W_OK | os.X_OK):
        state = target
    try:
        state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DownloadFailed(f"{state} cannot be made ({error.strerror})") from None
    with cache.locked(state, TOTAL_SECONDS + 30) as problem:
        if problem:
            raise DownloadFailed(problem)
        missing = [file for file in sizes if not (target / file).is_file()]
        if not missing:
            return
        failure = state / FAILURE
        _raise_again(failure, started)
        try:
            _fetch(mirrors, {file: sizes[file] for file in missing}, target, unpack, deadline)
        except DownloadFailed as error:
            with suppress(OSError):
                files.write(failure, json.dumps({"time": time.time(), "reason": str(error)}).encode())
            raise
        with suppress(OSError):
            failure.unlink(missing_ok=True)


def _fetch(
    mirrors: Sequence[str], sizes: dict[str, int], target: Path, unpack: Callable[[str, bytes], bytes], deadline: float
) -> None:
    left = list(mirrors)
    problems: list[str] = []
    for file, size in sizes.items():
        while True:
            if not left:
                raise DownloadFailed("; ".join(problems))
            try:
                # Compressed data are at most slightly larger than the content.
                content = unpack(file, get(f"{left[0]}{file}.gz", size + size // 100 + 4096, deadline))
                break
            except DownloadFailed as error:
                problems.append(f"{urlsplit(left.pop(0)).netloc}: {error}")
        try:
            target.mkdir(parents=True, exist_ok=True)
            files.remove_partial(target, cache.STALE_SECONDS)
            files.write(target / file, content)
        except OSError as error:
            raise DownloadFailed(f"{target} cannot be written ({error.strerror})") from None


def get(url: str, limit: int, deadline: float) -> bytes:
    """Return the body at `url`. Raises DownloadFailed, also for more than `limit` bytes or after `deadline`
    (time.monotonic)."""
    body = bytearray()
    try:
        with _answer(url, min(ANSWER_SECONDS, deadline - time.monotonic())) as response:
            while chunk := response.read1(1 << 18):
                body += chunk
                if len(body) > limit:
                    raise DownloadFailed(f"sent more than the {limit:,} bytes that are possible")
                if time.monotonic() > deadline:
                    raise DownloadFailed(f"not done after {TOTAL_SECONDS:.0f} seconds in total")
    except (OSError, HTTPException) as error:  # HTTPException: a damaged chunk
        raise DownloadFailed(_plain(error)) from None
    return bytes(body)


def _answer(url: str, seconds: float) -> HTTPResponse:
    """Open `url`. Raises DownloadFailed, also if there is no answer within `seconds`."""
    # urllib's timeout applies to each address of a host separately, and not to name resolution. Only a separate thread,
    # which is abandoned after the time limit, bounds the total.
    answers: queue.SimpleQueue[HTTPResponse | Exception] = queue.SimpleQueue()
    abandoned = threading.Event()

    def ask() -> None:
        try:
            opener = urllib.request.build_opener(_Redirects)  # takes proxies from the environment
            opener.addheaders = [("User-Agent", "hvdtrain")]
            answer = opener.open(url, timeout=SILENCE_SECONDS)
        except Exception as error:
            answer = error
        answers.put(answer)
        if abandoned.is_set() and not isinstance(answer, Exception):
            answer.close()

    if urlsplit(url).scheme not in SCHEMES:
        raise DownloadFailed(f"refused, not {SCHEMES[0]}: {url}")
    threading.Thread(target=ask, daemon=True, name="download").start()
    try:
        answer = answers.get(timeout=max(seconds, 0.001))
    except queue.Empty:
        abandoned.set()
        raise DownloadFailed(f"no answer in {seconds:.2g} seconds") from None
    if isinstance(answer, Exception):
        raise DownloadFailed(_plain(answer)) from None
    return answer


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Raises DownloadFailed for redirects to other schemes than SCHEMES."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        if urlsplit(newurl).scheme not in SCHEMES:
            raise DownloadFailed(f"redirects to a URL that is not {SCHEMES[0]}: {newurl}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _plain(error: Exception) -> str:
    """Return an error of urllib as one line, without its wrapping."""
    reason = getattr(error, "reason", None)
    code = getattr(error, "code", None)
    if code is not None:
        return f"HTTP {code} {reason}"
    inner = reason if isinstance(reason, Exception) else error
    return " ".join(str(getattr(inner, "strerror", None) or inner or type(inner).__name__).split())


def _raise_again(failure: Path, started: float) -> None:
    """Raise the failure that another process has recorded while this one waited, since `started` (time.time)."""
    try:
        noted = json.loads(files.read_small(failure))
        if noted["time"] >= started:
            raise DownloadFailed(noted["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return
