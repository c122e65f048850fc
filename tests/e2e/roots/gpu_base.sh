#!/bin/sh
# Make DIR/gpu-base, a stand-in for NVIDIA's PyTorch image, which needs a registry: Debian 12 with torch of the package index, Debian's
# Open MPI 4.1.4, and a CUDA toolkit of this machine. As root, after apptainer.sh:
#   tests/e2e/roots/gpu_base.sh DIR [CUDA]           ten minutes, 8 GB; CUDA: a toolkit with nvcc, default /usr/local/cuda
set -eu
base=$1/gpu-base cuda=$(readlink -f "${2:-/usr/local/cuda}")
cp -a "$1/base" "$base"
chown -R 0:0 "$base"
for path in /etc/resolv.conf /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do [ ! -f "$path" ] || cp "$path" "$base$path"; done
"${0%/*}/enter.sh" "$base" sh -euc '
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q
    apt-get install -qy --no-install-recommends ca-certificates cmake g++ git iproute2 libopenmpi-dev make ninja-build openmpi-bin \
        openssh-client python-is-python3 python3-dev python3-pip
    rm /usr/lib/python3*/EXTERNALLY-MANAGED # as in NVIDIA'\''s
    pip install --no-cache-dir cloudpickle numpy packaging psutil pyyaml setuptools torch torchvision wheel'
cp -a "$cuda" "$base/usr/local/${cuda##*/}"
ln -sfn "${cuda##*/}" "$base/usr/local/cuda"
rm -rf "$base/dev" "$base/var/lib/apt/lists"
mkdir "$base/dev"
chown -R 1234:1234 "$base"
