"""Notices ranks that hang, die or are asked to stop, and ends the job. Imports nothing of `training`.

activity.py      what this rank is doing: one variable that the engine and the loop set
timeouts.py      how long each phase may take without progress
monitor.py       a thread on each rank: looks at its main thread, hears signals, answers rank 0
diagnosis.py     who hangs, from the ranks' reports: pure functions
messages.py      what the monitors tell each other; channel.py: the connections; peers.py: who is connected
"""
