#!/bin/sh
# Run the tests of Slurm with that of another Debian: trixie has 24.11, sid 26.05. As root, with debootstrap:
#   tests/e2e/slurm_root.sh DIR/trixie trixie [MIRROR]            four minutes for a new root, then the tests
#   tests/e2e/slurm_root.sh DIR/sid sid -- -k pmi2                options of pytest
# Python, the checkout and its environment are this host's: a newer libc runs them.
set -eu
root=$1 suite=$2 mirror= checkout=$(cd "$(dirname "$0")/../.." && pwd)
shift 2
[ "${1:---}" = -- ] || { mirror=$1 && shift; }
[ "$#" = 0 ] || shift
packages="slurm-wlm munge libpmix-dev openssh-server openssh-client iproute2 iptables procps python3"
if [ ! -x "$root/usr/bin/sbatch" ]; then
    debootstrap --variant=minbase "$suite" "$root" $mirror # none: the one that debootstrap knows
    printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d" # no service is started there
    chmod +x "$root/usr/sbin/policy-rc.d"
    DEBIAN_FRONTEND=noninteractive chroot "$root" apt-get install -qy --no-install-recommends $packages
fi
python=$(readlink -f "$checkout/.venv/bin/python")
export root checkout prefix="${python%/bin/*}"
exec unshare --mount --propagation private sh -euc '
    mount --bind "$root" "$root"
    mount -t proc proc "$root/proc"
    mount --rbind /sys "$root/sys"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs run "$root/run"
    mount -t tmpfs tmp "$root/tmp"
    mkdir -p "$root/old"
    for path in "$checkout" "$prefix"; do mkdir -p "$root$path" && mount --rbind "$path" "$root$path"; done
    cd "$root"
    pivot_root . old
    umount --lazy /old
    cd "$checkout"
    export PATH="$checkout/.venv/bin:/usr/sbin:/usr/bin:/sbin:/bin" HOME=/root
    slurmctld -V
    exec python -m pytest -m slow -p no:cacheprovider tests/e2e/launch/test_slurm.py "$@"
' sh "$@"
