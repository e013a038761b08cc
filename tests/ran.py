"""A call of synergyctl in this process: what it printed and its exit status."""

from __future__ import annotations

import pytest

from slurm_synergy.cli.main import main

__all__ = ["Ran"]


class Ran:
    """Runs ``synergyctl`` with these arguments."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *argv: str) -> None:
        with pytest.raises(SystemExit) as ended:
            main(argv)
        self.status = ended.value.code or 0
        self.out, self.err = capsys.readouterr()
