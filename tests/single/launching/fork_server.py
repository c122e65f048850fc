"""`hvdtrain.launching.forker` as it is, but for what it imports: nothing, so that its ranks cost no more than a fork.

IMPORT_ERROR=1 python tests/single/launching/fork_server.py script.py
"""

import os
import sys

from hvdtrain.launching import forker, preload


def no_preload(source: str, asked: object) -> None:
    if "IMPORT_ERROR" in os.environ:
        raise ZeroDivisionError


preload.preload = no_preload
sys.exit(forker.main())
