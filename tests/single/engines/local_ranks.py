"""`hvdtrain.starter` as it is, but for what it imports: nothing, so that its ranks cost no more than a fork.

SETTINGS='{"import_seconds": 60, "grace": 0.2}' python tests/single/engines/local_ranks.py --local-ranks 2 script.py
"""

import json
import os
import sys
import time

from hvdtrain import starter
from hvdtrain.engines import exit_codes, meeting
from hvdtrain.engines.forking import preload, supervisor

SETTINGS = json.loads(os.environ.get("SETTINGS", "{}"))


def no_preload(source: str, asked: object) -> None:
    time.sleep(SETTINGS.get("import_seconds", 0.0))
    if "import_error" in SETTINGS:
        raise ZeroDivisionError(SETTINGS["import_error"])


preload.preload = no_preload
supervisor.GRACE_SECONDS = SETTINGS.get("grace", supervisor.GRACE_SECONDS)
supervisor.FAILURE_SECONDS = meeting.FAILURE_SECONDS = 0.2
meeting.SAY_SECONDS = 0.3
sys.argv[0] = starter.__file__
exit_codes.run(starter.main)
