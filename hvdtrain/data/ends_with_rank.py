"""The first module that the fork server of the input workers imports (`loading.start_workers_early`), before torch.

The kernel then ends the server with its rank. The server itself would notice the end of the rank only after all its imports,
half a minute where many ranks share few cores. A launcher waits for that, because the server holds its output open, and a
job that is started again shares the cores with it.
"""

import re
import signal
import sys

from hvdtrain.engines.processes import end_with_parent

RANK = "hvdtrain-rank-"  # begins what the command line of a fork server says about the rank: its pid

if found := re.search(f"{RANK}([0-9]+)", sys.orig_argv[-1]):
    end_with_parent(int(found[1]), signal.SIGKILL)
