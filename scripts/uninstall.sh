#!/usr/bin/env bash
# Take away what install.sh has put there, with the same PREFIX, DESTDIR and UNITDIR.
# Settings (SYSCONFDIR) and state (/var/lib/slurm-synergy) stay: they are yours.
set -euo pipefail
prefix=${PREFIX:-/usr/local}
destdir=${DESTDIR:-}
if [ "$prefix" = /usr ]; then
    unitdir=${UNITDIR:-/usr/lib/systemd/system}
    sysusersdir=/usr/lib/sysusers.d
else
    unitdir=${UNITDIR:-/etc/systemd/system}
    sysusersdir=/etc/sysusers.d
fi
cd "$(dirname "$0")/.."
rm -rf "$destdir$prefix/lib/slurm-synergy" "$destdir$prefix/share/slurm-synergy"
rm -f "$destdir$prefix/bin/synergyctl" "$destdir$prefix/bin/synergy-srun" "$destdir$prefix/bin/synergy-profile" "$destdir$prefix/sbin/slurm-synergyd"
for source in docs/man/*.in; do
    page=$(basename "${source%.in}")
    rm -f "$destdir$prefix/share/man/man${page##*.}/$page.gz"
done
for name in synergyctl slurm-synergyd; do
    rm -f "$destdir$prefix/share/bash-completion/completions/$name"
done
for unit in etc/*.service; do
    rm -f "$destdir$unitdir/$(basename "$unit")"
done
rm -f "$destdir$sysusersdir/slurm-synergy.conf"
echo "Removed. Settings in ${SYSCONFDIR:-/etc}/slurm-synergy and state in /var/lib/slurm-synergy stay."
