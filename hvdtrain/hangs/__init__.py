"""Notices ranks that hang, die or are asked to stop, and ends the job. Imports nothing of `training`.

activity.py      what this rank is doing: one variable that the engine and the loop set
timeouts.py      how long each phase may take without progress; work.py: who is at work, and who lacks a core
monitor.py       a thread on each rank: hears stop signals, answers rank 0, looks at the other ranks and the launcher
detector.py      how long this rank has made no progress; whether to ask the others
diagnosis.py     who hangs, from the ranks' reports: pure functions
messages.py      what the monitors tell each other; channel.py: the connections; peers.py: who is connected
"""
