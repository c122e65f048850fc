#!/bin/sh
# Make a root file system that has Apptainer, Slurm and Open MPI 5, and a base image for recipes, where no registry of images is in
# reach. As root, with debootstrap:   tests/e2e/roots/apptainer.sh DIR [MIRROR]       five minutes, 1.5 GB
# DIR/host is Debian 13 with Apptainer of the unstable suite, the only one that has it. DIR/base stands for docker://debian.
set -eu
mkdir -p "$1"
debootstrap --variant=minbase --include=ca-certificates bookworm "$1/base" ${2-} # none: the one that debootstrap knows
mirror=$(awk '$1 == "deb" { print $2; exit }' "$1/base/etc/apt/sources.list")
rm -rf "$1/base/dev"
mkdir "$1/base/dev"
chown -R 1234:1234 "$1/base"
"${0%/*}/slurm.sh" "$1/host" trixie "$mirror" -- --collect-only -q
printf 'deb %s sid main\n' "$mirror" >"$1/host/etc/apt/sources.list.d/sid.list"
printf 'Package: *\nPin: release a=unstable\nPin-Priority: 100\n' >"$1/host/etc/apt/preferences.d/sid"
chroot "$1/host" apt-get update -q -o Acquire::Check-Valid-Until=false # a mirror may be some weeks old
DEBIAN_FRONTEND=noninteractive chroot "$1/host" apt-get install -qy --no-install-recommends apptainer/unstable \
    ca-certificates e2fsprogs fakeroot fuse-overlayfs openmpi-bin squashfs-tools squashfuse uidmap
# An ordinary user, as on a cluster, with subordinate ids for `build --fakeroot`.
chroot "$1/host" useradd --uid 1234 --create-home --shell /bin/bash someone
printf 'someone:100000:65536\n' | tee "$1/host/etc/subuid" >"$1/host/etc/subgid"
printf '127.0.0.1 localhost %s\n' "$(hostname)" >"$1/host/etc/hosts"
