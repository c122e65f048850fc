"""--debug-page PORT: torch's page (torch.distributed.debug) with the stacks, the Flight Recorder and a profile of all ranks.

torch's start_debug_server listens on every interface, and so do its workers on each rank. Here each listens on the
address at which the ranks reach this host alone; on one host, that is loopback. Nothing asks for a password there: whoever
can connect sees stacks. A process of its own serves the page, also where rank 0's main thread is stuck.
"""

import json
import os
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from typing import Any

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError, one_line
from hvdtrain.launching import attendant
from hvdtrain.launching.rendezvous import own_address_towards
from hvdtrain.loop.feature import Feature
from hvdtrain.output.run_output import RunOutput

READY = "ready"


class DebugPage(Feature):
    """Serves the page until the run ends. Raises UserError on every rank."""

    def __init__(self, engine: Engine, output: RunOutput, port: int):
        """A collective."""
        hosts = hosts_of(engine)
        others = [host for host in hosts if host != hosts[engine.rank]]
        self._page: subprocess.Popen[bytes] | None = None
        with engine.raising_together("debug"):
            address = own_address_towards(others[0]) if others else "127.0.0.1"
            self._worker = worker_at(address)
        workers = engine.all_gather_object(f"http://{address}:{self._worker.port}", "debug.workers")
        with engine.raising_together("debug.page"):
            if engine.rank == 0:
                self._serve(address, port, workers)
        output.say(
            f"debug page: http://{address}:{port} (stacks of all ranks; whoever reaches this address can read it)"
        )

    def _serve(self, address: str, port: int, workers: list[str]) -> None:
        asked = dict(address=address, port=port, workers=workers)
        self._page = attendant.start(__name__, asked, stderr=subprocess.DEVNULL)
        assert self._page.stdout is not None
        if (answer := self._page.stdout.readline().decode().strip()) != READY:
            self.close(failed=True)
            raise UserError(f"--debug-page {port}: {answer or 'its process has ended'}")

    def close(self, *, failed: bool) -> None:
        if self._page is not None:
            self._page.kill()
            self._page.wait()
        self._worker.shutdown()


def hosts_of(engine: Engine) -> list[str]:
    """Return the host name of every rank. A collective."""
    return engine.all_gather_object(socket.gethostname(), "debug.hosts")


def worker_at(address: str) -> Any:
    """Return torch's server of this rank, at any free port of `address`. Raises UserError."""
    try:
        import torch.distributed.debug._handlers  # noqa: F401 (what it answers)
        from torch._C._distributed_c10d import _WorkerServer

        return _WorkerServer(address, 0)
    except (ImportError, TypeError) as error:
        raise UserError(f"--debug-page is for torch 2.15 ({one_line(str(error))}): leave it out") from error


def fetched(urls: list[str], timeout: float) -> list[Any]:
    """Post to each URL and return torch's answers, without a package that torch would need for it."""
    from torch.distributed.debug._frontend import Response

    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def post(url: str) -> Any:
        try:
            with direct.open(url, b"", timeout=timeout) as answer:
                return Response(answer.status, answer.read().decode())
        except OSError as error:
            return Response(503, str(error))

    with ThreadPoolExecutor(32) as pool:
        return list(pool.map(post, urls))


def serve(address: str, port: int, workers: list[str]) -> Any:
    """Return torch's server of the page, at `address` alone. workers: the addresses of all ranks' servers."""
    from torch.distributed.debug import _debug_handlers, _frontend

    class Workers:  # in place of the TCPStore that torch asks for them
        def multi_get(self, keys: list[str]) -> list[bytes]:
            return [worker.encode() for worker in workers]

    names = {
        "tcpstore_client": Workers,
        "get_world_size": lambda: len(workers),
        "fetch_aiohttp": fetched,
        "_IPv6HTTPServer": lambda _, handler: ThreadingHTTPServer((address, port), handler),
    }
    for name, value in names.items():
        getattr(_frontend, name)  # another torch may lack it, and would listen on every interface
        setattr(_frontend, name, value)
    handlers = [one for one in _debug_handlers.default_handlers() if type(one).__name__ != "TCPStoreHandler"]
    return _frontend.FrontendServer(port, handlers)


def main(parent: int, address: str, port: int, workers: list[str]) -> int:
    """Serve the page until the parent ends. Tells it whether that is possible. Returns the exit code."""
    attendant.attend(parent)
    try:
        server = serve(address, port, workers)
    except ModuleNotFoundError as error:
        answer = f"needs a package: pip install 'hvdtrain[debug]' ({error})"
    except (ImportError, AttributeError, TypeError) as error:
        answer = f"is for torch 2.15 ({one_line(str(error))}): leave it out"
    except OSError as error:
        answer = f"{address} cannot be listened at ({error.strerror}): name another port"
    else:
        answer = READY
    os.write(1, f"{answer}\n".encode())
    if answer == READY:
        server.join()
    return 2


if __name__ == "__main__":
    sys.exit(main(**json.loads(sys.argv[1])))
