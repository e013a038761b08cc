"""What the logs of ``fault_program`` prove: nothing lost, nothing twice, little repeated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Findings", "read_log", "verify"]

Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Of one rank: how often it started, steps done at least once, steps done again."""

    starts: int
    steps: int
    repeated: int
    ended: bool


def read_log(path: Path) -> list[Event]:
    """The events of one rank, oldest first. A line that a kill has torn is its last."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return events


def verify(events: Sequence[Event], *, lost_saves: int = 0) -> Findings:
    """Check one rank's log; AssertionError names what is wrong.

    Each incarnation must begin at the last save that was noted, or later (a save whose note a kill
    prevented). ``lost_saves`` is how many of the newest checkpoints a case has damaged on purpose.
    """
    done, saves, repeated, starts = 0, [0], 0, 0
    at = -1
    for event in events:
        match event["event"]:
            case "double":
                raise AssertionError(f"{event['what']} was in use twice: {event}")
            case "start":
                starts += 1
                at = int(event["at"])
                known = saves[max(0, len(saves) - 1 - (lost_saves if starts > 1 else 0))]
                assert at >= known, f"began at step {at}, though {known} was saved: {event}"
                assert at <= done, f"began at step {at}, though only {done} were done: {event}"
            case "step":
                at += 1
                assert event["at"] == at, f"step {event['at']} follows {at - 1}: {event}"
                repeated += at <= done
                done = max(done, at)
            case "saved":
                if event["at"] != saves[-1]:
                    saves.append(int(event["at"]))
    # More than one where Slurm lost the node with the news of the first end, and ran it again.
    ends = [event for event in events if event["event"] == "end"]
    assert len(ends) <= starts, f"it ended {len(ends)} times in {starts} runs"
    return Findings(starts=starts, steps=done, repeated=repeated, ended=bool(ends))
