#!/bin/sh
# Run the tests of Slurm with that of a Debian: bookworm has 22.05, trixie 24.11, sid 26.05. As root, with debootstrap:
#   for suite in bookworm trixie sid; do tests/e2e/roots/slurm.sh DIR/$suite $suite; done     four minutes for a new root, then the tests
#   tests/e2e/roots/slurm.sh DIR/sid sid [MIRROR] -- -k pmi2                                 options of pytest
# Python, the checkout and its environment are this host's: a newer libc runs them.
set -eu
root=$1 suite=$2 mirror= checkout=$(cd "$(dirname "$0")/../../.." && pwd)
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
exec "${0%/*}/enter.sh" "$root" --bind "$checkout" --bind "${python%/bin/*}" \
    env PATH="$checkout/.venv/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
    sh -euc 'cd "$0"; slurmctld -V; exec python -m pytest -m slow -p no:cacheprovider tests/e2e/launch/test_slurm*.py "$@"' "$checkout" "$@"
