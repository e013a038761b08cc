"""Data stalls: the share of the last minute in which a job waits for data."""

from __future__ import annotations

import pytest

from slurm_synergy.controller.stalls import StallWindow
from slurm_synergy.controller.tasks import JobTasks, TaskIdentity, TaskReport


def test_the_share_is_that_of_the_window_and_not_of_all_time() -> None:
    window = StallWindow()
    # An hour without any waiting, then a minute and more of nothing else.
    stepped_s = waited_s = 0.0
    for second in range(3600):
        stepped_s += 1.0
        window.note(float(second), stepped_s, waited_s)
    assert window.share == 0.0
    for second in range(3600, 3720):
        waited_s += 1.0
        window.note(float(second), stepped_s, waited_s)
    assert window.share == 1.0


def test_a_slow_first_step_weighs_by_its_time_not_by_its_count() -> None:
    window = StallWindow()
    window.note(0.0, 0.0, 0.0)
    window.note(5.0, 0.1, 4.9)  # one step that waited
    window.note(10.0, 5.1, 4.9)  # fifty that did not
    assert window.share == pytest.approx(0.49)


def test_what_was_never_told_is_not_known() -> None:
    window = StallWindow()
    assert window.share is None
    for second in range(10):
        window.note(float(second), 0.0, 0.0)
    assert window.share is None


def test_a_new_process_begins_anew() -> None:
    window = StallWindow()
    window.note(0.0, 0.0, 0.0)
    window.note(10.0, 0.0, 10.0)
    window.note(20.0, 0.0, 0.0)
    window.note(30.0, 10.0, 0.0)
    assert window.share == 0.0


def test_few_reports_are_remembered_however_many_come() -> None:
    window = StallWindow()
    for tenth in range(100_000):
        window.note(tenth / 10, tenth / 20, tenth / 20)
    assert len(window._points) < 50
    assert window.share == pytest.approx(0.5)


def test_the_task_that_waits_most_is_the_jobs_word() -> None:
    tasks = JobTasks()
    found = [TaskIdentity(job_id=1, restart_count=0, rank=r, ranks=3, node="n") for r in range(3)]
    for one in found:
        tasks.register(one)
        tasks.report(one, TaskReport(), 0.0)
    assert tasks.data_stall is None
    tasks.report(found[0], TaskReport(stepped_s=9.0, waited_s=1.0), 10.0)
    tasks.report(found[1], TaskReport(stepped_s=6.0, waited_s=4.0), 10.0)
    assert tasks.data_stall == pytest.approx(0.4)
    assert tasks.describe()["data_stall"] == pytest.approx(0.4)
    # The third one tells nothing, and one that has ended does not count.
    tasks.finish(found[1], exit_code=0, checkpointed=False, report=TaskReport())
    assert tasks.data_stall == pytest.approx(0.1)
