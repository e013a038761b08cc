"""What the tests of several ranks share: launchers and a controller between their boards."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace

from slurm_synergy.controller.agreement import StopAgreement
from slurm_synergy.jobside.board import Board


class Launchers:
    """Stands for launchers and controller: carries agreements between the boards of one job."""

    def __init__(self, boards: list[Board], delay_s: float = 0.02) -> None:
        self._boards, self._delay_s = boards, delay_s
        self._agreement = StopAgreement(len(boards))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.stop_steps: list[int] = []

    def __enter__(self) -> Launchers:
        for board in self._boards:
            board.write_lease(replace(board.read_lease(), stop=True, generation=9))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._delay_s):
            reports = [board.read_report() for board in self._boards]
            agreement = self._agreement
            agreement.propose(reports[0].proposed_stop_step)
            for rank, report in enumerate(reports):
                agreement.accept(rank, report.accepted_stop_step)
                agreement.refuse(
                    report.refused_stop_step,
                    latest_step=max(other.step for other in reports),
                    step_s=max(other.step_s + other.wait_s for other in reports),
                )
            agreement.settle([])
            if agreement.step and agreement.step not in self.stop_steps:
                self.stop_steps.append(agreement.step)
            for board in self._boards:
                known = board.read_lease()
                if (known.stop_step, known.stop_committed) != (agreement.step, agreement.committed):
                    board.write_lease(
                        replace(known, stop_step=agreement.step, stop_committed=agreement.committed)
                    )


def free_port() -> str:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


@contextlib.contextmanager
def ended(processes: list[subprocess.Popen[str]]) -> Iterator[None]:
    """None of them outlives the block."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
