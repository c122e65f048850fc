"""Notices ranks that hang, die or are asked to stop, and ends the job. Imports nothing of `training`.

monitor.py          a thread on each rank: hears stop signals, answers rank 0, looks at the other ranks and the launcher
settings.py         how it behaves, and whom it tells; script_watchdog.py: the same for a script that does not use hvdtrain
detector.py         how long this rank has made no progress; whether to ask the others, or to end the job
diagnosis.py        who hangs, from the ranks' reports: pure functions
timeouts.py         how long each phase may take without progress (the phases: guards/activity.py)
work.py             who is at work, and who lacks a core; stacks.py: where it is
messages.py         what the monitors tell each other; channel.py: the connections
peers.py            who the ranks are, and what became of those that are gone
start_limit.py      a limit for the time before there is a monitor; leaving.py: for the time after it
"""
