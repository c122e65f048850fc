#!/bin/bash
# Tests and rates on a node with several GPUs, where `make setup SETUP=--gpu` has run: bash tests/gpu/eight.sh [FOLDER]
# Each test prints what it saw into FOLDER/seen; the rates are in FOLDER/rates.jsonl.
set -u
out=$(mkdir -p "${1:-runs/gpu}" && cd "${1:-runs/gpu}" && pwd)
source .venv/bin/activate
nvidia-smi topo -m > "$out/machine.txt" 2>&1; nvidia-smi >> "$out/machine.txt" 2>&1; lscpu >> "$out/machine.txt"
HVDTRAIN_GPU_SEEN=$out/seen python -m pytest -v -m gpu tests/gpu 2>&1 | tee "$out/tests.txt"
python -m tests.gpu.rates --out "$out"
