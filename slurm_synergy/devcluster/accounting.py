"""Slurm's accounting for an embedded cluster: slurmdbd and a database server of its own.

The database is a fresh one in the cluster's state directory. It listens on a Unix socket in a
directory that only its owner may enter, and on no port. Slurm then enforces the limits of
associations and QOS, and refuses jobs of users that it does not know.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_synergy.devcluster.daemons import Ask, Daemons, Spawn
from slurm_synergy.devcluster.programs import clean_environment, find, need
from slurm_synergy.errors import DevClusterError

__all__ = ["Accounting", "missing_accounting", "need_accounting", "slurmdbd_conf"]

_PROGRAMS = ("mariadbd", "slurmdbd", "sacctmgr")
# Where distributions put what a new database begins with.
_SHARES = (Path("/usr/share/mysql"), Path("/usr/share/mariadb"))
_SCRIPTS = ("mysql_system_tables.sql", "mysql_system_tables_data.sql")
_REMEDY = "install MariaDB's server and slurmdbd (Debian: mariadb-server-core, slurmdbd)"
_CREATE_S = 60.0


def missing_accounting() -> tuple[str, ...]:
    """The programs and files that accounting needs and this machine lacks."""
    missing = [name for name in _PROGRAMS if find(name) is None]
    if "mariadbd" not in missing and _share() is None:
        missing.append(_SCRIPTS[0])
    return tuple(missing)


def _share() -> Path | None:
    found = (place for place in _SHARES if all((place / name).is_file() for name in _SCRIPTS))
    return next(found, None)


def need_accounting() -> None:
    """Raise DevClusterError when one of those programs is missing."""
    missing = missing_accounting()
    if missing:
        raise DevClusterError(f"not installed: {', '.join(missing)}; {_REMEDY}")


def slurmdbd_conf(state_dir: Path, *, port: int, user: str) -> str:
    """slurmdbd.conf. Slurm wants it readable by its owner alone."""
    return (
        "AuthType=auth/munge\n"
        f"AuthInfo=socket={state_dir}/munge/munge.socket\n"
        "DbdHost=localhost\n"
        "DbdAddr=127.0.0.1\n"
        f"DbdPort={port}\n"
        f"SlurmUser={user}\n"
        "StorageType=accounting_storage/mysql\n"
        # With this name the client library takes the socket that its environment names.
        "StorageHost=localhost\n"
        "StorageUser=root\n"
        "StorageLoc=slurm\n"
        f"PidFile={state_dir}/run/slurmdbd.pid\n"
        f"LogFile={state_dir}/log/slurmdbd.log\n"
        "DebugLevel=info\n"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """The two daemons of one cluster. Methods raise DevClusterError."""

    state_dir: Path
    cluster_name: str

    names = ("mariadbd", "slurmdbd")

    @property
    def _place(self) -> Path:
        return self.state_dir / "database"

    @property
    def _socket(self) -> Path:
        return self._place / "server.socket"

    def start(self, daemons: Daemons, spawn: Spawn, ask: Ask, deadline_s: float) -> None:
        """Start what does not run, and make the cluster known to slurmdbd.

        munged must run. slurmctld ends at its first start when slurmdbd does not know its cluster.
        """
        if not daemons.runs("mariadbd"):
            self._create()
            self._socket.unlink(missing_ok=True)
            spawn("mariadbd", self._server("--skip-networking", f"--socket={self._socket}"))
            daemons.await_ready("mariadbd", self._socket.exists, deadline_s)
        if not daemons.runs("slurmdbd"):
            spawn("slurmdbd", [need("slurmdbd"), "-D"], MYSQL_UNIX_PORT=str(self._socket))

        def known() -> bool:
            asked = [need("sacctmgr"), "-n", "-P", "list", "cluster", "format=cluster"]
            answer = ask(asked)
            if answer.returncode:
                return False
            return self.cluster_name in answer.stdout.split() or (
                ask([need("sacctmgr"), "-i", "add", "cluster", self.cluster_name]).returncode == 0
            )

        daemons.await_ready("slurmdbd", known, deadline_s)

    def _server(self, *more: str) -> list[str]:
        user = pwd.getpwuid(os.geteuid()).pw_name
        return [
            need("mariadbd"),
            "--no-defaults",
            f"--datadir={self._place}/data",
            f"--pid-file={self._place}/server.pid",
            # It refuses to be root unless told to be.
            f"--user={user}",
            "--innodb-buffer-pool-size=32M",
            "--innodb-log-file-size=8M",
            # What it holds need not survive the machine.
            "--innodb-flush-log-at-trx-commit=0",
            "--innodb-lock-wait-timeout=900",
            *more,
        ]

    def _create(self) -> None:
        """The empty database, unless it is there: only the cluster's user can reach it."""
        data = self._place / "data"
        if (data / "mysql").exists():
            return
        self._place.mkdir(mode=0o700, exist_ok=True)
        data.mkdir(exist_ok=True)
        share = _share()
        assert share is not None, "looked for before anything was started"
        # What mariadb-install-db feeds, whose other parts need a client: help texts, a test
        # database, and accounts other than root's, which has no password.
        begin = ["create database mysql;", "use mysql;", "set @auth_root_socket=null;"]
        texts = [(share / name).read_text(encoding="utf-8") for name in _SCRIPTS]
        _run(
            self._server("--bootstrap", "--skip-log-bin"),
            "\n".join([*begin, *texts]),
            self.state_dir / "log" / "database.log",
        )


def _run(argv: Sequence[str], given: str, log: Path) -> None:
    try:
        done = subprocess.run(
            list(argv),
            input=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_CREATE_S,
            env=clean_environment(),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        raise DevClusterError(f"{argv[0]}: {err}") from err
    log.write_text(done.stdout, encoding="utf-8")
    if done.returncode:
        said = "\n".join(done.stdout.splitlines()[-15:])
        raise DevClusterError(f"{argv[0]}: exit status {done.returncode}:\n{said}")
