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
[[ -e $root/root ]] || debootstrap --arch=arm64 --variant=minbase \
    --include=python3,python3-dev,python3-venv,g++,make,ca-certificates,openssh-client bookworm "$root"
cp /etc/resolv.conf "$root/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
echo "127.0.0.1 localhost $(hostname)" >"$root/etc/hosts"
[[ -e $root/root/hvdtrain ]] || git clone -q "$source" "$root/root/hvdtrain"

inside='
set -e
cd /root/hvdtrain
make setup SETUP="--torch 2.10.0"
source .venv/bin/activate
python launch/prove.py --mpi
train="--dataset digits --epochs 1 --batch-size 16 --threads 1 --no-progress --step-timeout 600 --checkpoint-steps 5"
ranks() { timeout 900 horovodrun --gloo -np 2 python -m hvdtrain.mnist $train --output-dir "$1"; }
horovodrun -np 2 python -m hvdtrain.mnist --dataset digits --epochs 1 --threads 1 --no-progress
rm -rf /tmp/killed /tmp/whole
ranks /tmp/killed &
until [[ -e /tmp/killed/checkpoints/step-00000010.safetensors ]]; do sleep 0.2; done
python -c "import json, os; os.kill(json.loads(open(\"/tmp/killed/metrics.jsonl\").readline())[\"ranks\"][1][\"pid\"], 9)"
! wait $!
ranks /tmp/killed
ranks /tmp/whole
bits() { grep -o "parameters_sha256[^,]*" "$1/summary.json"; }
[[ $(bits /tmp/killed) == $(bits /tmp/whole) ]]
echo "aarch64: all of it ran"
'
unshare --mount --pid --fork --kill-child bash -c '
    mount -t proc proc "$1/proc" && mount --bind /dev "$1/dev" && mount -t tmpfs tmpfs "$1/dev/shm"
    mount --bind -o ro /sys "$1/sys"
    exec chroot "$1" /usr/bin/env -i HOME=/root LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin \
        PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt bash -c "$2"
' - "$root" "$inside"
