#!/bin/sh
# Installs what the embedded cluster needs: Slurm, munge, and a Lua interpreter for the tests; where
# they can be had, slurmdbd and a database server for its accounting (without them the tests of
# limits of accounts are skipped).
# Harmless to repeat; starts no daemon; changes no configuration of a Slurm that is already there.
set -eu

say() { printf 'install-slurm: %s\n' "$*"; }
fail() { printf 'install-slurm: %s\n' "$*" >&2; exit 1; }

# Daemons live in sbin, which an ordinary user's PATH often lacks.
PATH="$PATH:/usr/sbin:/sbin"

missing=""
need() { # need PROGRAM PACKAGE
    command -v "$1" >/dev/null 2>&1 || missing="$missing $2"
}
need slurmctld slurm-wlm
need slurmd slurm-wlm
need sbatch slurm-wlm
need munged munge
command -v lua5.1 >/dev/null 2>&1 || command -v lua5.3 >/dev/null 2>&1 \
    || command -v lua5.4 >/dev/null 2>&1 || missing="$missing lua5.1"
missing=$(printf '%s\n' $missing | sort -u | tr '\n' ' ')
missing=${missing% }
# The database server alone: its own package makes an account, a database and a service.
wished=""
command -v slurmdbd >/dev/null 2>&1 || wished="$wished slurmdbd"
command -v mariadbd >/dev/null 2>&1 || wished="$wished mariadb-server-core"

if [ -z "$missing$wished" ]; then
    say "$(slurmd -V), slurmdbd, munge and Lua are installed; nothing to do"
    exit 0
fi
enough() { # enough WHY
    say "$(slurmd -V), munge and Lua are installed; the embedded cluster has no accounting" \
        "without$wished: $1"
    exit 0
}
if [ -z "$missing" ]; then
    # Nobody is asked for a password for what can be done without.
    command -v apt-get >/dev/null 2>&1 || enough "this machine has no apt-get"
    [ "$(id -u)" -eq 0 ] || sudo -n true >/dev/null 2>&1 || enough "run this as root to install it"
fi

command -v apt-get >/dev/null 2>&1 || fail "missing: $missing. This machine has no apt-get; \
install Slurm (22.05 or newer, with its job_submit/lua plugin), munge and Lua with its own tools, \
then run this again."

as_root=""
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null 2>&1 || fail "missing: $missing. Run this as root, or install sudo."
    as_root="sudo"
fi

# Debian's packages start their daemons at once; this tells them not to.
policy=/usr/sbin/policy-rc.d
made_policy=""
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' | $as_root tee "$policy" >/dev/null
    $as_root chmod 755 "$policy"
    made_policy=yes
fi
cleanup() { [ -z "$made_policy" ] || $as_root rm -f "$policy"; }
trap cleanup EXIT
trap 'exit 1' HUP INT TERM

say "installing with apt-get: ${missing:+$missing }${wished# }"
apt() {
    $as_root env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get -qq -o Dpkg::Use-Pty=0 "$@"
}
if ! apt update; then
    [ -n "$missing" ] || enough "apt-get update failed; its message is above"
    fail "apt-get update failed; check the network and /etc/apt/sources.list"
fi
# shellcheck disable=SC2086 # lists of words
if ! apt install -y --no-install-recommends $missing $wished >/dev/null; then
    [ -n "$missing" ] || enough "apt-get's message is above"
    apt install -y --no-install-recommends $missing >/dev/null \
        || fail "apt-get could not install: $missing; its message is above"
    say "the embedded cluster has no accounting without$wished: apt-get's message is above"
fi

for program in slurmctld slurmd sbatch munged; do
    command -v "$program" >/dev/null 2>&1 || fail "$program is still missing after installing"
done
say "done: $(slurmd -V); no daemon was started"
