"""Attempts to break commands from outside: full and odd file systems, directories that change, clocks that jump, limits,
signals, odd files of data and records, careless programs.

python -m tests.chaos.environments                     all, one after the other
python -m tests.chaos.environments --jobs 3
python -m tests.chaos.environments --only no-locks     names, or beginnings of names or kinds, joined by commas
python -m tests.chaos.environments --list

Attempts with file systems and host names of their own need root, those with calls that fail gcc; else they are skipped.
"""

import sys

from tests.chaos import attempts
from tests.chaos.hostile_data import DATA
from tests.chaos.jobs import JOBS
from tests.chaos.own_programs import PROGRAMS
from tests.chaos.surroundings import SURROUNDINGS

ATTEMPTS = [*SURROUNDINGS, *JOBS, *DATA, *PROGRAMS]


if __name__ == "__main__":
    sys.exit(attempts.main(ATTEMPTS, "tests.chaos.environments"))
