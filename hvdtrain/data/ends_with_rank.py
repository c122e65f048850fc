"""The first module that the fork server of the input workers imports (`loading.start_workers_early`), before torch.

The kernel then ends the server with its rank, until all is imported (fork_server.py). The server itself would notice the end
of the rank only after its imports, half a minute where many ranks share few cores. A launcher waits for that, because the
server holds its output open, and a job that is started again shares the cores with it.
"""

import signal
import sys

from hvdtrain.launching.processes import PR_SET_PDEATHSIG, prctl

if sys.orig_argv[-1].startswith("from multiprocessing.forkserver import main"):
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
