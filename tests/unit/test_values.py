"""Values that are made quickly are frozen dataclasses all the same."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, replace

import pytest
from builders import job, node, pending, placement, res, running

from slurm_synergy.cluster import Hold, ObservedJob, Outcome, Record, Start
from slurm_synergy.core.model import JobPhase, Placement, Reason, ReasonCode
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.values import maker, quick
from slurm_synergy.errors import ModelError

WHERE = placement(1, v100_1=res(1, 3, 10))
VALUES = [
    res(1, 2, 3),
    job(1),
    pending(job(1)),
    running(job(1), WHERE),
    WHERE,
    Reason(code=ReasonCode.NO_GPUS, text="none"),
    Hold(job_id=1),
    Start(job_id=1, placement=WHERE),
    Outcome(action=Hold(job_id=1), done=True),
    ObservedJob(job=job(1), phase=JobPhase.PENDING),
    Record(job_id=1, done_samples=2.0),
    node(),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_copies_and_pickles_are_equal_and_values_stay_as_they_are(value: object) -> None:
    for other in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert other == value
        assert type(other) is type(value)
        assert other is not value
    name = fields(value)[0].name  # type: ignore[arg-type]
    with pytest.raises(FrozenInstanceError):
        setattr(value, name, 1)
    with pytest.raises(FrozenInstanceError):
        delattr(value, name)
    assert not hasattr(value, "__dict__")


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    one: int


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Derived(Base):
    many: list[int] = field(default_factory=list)
    text: str = "text"


def test_defaults_subclasses_and_replace_are_those_of_a_dataclass() -> None:
    first, second = Derived(one=1), Derived(one=1)
    assert first == second
    assert first.many is not second.many
    assert isinstance(first, Base)
    assert replace(first, text="other") == Derived(one=1, text="other")
    assert asdict(first) == {"one": 1, "many": [], "text": "text"}
    assert repr(first) == "Derived(one=1, many=[], text='text')"


@pytest.mark.parametrize("wrong", [{}, {"one": 1, "none": 2}])
def test_a_missing_or_unknown_field_is_an_error(wrong: dict[str, int]) -> None:
    with pytest.raises(TypeError, match=r"one|none"):
        Derived(**wrong)  # type: ignore[arg-type]


def test_what_a_value_checks_is_checked() -> None:
    with pytest.raises(ModelError, match="must not be negative"):
        Resources(gpus=1, cpus=-1)
    with pytest.raises(ModelError, match="do not agree"):
        replace(pending(job(1)), phase=JobPhase.RUNNING)


def test_a_maker_makes_the_values_that_the_class_makes() -> None:
    make = maker(Derived)
    made = make(one=1, text="other")
    assert made == Derived(one=1, text="other")
    assert type(made) is Derived
    assert made.many is not make(one=1).many
    assert type(maker(Base)(one=1)) is Base
    with pytest.raises(TypeError, match="one"):
        make(text="none")
    with pytest.raises(ModelError, match="distinct nodes"):
        maker(Placement)(job_id=1, gpu_type="v100", shares=())
    empty = maker(Placement, checked=False)(job_id=1, gpu_type="v100", shares=())
    assert (type(empty), empty.shares) == (Placement, ())
