"""Accounts without rights, for tests of what ordinary users may do."""

from __future__ import annotations

import pwd
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurm_synergy.devcluster import DevCluster


class OrdinaryUser:
    """Runs commands as an existing account without rights, in a directory of its own."""

    def __init__(self, account: pwd.struct_passwd, home: Path) -> None:
        self.name, self.uid, self.gid, self.home = (
            account.pw_name,
            account.pw_uid,
            account.pw_gid,
            home,
        )

    def run(
        self, cluster: DevCluster, argv: Sequence[str], *, check: bool = True, **given: Any
    ) -> subprocess.CompletedProcess[str]:
        """``cluster.run`` as this user; ``given`` (``input``, ``env``, ...) is passed on."""
        drop = [
            "setpriv",
            "--reuid",
            str(self.uid),
            "--regid",
            str(self.gid),
            "--clear-groups",
            "--",
        ]
        env = {"HOME": str(self.home), "USER": self.name, "LOGNAME": self.name}
        env.update(given.pop("env", {}))
        return cluster.run([*drop, *argv], check=check, cwd=self.home, env=env, **given)
