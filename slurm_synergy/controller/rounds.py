"""Rounds of the past, as the journal has them: written as lines of JSON, read back as values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_synergy.cluster import Action, Hold, Outcome, Renew, Resize, Start, Stop
from slurm_synergy.controller.codec import decode, encode, field_names
from slurm_synergy.core.model import JobStatus, Placement, Plan, Reason, ReasonCode, Snapshot
from slurm_synergy.core.resources import Resources
from slurm_synergy.errors import LedgerError, ModelError

__all__ = [
    "JOURNAL_FILE",
    "JOURNAL_VERSION",
    "Became",
    "Damage",
    "RoundTexts",
    "Round",
    "decode_action",
    "encode_action",
    "last_round",
    "read_rounds",
    "round_as_line",
    "round_in_parts",
]

JOURNAL_FILE = "journal.jsonl"
JOURNAL_VERSION = 2
"""Format of a line. Version 1 lacks ``free``; it is still read."""

_KINDS: Mapping[str, type[Action]] = {
    kind.__name__.lower(): kind for kind in (Hold, Renew, Resize, Stop, Start)
}
_BLOCK_BYTES = 1 << 20
# Stands for the jobs; JSON has no such character outside of texts, and within them not in ASCII.
_JOBS = "\0"
# Values that a round has more than once, or that the next one has again.
_REPEATED = frozenset({Placement, Reason})
# Rounds whose intents cannot be written are never ended: what they left is forgotten then.
_MOST_VALUES = 50_000


def encode_action(action: Action) -> dict[str, object]:
    """An action as JSON, with its ``kind`` as a word."""
    return {"kind": _kind(action), **encode(action)}


def decode_action(data: Mapping[str, object]) -> Action:
    """The action that ``encode_action`` wrote. Raises ModelError."""
    kind = _KINDS.get(str(data.get("kind")))
    if kind is None:
        raise ModelError(f"unknown kind of action: {data.get('kind')!r}")
    return decode(kind, {key: value for key, value in data.items() if key != "kind"})


def _kind(action: Action) -> str:
    return type(action).__name__.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Became:
    """What became of the action ``kind`` on a job."""

    job_id: int
    kind: str
    done: bool
    reason: Reason | None = None

    @classmethod
    def of(cls, outcome: Outcome) -> Became:
        """The part of an outcome that is written down."""
        action = outcome.action
        return cls(
            job_id=action.job_id, kind=_kind(action), done=outcome.done, reason=outcome.reason
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round: what was known, decided and done, by release ``code`` of ours.

    ``took_s`` has the seconds of its steps. ``free`` is what the cluster itself would have given a
    new job by node; None in records of version 1.
    """

    snapshot: Snapshot
    plan: Plan
    actions: tuple[Action, ...] = ()
    outcomes: tuple[Became, ...] = ()
    took_s: Mapping[str, float] = field(default_factory=dict)
    free: Mapping[str, Resources] | None = None
    code: str = ""
    version: int = JOURNAL_VERSION

    @property
    def reasons(self) -> Mapping[int, Reason]:
        """By job: why an action was deferred or refused, or why the job was told to stop."""
        stops = {one.job_id: one.reason for one in self.actions if isinstance(one, Stop)}
        refused = {
            one.job_id: one.reason
            for one in self.outcomes
            if one.reason is not None
            # Nothing is changed there anyway: no word on jobs that would have stayed as they are.
            and not (one.reason.code is ReasonCode.ONLY_SHOWN and one.kind in ("renew", "hold"))
        }
        return {**stops, **refused}


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A line of a journal that cannot be read: its number from 1, and why."""

    line: int
    what: str


class RoundTexts:
    """What was written of the values of the last round: most jobs wait, and stay as they are.

    Jobs, nodes, placements and reasons are known by the very object that their text was made of,
    as are the profiles that many jobs share.
    """

    def __init__(self) -> None:
        self._jobs: dict[int, tuple[JobStatus, bytes]] = {}
        self._values: dict[int, tuple[object, str]] = {}
        self._values_before: dict[int, tuple[object, str]] = {}

    def of_jobs(self, jobs: Sequence[JobStatus]) -> bytes:
        """The JSON of ``jobs``, encoded; what was known of others is forgotten."""
        before, now, texts = self._jobs, dict[int, tuple[JobStatus, bytes]](), []
        for status in jobs:
            job_id = status.job.job_id
            known = before.get(job_id)
            if known is None or known[0] is not status:
                known = (status, self._of_job(status).encode())
            now[job_id] = known
            texts.append(known[1])
        self._jobs = now
        return b",".join(texts)

    def _of_job(self, status: JobStatus) -> str:
        return _object(
            {
                name: self.of(value) if name == "profile" else _dump(encode(value))
                for name in field_names(JobStatus)
                for value in (getattr(status, name),)
            }
        )

    def of(self, value: object) -> str:
        """The JSON of a value that may come again, in this round or the next one."""
        known = self._values.get(id(value))
        if known is None:
            known = self._values_before.get(id(value)) or (value, _dump(encode(value)))
            if len(self._values) >= _MOST_VALUES:
                self.end_round()
            self._values[id(value)] = known
        return known[1]

    def of_action(self, action: Action) -> str:
        """The JSON of an action, as ``encode_action`` has it."""
        kind = type(action)
        return _object({"kind": f'"{_kind(action)}"', **self._of_fields(kind, action)})

    def of_outcome(self, outcome: Became) -> str:
        """The JSON of what became of an action."""
        return _object(self._of_fields(Became, outcome))

    def of_plan(self, plan: Plan) -> str:
        """The JSON of a plan: of its placements, and of reasons that many jobs share."""
        texts = dict.fromkeys(field_names(Plan), "")
        texts["placements"] = _array(map(self.of, plan.placements))
        texts["waiting"] = _object({id: self.of(reason) for id, reason in plan.waiting.items()})
        return _object(
            {name: text or _dump(encode(getattr(plan, name))) for name, text in texts.items()}
        )

    def _of_fields(self, kind: type, value: object) -> dict[str, str]:
        found = {}
        for name in field_names(kind):
            one = getattr(value, name)
            found[name] = self.of(one) if type(one) in _REPEATED else _dump(encode(one))
        return found

    def end_round(self) -> None:
        """What this round did not write is forgotten."""
        self._values_before, self._values = self._values, {}


def round_as_line(record: Round, texts: RoundTexts | None = None) -> str:
    """The round as one line of JSON, with its line break. ``texts`` are those of earlier rounds."""
    return b"".join(round_in_parts(record, texts or RoundTexts())).decode()


def round_in_parts(record: Round, texts: RoundTexts) -> tuple[bytes, ...]:
    """``round_as_line`` in parts, as thousands of jobs make megabytes: these are not copied."""
    snapshot, jobs = record.snapshot, texts.of_jobs(record.snapshot.jobs)
    known = {"jobs": f"[{_JOBS}]", "nodes": _array(map(texts.of, snapshot.nodes))}
    written = {
        "version": _dump(JOURNAL_VERSION),
        "code": _dump(record.code),
        "round": _dump(snapshot.round),
        "snapshot": _object(
            {
                name: known.get(name) or _dump(encode(getattr(snapshot, name)))
                for name in field_names(Snapshot)
            }
        ),
        "plan": texts.of_plan(record.plan),
        "actions": _array(map(texts.of_action, record.actions)),
        "outcomes": _array(map(texts.of_outcome, record.outcomes)),
        "took_s": _dump(encode(record.took_s)),
        "free": _dump(encode(record.free)),
    }
    texts.end_round()
    before, _, after = f"{_object(written)}\n".partition(_JOBS)
    return before.encode(), jobs, after.encode()


_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def _dump(value: object) -> str:
    # Small values, of which there are the most, without the machinery.
    if value is None:
        return "null"
    if value is True or value is False:
        return "true" if value else "false"
    return str(value) if type(value) is int else _JSON.encode(value)


def _object(texts: Mapping[Any, str]) -> str:
    return "{" + ",".join([f'"{name}":{text}' for name, text in texts.items()]) + "}"


def _array(texts: Iterable[str]) -> str:
    return "[" + ",".join(texts) + "]"


def _round_of(line: str) -> Round:
    """Raises ModelError in words for people."""
    try:
        data: Any = json.loads(line)
    except ValueError as err:
        raise ModelError(f"not JSON ({err}); was it cut off?") from err
    if not isinstance(data, dict) or "version" not in data:
        raise ModelError("not a round's record: it has no version")
    version = data["version"]
    if version not in range(1, JOURNAL_VERSION + 1):
        raise ModelError(
            f"a record of version {version!r}; this release reads 1 to {JOURNAL_VERSION}: use the "
            "release that wrote it"
        )
    try:
        free = data.get("free")
        return Round(
            snapshot=decode(Snapshot, data["snapshot"]),
            plan=decode(Plan, data["plan"]),
            actions=tuple(decode_action(one) for one in data["actions"]),
            outcomes=tuple(decode(Became, one) for one in data["outcomes"]),
            took_s=dict(data["took_s"]),
            free=None
            if free is None
            else {str(name): decode(Resources, one) for name, one in free.items()},
            code=str(data.get("code", "")),
            version=version,
        )
    except (KeyError, TypeError, AttributeError) as err:
        raise ModelError(f"not a whole record: {type(err).__name__} {err}") from err


def read_rounds(path: Path) -> Iterator[Round | Damage]:
    """The records of a journal file, oldest first; what cannot be read is told, not raised.

    Raises LedgerError when the file itself cannot be read.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    yield _round_of(line)
                except ModelError as err:
                    yield Damage(line=number, what=str(err))
    except OSError as err:
        raise LedgerError(
            f"cannot read the journal {path}: {err.strerror}; it belongs to the controller's user: "
            "name an existing file, and read it as that user or root"
        ) from err


def last_round(directory: Path) -> Round | None:
    """The newest readable round in ``directory/journal.jsonl`` or the file before it, else None.

    Only the end of the file is read. Raises LedgerError when it cannot be read.
    """
    for name in (JOURNAL_FILE, "journal.1.jsonl"):
        path = directory / name
        try:
            for line in _lines_backwards(path):
                try:
                    return _round_of(line)
                except ModelError:
                    continue  # cut off by a crash: the one before it is whole
        except FileNotFoundError:
            continue
        except OSError as err:
            raise LedgerError(
                f"cannot read the journal {path}: {err.strerror}; read it as the controller's "
                "user or root"
            ) from err
    return None


def _lines_backwards(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        at, rest = file.seek(0, 2), b""
        while at > 0:
            size = min(_BLOCK_BYTES, at)
            at -= size
            file.seek(at)
            rest = file.read(size) + rest
            first, *whole = rest.split(b"\n")
            for line in reversed(whole):
                if line.strip():
                    yield line.decode("utf-8", "replace")
            rest = first
        if rest.strip():
            yield rest.decode("utf-8", "replace")
