"""What only a GPU can show: tests, rates, and two scripts that run both.

python -m pytest -m gpu tests/gpu                  tests, on a host with an NVIDIA GPU; two ranks share it where it is alone
python -m tests.gpu.rates --out OUT                images/s and tokens/s, beside plain PyTorch in the same minutes
bash tests/gpu/alone.sh prepare; bash tests/gpu/alone.sh SECONDS     a machine with one GPU and no network
bash tests/gpu/eight.sh                            a node with several GPUs

HVDTRAIN_GPU_TESTS=cpu, and --device cpu --quick: a rehearsal on processors, which shows nothing about GPUs.
"""
