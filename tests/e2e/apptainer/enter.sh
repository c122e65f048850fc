#!/bin/sh
# Run a command as an ordinary user in a root made by make.sh, in a mount namespace of its own. As root:
#   tests/e2e/apptainer/enter.sh DIR [--bind PATH]... COMMAND...      a PATH is there under its own name; DIR/base is /base
# Not a chroot: Apptainer finds no mount point above that.
set -eu
host=$1/host base=$1/base
shift
binds=
while [ "$1" = --bind ]; do binds="$binds $2" && shift 2; done
export host base binds
exec unshare --mount --propagation private sh -euc '
    mount --bind "$host" "$host"
    mount -t proc proc "$host/proc"
    mount --rbind /sys "$host/sys"
    mount -t tmpfs -o mode=755 dev "$host/dev"
    for device in "null 1 3" "zero 1 5" "full 1 7" "random 1 8" "urandom 1 9" "tty 5 0" "fuse 10 229"; do
        set -- "$@" # keeps the command
        name=${device%% *} numbers=${device#* }
        mknod -m 666 "$host/dev/$name" c ${numbers% *} ${numbers#* }
    done
    mkdir -p "$host/dev/pts" "$host/dev/shm" "$host/base" "$host/old"
    mount -t devpts -o newinstance,ptmxmode=666 pts "$host/dev/pts"
    ln -s pts/ptmx "$host/dev/ptmx"
    for link in "fd /proc/self/fd" "stdin fd/0" "stdout fd/1" "stderr fd/2"; do ln -s "${link#* }" "$host/dev/${link%% *}"; done
    mount -t tmpfs shm "$host/dev/shm"
    mount -t tmpfs tmp "$host/tmp"
    mount --bind "$base" "$host/base"
    for path in $binds /etc/resolv.conf; do
        if [ -d "$path" ]; then mkdir -p "$host$path"; else mkdir -p "$host${path%/*}" && touch "$host$path"; fi
        mount --rbind "$path" "$host$path"
    done
    cd "$host"
    pivot_root . old
    umount --lazy /old
    cd /home/someone
    exec setpriv --reuid=1234 --regid=1234 --init-groups env -u host -u base -u binds HOME=/home/someone USER=someone "$@"
' sh "$@"
