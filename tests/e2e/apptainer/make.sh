#!/bin/sh
# Make a root file system that has Apptainer, and a base image for recipes, where no registry of images is in reach. As root, with
# debootstrap:   tests/e2e/apptainer/make.sh DIR [MIRROR]       two minutes, 1.5 GB
# Apptainer is in Debian's unstable suite only, and needs its libc. DIR/host is that suite; DIR/base stands for docker://debian.
set -eu
mirror=${2:-} # none: the one that debootstrap knows
packages=apptainer,ca-certificates,e2fsprogs,fakeroot,fuse-overlayfs,iproute2,openssh-client,procps,python3,squashfs-tools,squashfuse,uidmap
mkdir -p "$1"
debootstrap --variant=minbase --include="$packages" sid "$1/host" $mirror &
debootstrap --variant=minbase --include=ca-certificates bookworm "$1/base" $mirror
wait
# An ordinary user, as on a cluster, with subordinate ids for `build --fakeroot`.
chroot "$1/host" useradd --uid 1234 --create-home --shell /bin/bash someone
printf 'someone:100000:65536\n' | tee "$1/host/etc/subuid" >"$1/host/etc/subgid"
printf '127.0.0.1 localhost %s\n' "$(hostname)" >"$1/host/etc/hosts"
rm -rf "$1/base/dev"
mkdir "$1/base/dev"
chown -R 1234:1234 "$1/base"
