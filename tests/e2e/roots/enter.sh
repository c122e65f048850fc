#!/bin/sh
# Run a command in another root file system, in a mount namespace of its own. As root:
#   tests/e2e/roots/enter.sh ROOT [--user UID] [--bind PATH]... COMMAND...      PATH, or PATH=NAME, is there under that name
# Not a chroot: Apptainer finds no mount point above that.
set -eu
root=$1 binds= user=
shift
while :; do
    case $1 in
    --bind) binds="$binds $2" ;;
    --user) user=$2 ;;
    *) break ;;
    esac
    shift 2
done
export root binds user
exec unshare --mount --propagation private sh -euc '
    mount --bind "$root" "$root"
    mount -t proc proc "$root/proc"
    mount --rbind /sys "$root/sys"
    mount -t tmpfs run "$root/run"
    mount -t tmpfs -o mode=755 dev "$root/dev"
    for device in "null 1 3" "zero 1 5" "full 1 7" "random 1 8" "urandom 1 9" "tty 5 0" "fuse 10 229"; do
        name=${device%% *} numbers=${device#* }
        mknod -m 666 "$root/dev/$name" c ${numbers% *} ${numbers#* }
    done
    mkdir -p "$root/dev/pts" "$root/dev/shm" "$root/old"
    mount -t devpts -o newinstance,ptmxmode=666 pts "$root/dev/pts"
    ln -s pts/ptmx "$root/dev/ptmx"
    for link in "fd /proc/self/fd" "stdin fd/0" "stdout fd/1" "stderr fd/2"; do ln -s "${link#* }" "$root/dev/${link%% *}"; done
    mount -t tmpfs shm "$root/dev/shm"
    mount -t tmpfs tmp "$root/tmp"
    for bind in $binds /etc/resolv.conf; do
        path=${bind%=*} name=$root${bind#*=}
        if [ -d "$path" ]; then mkdir -p "$name"; else mkdir -p "${name%/*}" && touch "$name"; fi
        mount --rbind "$path" "$name"
    done
    cd "$root"
    pivot_root . old
    umount --lazy /old
    account=$(getent passwd "${user:-0}")
    home=$(echo "$account" | cut -d: -f6)
    cd "$home"
    set -- env -u root -u binds -u user HOME="$home" USER="${account%%:*}" "$@"
    [ -z "$user" ] || set -- setpriv --reuid="$user" --regid="$user" --init-groups "$@"
    exec "$@"
' sh "$@"
