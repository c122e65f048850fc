"""Twins by enumeration: what of torch works, differs or is refused, as the table docs/evidence/twins.md.

python -m tests.twins                        all, at 1, 2 and 3 ranks under Horovod and ddp; writes the table
python -m tests.twins --only "layer Conv" -v those whose names contain this; prints each, writes nothing
python -m tests.twins --list

`catalogue.py` walks torch's namespaces and makes a small program of each layer, optimizer, scheduler and so on. `twin.py`
trains it twice, with hvdtrain and in a loop of plain PyTorch, and compares. `ranks.py` does that for many in one launched
job. A new name in torch is in the next table by itself; what cannot be guessed of a constructor is in `arguments.py`.
"""
