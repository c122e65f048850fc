#!/bin/bash
# Set up, prove and train on aarch64, emulated by qemu: it shows that all compiles and computes the same after a restart, nothing
# about speed. As root on Debian, with: apt install debootstrap qemu-user-static binfmt-support. 4 GB.
#
#   tests/matrix/aarch64.sh DIRECTORY        the arm64 root is made there, and used again
#
# torch 2.10 is the newest whose aarch64 wheel on the package index is for CPUs; later ones bring 5 GB of CUDA.
set -euo pipefail
root=${1:?directory for the arm64 root}
source=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
[[ -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ]] || { # with flag P: mpicxx is told its own name
    echo "aarch64.sh: the kernel does not know qemu-aarch64: update-binfmts --enable qemu-aarch64" >&2
    exit 2
}
complete=$root/root/debootstrap-is-complete
[[ -e $complete ]] || {
    debootstrap --arch=arm64 --variant=minbase \
        --include=python3,python3-dev,python3-venv,g++,make,ca-certificates,openssh-client bookworm "$root"
    touch "$complete"
}
cp /etc/resolv.conf "$root/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
echo "127.0.0.1 localhost $(hostname)" >"$root/etc/hosts"
[[ -e $root/root/hvdtrain ]] || git clone -q "$source" "$root/root/hvdtrain"
git -C "$root/root/hvdtrain" fetch -q "$source" HEAD
git -C "$root/root/hvdtrain" checkout -q --detach FETCH_HEAD

inside='
set -e
cd /root/hvdtrain
make setup SETUP="--torch 2.10.0"
source .venv/bin/activate
python launch/prove.py --mpi
digits="python -m hvdtrain.mnist --dataset digits --epochs 1 --threads 1 --no-progress --step-timeout 600"
rm -rf /tmp/killed /tmp/whole
timeout 900 horovodrun --mpi -np 2 $digits

ranks() { timeout 900 horovodrun --gloo -np 2 $digits --batch-size 16 --checkpoint-steps 5 --output-dir "$1"; }
fail() { echo "aarch64.sh: $1" >&2; exit 1; }
ranks /tmp/killed &
until [[ -e /tmp/killed/checkpoints/step-00000010.safetensors ]]; do
    kill -0 $! || fail "the run to be killed ended before step 10"
    sleep 0.2
done
python -c "import json, os; os.kill(json.loads(open(\"/tmp/killed/metrics.jsonl\").readline())[\"ranks\"][1][\"pid\"], 9)"
if wait $!; then fail "a job whose rank was killed ended with 0"; fi
ranks /tmp/killed
grep -q "\"event\": \"resume\"" /tmp/killed/metrics.jsonl || fail "it was not resumed"
ranks /tmp/whole
bits() { grep -o "parameters_sha256[^,]*" "$1/summary.json"; }
killed=$(bits /tmp/killed) # `set -e` sees a grep that finds nothing
whole=$(bits /tmp/whole)
[[ $killed == "$whole" ]] || fail "after the kill $killed, uninterrupted $whole"
echo "aarch64: all of it ran"
'
unshare --mount --pid --fork --kill-child bash -c '
    mount -t proc proc "$1/proc" && mount --bind /dev "$1/dev" && mount -t tmpfs tmpfs "$1/dev/shm"
    mount --bind -o ro /sys "$1/sys"
    exec chroot "$1" /usr/bin/env -i HOME=/root LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin \
        PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt bash -c "$2"
' - "$root" "$inside"
