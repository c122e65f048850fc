"""Hashes of some thirty trainings: the proof that a change of the code changes no bit of a result.

python -m tests.golden                    compare with golden.json
python -m tests.golden --write            write golden.json anew; say in the commit why a hash has changed
python -m tests.golden --against COMMIT   train with that commit's code here, too, and compare

The bits depend on the processor, PyTorch and Horovod. golden.json has the hashes of some machines. On another use --against,
or add its hashes with --write.
"""
