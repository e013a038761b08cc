#!/bin/sh
# Epilog helper: removes the data cache that a job of slurm-synergy left on this node.
#
# A launcher removes its job's cache itself; one that was killed, together with its job, cannot.
# In slurm.conf, on the compute nodes (a glob runs all epilogs there):
#
#     Epilog=/etc/slurm/epilog.d/*
#
# Arguments: the directories to look in, /dev/shm without any. Name a directory on a disk as well if
# caches there shall not wait for a restart of the job on this node. Always exits with 0, as anything
# else would drain the node. What is removed is removed as the job's user, so that a directory full
# of traps does no harm.

case "$SLURM_JOB_UID" in '' | *[!0-9]*) exit 0 ;; esac
case "$SLURM_JOB_ID" in '' | *[!0-9]*) exit 0 ;; esac

[ $# -gt 0 ] || set -- /dev/shm

for place in "$@"; do
    path="$place/synergy-cache-$SLURM_JOB_UID-$SLURM_JOB_ID"
    [ -d "$path" ] && [ ! -L "$path" ] || continue
    [ "$(stat -c %u -- "$path" 2>/dev/null)" = "$SLURM_JOB_UID" ] || continue
    setpriv --reuid="$SLURM_JOB_UID" --regid=65534 --clear-groups --no-new-privs \
        rm -rf --one-file-system -- "$path" 2>/dev/null ||
        logger -t slurm-synergy "cannot remove the data cache $path" 2>/dev/null
done
exit 0
