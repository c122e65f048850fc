"""Notices ranks that hang, die or are asked to stop, and ends the job. Imports nothing of `loop`.

watch.py        a thread on each rank: hears stop signals, answers rank 0, looks at the other ranks and the launcher
detector.py     how long this rank has made no progress; whether to ask the others, or to end the job
judge.py        who hangs, from the ranks' reports, and how long each phase may take: pure functions
connection.py   who the ranks are, what became of those that are gone, and the connections between them
evidence.py     where this process is, whether it works, whether it has a core, the last collectives of its GPU
limits.py       time limits of the start, before there is a watch, and of the end after it
activity.py     what the main thread is doing, as engines and the loop say it
"""
