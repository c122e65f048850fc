"""`hvdtrain.starter` or `hvdtrain.launching.forker` as it is, but for what it imports: nothing, so that ranks cost a fork.

SETTINGS='{"import_seconds": 60, "grace": 0.2}' python tests/single/launching/without_imports.py starter --local-ranks 2 x.py
"""

import importlib
import json
import os
import sys
import time

from hvdtrain import starter
from hvdtrain.launching import exit_codes, forker, meeting, supervisor

SETTINGS = json.loads(os.environ.get("SETTINGS", "{}"))


def no_preload(source: str, asked: list[str]) -> None:
    for name in asked if SETTINGS.get("import") else ():
        importlib.import_module(name)
    time.sleep(SETTINGS.get("import_seconds", 0.0))
    while "import_until" in SETTINGS and not os.path.exists(SETTINGS["import_until"]):  # noqa: PTH110
        time.sleep(0.05)
    if "import_error" in SETTINGS:
        raise ZeroDivisionError(SETTINGS["import_error"])


forker.preload = no_preload
supervisor.GRACE_SECONDS = SETTINGS.get("grace", supervisor.GRACE_SECONDS)
supervisor.FAILURE_SECONDS = meeting.FAILURE_SECONDS = 0.2
meeting.ABSENT_LINE_SECONDS = 0.3
if sys.argv.pop(1) == "forker":
    sys.exit(forker.main())
sys.argv[0] = starter.__file__
exit_codes.run_command(starter.main)
