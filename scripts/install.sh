#!/usr/bin/env bash
# Put slurm-synergy where admins expect it: install.sh PYTHON
#
#   PREFIX    where it will live (default /usr/local)
#   DESTDIR   put before every path while installing, for packages (default none)
#   SYSCONFDIR, UNITDIR   default /etc, and /etc/systemd/system (PREFIX/lib/systemd/system for /usr)
#   PIP_OPTIONS   more options for pip, for example --no-index --find-links=DIRECTORY
#   BASEPYTHON    interpreter that the installation will run with (default: the one below PYTHON)
#
# PYTHON (of a checkout's virtual environment) builds the wheel and the manual pages; the installation
# gets an environment of its own in PREFIX/lib/slurm-synergy. Settings that are there are never replaced.
set -euo pipefail
umask 022
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
cd "$(dirname "$0")/.."

prefix=${PREFIX:-/usr/local}
destdir=${DESTDIR:-}
sysconfdir=${SYSCONFDIR:-/etc}
if [ "$prefix" = /usr ]; then
    unitdir=${UNITDIR:-/usr/lib/systemd/system}
    sysusersdir=/usr/lib/sysusers.d
else
    unitdir=${UNITDIR:-/etc/systemd/system}
    sysusersdir=/etc/sysusers.d
fi
case $prefix$sysconfdir$unitdir in
    *[[:space:]]*) echo "install: PREFIX, SYSCONFDIR and UNITDIR must not have blanks" >&2; exit 2 ;;
esac
for path in "$prefix" "$sysconfdir" "$unitdir"; do
    case $path in
        /*) ;;
        *) echo "install: $path is not an absolute path" >&2; exit 2 ;;
    esac
done

home=$prefix/lib/slurm-synergy
share=$prefix/share/slurm-synergy
base=$("$python" -c 'import sys; print(sys.base_prefix)')
basepython=${BASEPYTHON:-$base/bin/$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "Building the wheel and the manual pages"
# A copy, so that a checkout that belongs to somebody else stays as it is.
mkdir "$work/source"
tar -cf - --exclude-vcs --exclude=./.venv --exclude='./.*_cache' --exclude=./.hypothesis --exclude=./build --exclude=__pycache__ --exclude='*.egg-info' . | tar -xf - -C "$work/source"
"$python" -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w "$work" "$work/source"
"$python" scripts/make_man.py --gzip "$work/man"

echo "Installing the programs into $destdir$home"
rm -rf "$destdir$home"
"$basepython" -m venv --without-pip "$destdir$home"
# shellcheck disable=SC2086
"$python" -m pip --python "$destdir$home/bin/python" install -q --disable-pip-version-check --no-compile \
    --no-warn-script-location ${PIP_OPTIONS:-} "$(ls "$work"/*.whl)[controller,solver]"
# Scripts name their interpreter: the place where it will be.
if [ -n "$destdir" ]; then
    grep -rlIF "$destdir$home" "$destdir$home/bin" "$destdir$home/pyvenv.cfg" | while IFS= read -r file; do
        sed -i "s|$destdir$home|$home|g" "$file"
    done
fi
"$destdir$home/bin/python" -m compileall -q -s "$destdir" "$destdir$home/lib" || true
rm -rf "$destdir$home/share"

install -d "$destdir$prefix/bin" "$destdir$prefix/sbin"
ln -sfn ../lib/slurm-synergy/bin/synergyctl "$destdir$prefix/bin/synergyctl"
ln -sfn ../lib/slurm-synergy/bin/synergy-srun "$destdir$prefix/bin/synergy-srun"
ln -sfn ../lib/slurm-synergy/bin/synergy-profile "$destdir$prefix/bin/synergy-profile"
ln -sfn ../lib/slurm-synergy/bin/slurm-synergyd "$destdir$prefix/sbin/slurm-synergyd"

echo "Installing manual pages, completion, unit and examples"
for page in "$work"/man/man*/*; do
    install -D -m 0644 "$page" "$destdir$prefix/share/man/$(basename "$(dirname "$page")")/$(basename "$page")"
done
for name in synergyctl slurm-synergyd; do
    install -D -m 0644 etc/completion.bash "$destdir$prefix/share/bash-completion/completions/$name"
done
for unit in etc/*.service; do
    sed "s|/opt/slurm-synergy/bin/|$home/bin/|g; s|/opt/slurm-synergy,|$home,|g; s|/etc/slurm-synergy/|$sysconfdir/slurm-synergy/|g" "$unit" \
        > "$work/unit"
    install -D -m 0644 "$work/unit" "$destdir$unitdir/$(basename "$unit")"
done
install -D -m 0644 etc/slurm-synergy.sysusers "$destdir$sysusersdir/slurm-synergy.conf"
install -d "$destdir$share"
for file in job_submit.lua synergy_site.lua.example synergy.yaml; do
    install -m 0644 "etc/$file" "$destdir$share/$file"
done
install -D -m 0644 etc/slurm.conf.d/synergy.conf "$destdir$share/slurm.conf.d/synergy.conf"
install -D -m 0644 etc/grafana/slurm-synergy.json "$destdir$share/grafana/slurm-synergy.json"

install -d -m 0755 "$destdir$sysconfdir/slurm-synergy"
if [ -e "$destdir$sysconfdir/slurm-synergy/synergy.yaml" ]; then
    echo "$sysconfdir/slurm-synergy/synergy.yaml is there and stays; the defaults are in $share/synergy.yaml"
else
    install -m 0644 etc/synergy.yaml "$destdir$sysconfdir/slurm-synergy/synergy.yaml"
fi
echo "Installed. Next: docs/admin-guide.md (the account slurm-synergy: systemd-sysusers; the partition, job_submit.lua, $sysconfdir/slurm-synergy/synergy.yaml)"
