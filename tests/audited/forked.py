"""Starts a program in a process that is forked from one that has imported torch: 4 s less for each run.

python forked.py serve SOCKET MODULES...                   imports torch and them, and forks for each request
python forked.py run SOCKET RANKS PROGRAM ARGUMENTS...     as `python PROGRAM ARGUMENTS...` on so many ranks; ends as they do
"""

import array
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys


def serve(path, *modules):
    import torch
    import torch.optim.swa_utils
    import torch.utils.data

    for name in modules:
        importlib.import_module(name)
    layer = torch.nn.Linear(1, 1)  # a first step imports 900 modules
    layer(torch.ones(1, 1)).sum().backward()
    torch.optim.AdamW(layer.parameters()).step()
    gc.freeze()  # else each program that is forked looks at all of torch's objects, and copies their memory
    server = socket.socket(socket.AF_UNIX)
    server.bind(path + ".new")
    server.listen(16)
    os.rename(path + ".new", path)  # who finds it is not refused: between both lines above, a client would be
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = server.accept()
        if os.fork():
            connection.close()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        server.close()
        supervise(connection, torch)
        os._exit(0)


def supervise(connection, torch):
    data, (ancillary, *_), *_ = connection.recvmsg(1 << 20, socket.CMSG_SPACE(4))
    output = array.array("i", ancillary[2])[0]
    request = json.loads(data)
    pids = [pid for rank in range(request["ranks"]) if (pid := fork(request, rank, output, torch))]
    os.close(output)
    code = 0
    alive = {pid: os.pidfd_open(pid) for pid in pids}
    while alive:
        ready = select.select([connection, *alive.values()], [], [])[0]
        asked = connection.recv(64) if connection in ready else None
        if asked == b"" or (code and not asked):  # the client was killed, or a rank has failed
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
        elif asked:
            for pid in alive:
                os.kill(pid, signal.SIGTERM)
        for pid in [pid for pid, fd in alive.items() if fd in ready or asked == b"" or code]:
            code = os.waitpid(pid, 0)[1] if not code else (os.waitpid(pid, 0), code)[1]
            os.close(alive.pop(pid))
            if code:
                for other in alive:
                    os.kill(other, signal.SIGKILL)
    with contextlib.suppress(OSError):  # the client was killed
        connection.sendall(str(code).encode())


def fork(request, rank, output, torch):
    pid = os.fork()
    if pid:
        return pid
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if (ranks := str(request["ranks"])) != "1":  # as torchrun
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, GROUP_RANK="0"
        )
        os.environ.update(TORCHELASTIC_RUN_ID="none", NODE_RANK="0")
    sys.path[:0] = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.argv = request["words"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    if "HVDTRAIN_AUDIT" in os.environ:
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")  # the recorder
    code = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def run(path, ranks, *words):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        signal.signal(signal.SIGTERM, lambda *_: client.send(b"term"))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        request = {"ranks": int(ranks), "words": words, "environment": environment, "folder": os.getcwd()}
        socket.send_fds(client, [json.dumps(request).encode()], [1])
        answer = client.recv(64)
    if not answer:
        sys.exit("forked.py: the server could not start the program, or has ended: see what it said")
    status = int(answer)
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status) if os.WTERMSIG(status) != signal.SIGXFSZ else signal.SIGKILL)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit({"serve": serve, "run": run}[sys.argv[1]](*sys.argv[2:]))
