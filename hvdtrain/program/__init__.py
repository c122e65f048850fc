"""Reads the author's program, and tells what is wrong in it or would be lost. Nothing here trains or saves: without it, a
run has the same bits. Whatever a program's source and variables are, reading them ends no run.

source.py       the syntax tree of a program's file
uses.py         its bytecode and variables: whether a name may be used before it is set
marks.py        attributes of objects and of layers, and marks that show whether they change
reached.py      what a program's variables reach, with such marks
anew.py         whether its loops, or what they call, set a value anew before they use it
shown.py        whether a value only decides what is printed, follows from a clock, or is used after the last epoch
carried.py      what its loop carries on from step to step in variables and models, and no checkpoint has
restarted.py    what it has otherwise when it is started again: the order of texts, settings of losses, copies of weights
lacking.py      what optimizers and registered objects change, and do not save
mistakes.py     the table of refusals: what an author may do wrong with a run and in a step
losses.py       the first loss: scaled, divided already, or a mean over other items than samples
means.py        what is recorded: means and sums of a batch
own_counts.py   lengths, sums and rows of one rank, where all ranks' are meant
"""
