#!/usr/bin/env bash
# Tests on another Slurm release without another machine: a root tree of another release of Debian
# or Ubuntu, with its Slurm and a Python for this project, and commands that run in it on this
# checkout. As root.
#
#   scripts/slurm-tree.sh make DIR SUITE ARCHIVE [KEYRING]   # some minutes, 1.5 GB
#   scripts/slurm-tree.sh run DIR COMMAND...                 # in /opt/synergy, this checkout
#
# ARCHIVE is the address of the distribution's packages, KEYRING what they are signed with. Repeat
# `make` after a change of dependencies. `run` has mounts of its own, which end with it: nothing is
# left mounted, and `rm -r DIR` removes the tree.
#
#   scripts/slurm-tree.sh make /var/tmp/resolute resolute "$ARCHIVE" ubuntu-archive-keyring.gpg
#   scripts/slurm-tree.sh run /var/tmp/resolute python -m pytest tests/slurm/test_client_contract.py
set -euo pipefail

here=$(cd "$(dirname "$0")/.." && pwd)
python_path=/opt/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin
say() { printf 'slurm-tree: %s\n' "$*"; }
fail() { printf 'slurm-tree: %s\n' "$*" >&2; exit 2; }

usage() { sed -n '2,/^set /{ /^set /d; s/^# \{0,1\}//p; }' "$0"; }

# Mounts in a namespace of this command alone. What the machine knows of names and certificates
# holds in the tree too.
inside() { # inside DIR COMMAND...
    local dir=$1
    shift
    unshare --mount --propagation private bash -euc '
        dir=$1 here=$2
        shift 2
        for place in proc dev sys tmp; do mount --rbind "/$place" "$dir/$place"; done
        mkdir -p "$dir/opt/synergy" "$dir/etc/ssl/certs"
        mount --bind "$here" "$dir/opt/synergy"
        # Copies: what packages do to these files in the tree must not reach the machine.
        for place in ssl/certs/ca-certificates.crt resolv.conf hosts; do
            [ ! -e "/etc/$place" ] || cp --remove-destination -L "/etc/$place" "$dir/etc/$place"
        done
        exec chroot "$dir" bash -c "cd /opt/synergy && exec \"\$@\"" tree "$@"
    ' slurm-tree "$dir" "$here" env PATH="$python_path" DEBIAN_FRONTEND=noninteractive \
        PYTHONDONTWRITEBYTECODE=1 "$@"
}

bootstrap() { # bootstrap DIR SUITE ARCHIVE [KEYRING]
    local dir=$1 suite=$2 archive=$3 parts=main rules=sid
    command -v debootstrap >/dev/null || { apt-get -qq update; apt-get -qq install -y debootstrap; }
    case "$archive" in
        *ubuntu*) parts=main,universe rules=gutsy ;;
    esac
    # Releases newer than this machine's debootstrap are made as the others of their family.
    [ -e "/usr/share/debootstrap/scripts/$suite" ] && rules=$suite
    say "making $suite in $dir"
    debootstrap --variant=minbase --components="$parts" ${4:+--keyring="$4"} \
        "$suite" "$dir" "$archive" "/usr/share/debootstrap/scripts/$rules" >/dev/null
}

# In the tree, on the checkout.
fill() {
    [ -e /etc/slurm-tree ] || fail "fill is for the inside of a tree"
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d # no package starts its daemon
    chmod 755 /usr/sbin/policy-rc.d
    apt-get -qq update
    apt-get -qq -o Dpkg::Use-Pty=0 install -y --no-install-recommends \
        slurm-wlm munge slurmdbd mariadb-server-core libslurm-dev lua5.1 \
        python3-dev python3-venv gcc libc6-dev git procps util-linux >/dev/null
    [ -x /opt/venv/bin/pip ] || python3 -m venv /opt/venv
    # The very checkout is run, and nothing is written into it: only its dependencies and programs
    # are installed.
    local copy site release
    copy=$(mktemp -d)
    cp -r setup.cfg pyproject.toml README.md LICENSE etc slurm_synergy "$copy"
    /opt/venv/bin/pip install -q --disable-pip-version-check \
        "$copy[controller,solver,test]" scikit-learn
    rm -r "$copy"
    site=$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    rm -r "$site/slurm_synergy"
    echo /opt/synergy >"$site/synergy-checkout.pth"
    # pyslurm is built for one release of Slurm; there is none for most.
    release=$(slurmctld -V | sed -n 's/^slurm[^ ]* \([0-9]*\.[0-9]*\).*/\1/p')
    SLURM_LIB_DIR=$(dirname "$(find /usr/lib -name libslurmfull.so | head -n 1)") \
        /opt/venv/bin/pip install -q --disable-pip-version-check "pyslurm==$release.*" \
        || echo "slurm-tree: no pyslurm for Slurm $release; its tests are skipped" >&2
    echo "slurm-tree: $(slurmctld -V), $(/opt/venv/bin/python -V)"
}

case "${1:-}" in
    make)
        [ $# -ge 4 ] || fail "make wants DIR SUITE ARCHIVE [KEYRING]; $0 --help has examples"
        [ "$(id -u)" -eq 0 ] || fail "only root can make a root tree"
        mkdir -p "$2"
        dir=$(cd "$2" && pwd)
        [ -e "$dir/usr/bin/apt-get" ] || bootstrap "$dir" "${@:3}"
        touch "$dir/etc/slurm-tree"
        inside "$dir" bash scripts/slurm-tree.sh fill
        ;;
    fill) fill ;;
    run)
        [ $# -ge 3 ] || fail "run wants DIR COMMAND..."
        [ -x "$2/opt/venv/bin/python" ] || fail "$2 is no tree with a Python; make it first"
        inside "$(cd "$2" && pwd)" "${@:3}"
        ;;
    -h | --help) usage ;;
    *) fail "first word: make or run; $0 --help tells what they do" ;;
esac
