#!/usr/bin/env bash
# Make a virtual environment with the project and its extras: make-venv.sh PYTHON VENV [EXTRA,...]
# Idempotent: an environment that is there is brought up to date.
set -euo pipefail
python=$1
venv=$2
more=${3:-}
cd "$(dirname "$0")/.."

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    if ! command -v "$python" >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        echo "Installing python3 and python3-venv (Debian packages)"
        apt-get update -q >/dev/null
        DEBIAN_FRONTEND=noninteractive apt-get install -y -q python3 python3-venv >/dev/null
    else
        echo "make: '$python' must be Python 3.11 or newer; use 'make PYTHON=/path/to/python3 …'" >&2
        exit 1
    fi
fi

if [ ! -x "$venv/bin/pip" ]; then
    if ! "$python" -c 'import ensurepip' 2>/dev/null; then
        echo "Installing python3-venv (Debian package)"
        sudo=""
        [ "$(id -u)" = 0 ] || sudo=sudo
        $sudo apt-get update -q >/dev/null
        DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -q python3-venv >/dev/null
    fi
    echo "Creating $venv"
    "$python" -m venv "$venv"
fi
# What is imported is compiled then: all of it takes a minute, and a fifth is used.
pip() { "$venv/bin/pip" install -q --disable-pip-version-check --no-compile "$@"; }

if [ -n "$more" ] && "$venv/bin/python" -P -c 'import slurm_synergy' 2>/dev/null; then
    echo "Installing what [$more] of slurm-synergy needs into $venv"
    pip -c constraints.txt "slurm-synergy[$more]"
    exit
fi
# The very files that were tested, where the lock is for this Python and platform; else the ranges.
if "$venv/bin/python" scripts/lock.py fits && [ -z "${SYNERGY_UNLOCKED:-}" ]; then
    echo "Installing the locked dependencies into $venv (SYNERGY_UNLOCKED=1 takes the ranges instead)"
    pip --require-hashes --no-deps -r constraints-hashes.txt
fi
echo "Installing slurm-synergy with its extras into $venv (a few minutes the first time)"
pip -c constraints.txt -e ".[controller,solver,report,sweep,torch,examples,test${more:+,$more}]"
