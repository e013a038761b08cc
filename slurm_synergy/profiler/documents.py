"""Profiles as JSON documents that people keep, pass on and import elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slurm_synergy.core.model import PipelineModel, Profile, ProfileOrigin, SensitivityTable
from slurm_synergy.errors import ModelError
from slurm_synergy.profiler.evidence import Evidence, StoredProfile, checked_key
from slurm_synergy.profiler.sweep import Confidence, Measurement

__all__ = ["DOCUMENT_FORMAT", "DOCUMENT_VERSION", "from_document", "to_document"]

DOCUMENT_FORMAT = "slurm-synergy-profile"
DOCUMENT_VERSION = 1

_MOST_POINTS = 256
_MOST_TEXT = 400
# Sums and ratios of such numbers stay finite, whatever is made of them.
_LARGEST = 1e15
_SLOWEST = 1e-12


def to_document(stored: StoredProfile) -> dict[str, Any]:
    """``stored`` as a JSON object; infinite bandwidth is written as null."""
    profile, evidence = stored.profile, stored.evidence
    return {
        "format": DOCUMENT_FORMAT,
        "version": DOCUMENT_VERSION,
        "key": profile.key,
        "samples_per_s_per_gpu": dict(sorted(profile.gpu_rate_per_gpu.items())),
        "pipeline": _pipeline_document(profile.pipeline) if profile.pipeline else None,
        "table": _table_document(profile.table) if profile.table else None,
        "origin": profile.origin.value,
        "sample_count": profile.sample_count,
        "restart_s": profile.restart_s,
        "confident": profile.confident,
        "measured_gpus": profile.measured_gpus,
        "measured_cpus": profile.measured_cpus,
        "evidence": _evidence_document(evidence) if evidence else None,
    }


def _pipeline_document(pipeline: PipelineModel) -> dict[str, Any]:
    storage_mib_s = pipeline.storage_mib_s
    return {
        "preprocess": [{"cpus": cpus, "samples_per_s": rate} for cpus, rate in pipeline.preprocess],
        "dataset_mib": pipeline.dataset_mib,
        "samples_per_epoch": pipeline.samples_per_epoch,
        "storage_mib_s": storage_mib_s if math.isfinite(storage_mib_s) else None,
        "process_mem_mib": pipeline.process_mem_mib,
    }


def _table_document(table: SensitivityTable) -> dict[str, Any]:
    return {
        "cpus_per_gpu": list(table.cpus_per_gpu),
        "mem_mib_per_gpu": list(table.mem_mib_per_gpu),
        "samples_per_s": [list(row) for row in table.rates],
    }


def _evidence_document(evidence: Evidence) -> dict[str, Any]:
    return {
        "gpu_type": evidence.gpu_type,
        "gpus": evidence.gpus,
        "most_cpus": evidence.most_cpus,
        "proportional_cpus": evidence.proportional_cpus,
        "points": [
            {
                "cpus": point.cpus,
                "samples_per_s": point.samples_per_s,
                "iterations": point.iterations,
                "wait_share": point.wait_share,
                "busy_samples_per_s": point.busy_samples_per_s,
            }
            for point in evidence.points
        ],
        "confidence": evidence.confidence.value,
        "why": evidence.why,
        "measured_s": evidence.measured_s,
        "owner_uid": evidence.owner_uid,
        "source": evidence.source,
        "data": evidence.data,
    }


class _Reader:
    """Takes typed fields out of a JSON object; an error names the place."""

    def __init__(self, data: object, place: str) -> None:
        if not isinstance(data, Mapping):
            raise ModelError(f"{place}: expected a JSON object, got {str(data)[:40]!r}")
        self._data, self._place = data, place

    def at(self, name: str) -> str:
        return f"{self._place}.{name}"

    def given(self, name: str) -> bool:
        return self._data.get(name) is not None

    def number(self, name: str, default: float | None = None) -> float:
        value = self._data.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(f"{self.at(name)}: expected a number, got {str(value)[:40]!r}")
        if not -_LARGEST <= value <= _LARGEST:  # NaN neither
            raise ModelError(f"{self.at(name)}: {str(value)[:40]} is not within +-{_LARGEST:g}")
        return float(value)

    def rate(self, name: str) -> float:
        """A number per second; that it is positive is for the model to see."""
        value = self.number(name)
        if 0 < value < _SLOWEST:
            raise ModelError(f"{self.at(name)}: {value:g} is less than {_SLOWEST:g}")
        return value

    def duration(self, name: str, default: float) -> float:
        value = self.number(name, default)
        if value < 0:
            raise ModelError(f"{self.at(name)}: {value:g} is negative")
        return value

    def count(self, name: str, default: int) -> int:
        value = self.whole(name, default)
        if value < 0:
            raise ModelError(f"{self.at(name)}: {value} is negative")
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value):
            raise ModelError(f"{self.at(name)}: expected a whole number, got {value:g}")
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._data.get(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.at(name)}: expected true or false, got {str(value)[:40]!r}")
        return value

    def text(self, name: str, default: str = "") -> str:
        value = self._data.get(name, default)
        if not isinstance(value, str) or len(value) > _MOST_TEXT:
            raise ModelError(f"{self.at(name)}: expected a text of at most {_MOST_TEXT} characters")
        # It is shown to others, in scripts too, where a line break would end a comment.
        if not value.isprintable():
            raise ModelError(f"{self.at(name)}: has line breaks or other control characters")
        return value

    def inner(self, name: str) -> _Reader:
        return _Reader(self._data.get(name), self.at(name))

    def items(self, name: str) -> Sequence[object]:
        value = self._data.get(name)
        if not isinstance(value, list) or len(value) > _MOST_POINTS:
            raise ModelError(f"{self.at(name)}: expected a list of at most {_MOST_POINTS} entries")
        return value

    def inners(self, name: str) -> list[_Reader]:
        return [_Reader(one, f"{self.at(name)}[{i}]") for i, one in enumerate(self.items(name))]

    def names(self) -> list[str]:
        names = sorted(map(str, self._data))
        if len(names) > _MOST_POINTS:
            raise ModelError(f"{self._place}: expected at most {_MOST_POINTS} entries")
        for name in names:
            if not 0 < len(name) <= _MOST_TEXT or not name.isprintable():
                raise ModelError(f"{self._place}: {name[:40]!r} is no name")
        return names


def from_document(document: object) -> StoredProfile:
    """The profile that ``to_document`` wrote. Raises ModelError naming the place that is wrong."""
    reader = _Reader(document, "profile")
    if reader.text("format") != DOCUMENT_FORMAT:
        raise ModelError(f'this is no profile: its "format" is not "{DOCUMENT_FORMAT}"')
    version = reader.whole("version")
    if version != DOCUMENT_VERSION:
        raise ModelError(f"the profile is of version {version}; {DOCUMENT_VERSION} can be read")
    rates = reader.inner("samples_per_s_per_gpu")
    profile = Profile(
        key=checked_key(reader.text("key")),
        gpu_rate_per_gpu={name: rates.rate(name) for name in rates.names()},
        pipeline=_pipeline(reader.inner("pipeline")) if reader.given("pipeline") else None,
        table=_table(reader.inner("table")) if reader.given("table") else None,
        origin=_chosen(ProfileOrigin, reader, "origin"),
        sample_count=reader.count("sample_count", 0),
        restart_s=reader.duration("restart_s", 30.0),
        confident=reader.flag("confident", True),
        measured_gpus=reader.count("measured_gpus", 0),
        measured_cpus=reader.count("measured_cpus", 0),
    )
    evidence = _evidence(reader.inner("evidence")) if reader.given("evidence") else None
    return StoredProfile(profile=profile, evidence=evidence)


def _chosen(kind: Callable[[str], Any], reader: _Reader, name: str) -> Any:
    text = reader.text(name)
    try:
        return kind(text)
    except ValueError as err:
        raise ModelError(f"{reader.at(name)}: {text!r} is not known") from err


def _pipeline(reader: _Reader) -> PipelineModel:
    points = reader.inners("preprocess")
    return PipelineModel(
        preprocess=tuple((one.whole("cpus"), one.rate("samples_per_s")) for one in points),
        dataset_mib=reader.number("dataset_mib", 0.0),
        samples_per_epoch=reader.whole("samples_per_epoch", 1),
        storage_mib_s=reader.rate("storage_mib_s") if reader.given("storage_mib_s") else math.inf,
        process_mem_mib=reader.count("process_mem_mib", 0),
    )


def _table(reader: _Reader) -> SensitivityTable:
    return SensitivityTable(
        cpus_per_gpu=tuple(_numbers(reader, "cpus_per_gpu", int)),
        mem_mib_per_gpu=tuple(_numbers(reader, "mem_mib_per_gpu", int)),
        rates=tuple(
            tuple(_numbers(_Reader({"row": row}, reader.at("samples_per_s")), "row", float))
            for row in reader.items("samples_per_s")
        ),
    )


def _numbers(reader: _Reader, name: str, kind: type) -> list[Any]:
    values = reader.items(name)
    for value in values:
        fits = isinstance(value, int | float) and _SLOWEST <= value <= _LARGEST
        if not fits or isinstance(value, bool) or kind(value) != value:
            raise ModelError(f"{reader.at(name)}: {str(value)[:40]!r} is not a fitting number")
    return [kind(value) for value in values]


def _evidence(reader: _Reader) -> Evidence:
    points = [
        Measurement(
            cpus=one.whole("cpus"),
            samples_per_s=one.rate("samples_per_s"),
            iterations=one.whole("iterations"),
            wait_share=one.number("wait_share") if one.given("wait_share") else None,
            busy_samples_per_s=(
                one.rate("busy_samples_per_s") if one.given("busy_samples_per_s") else None
            ),
        )
        for one in reader.inners("points")
    ]
    return Evidence(
        gpu_type=reader.text("gpu_type"),
        gpus=reader.whole("gpus"),
        most_cpus=reader.whole("most_cpus"),
        proportional_cpus=reader.whole("proportional_cpus"),
        points=tuple(points),
        confidence=_chosen(Confidence, reader, "confidence"),
        measured_s=reader.number("measured_s"),
        why=reader.text("why"),
        owner_uid=reader.whole("owner_uid", -1),
        source=reader.text("source"),
        data=reader.text("data"),
    )
