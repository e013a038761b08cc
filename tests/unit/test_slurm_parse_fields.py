"""The small grammars: times, durations, sizes, id sets, GPU counts."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_synergy.errors import SlurmParseError
from slurm_synergy.slurm import fields


@given(st.integers(0, 4_000_000_000))
def test_times_round_trip_in_utc(epoch: int) -> None:
    text = datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    assert fields.parse_time_s(text, "t") == epoch
    assert fields.parse_time_s(str(epoch), "t") == epoch


@given(st.integers(0, 400), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_durations_round_trip(days: int, hours: int, minutes: int, seconds: int) -> None:
    want = days * 86400 + hours * 3600 + minutes * 60 + seconds
    clock = f"{hours:02}:{minutes:02}:{seconds:02}"
    assert fields.parse_duration_s(f"{days}-{clock}", "t") == want
    assert fields.parse_duration_s(clock, "t") == want - days * 86400


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("UNLIMITED", None),
        ("Partition_Limit", None),
        ("NONE", None),
        ("N/A", None),
        ("5:30", 330.0),
        ("2-6", 194400.0),
        ("30", 1800.0),
        ("60 sec", 60.0),
    ],
)
def test_other_forms_of_durations(text: str, seconds: float | None) -> None:
    assert fields.parse_duration_s(text, "t") == seconds


@given(st.integers(0, 10**9), st.sampled_from(["M", "G", "T", ""]))
def test_sizes_round_trip(count: int, unit: str) -> None:
    factor = {"": 1, "M": 1, "G": 1024, "T": 1024**2}[unit]
    assert fields.parse_mib(f"{count}{unit}", "m") == count * factor


def test_sizes_with_fractions_and_kilobytes_round_up() -> None:
    assert fields.parse_mib("1.50G", "m") == 1536
    assert fields.parse_mib("1025K", "m") == 2


@given(st.sets(st.integers(0, 300)))
def test_id_sets_round_trip(ids: set[int]) -> None:
    text = ",".join(str(value) for value in sorted(ids))
    assert fields.parse_id_set(text, "ids") == tuple(sorted(ids))


def test_id_ranges_are_spelled_out() -> None:
    assert fields.parse_id_set("0-1,12-13,7", "ids") == (0, 1, 12, 13, 7)
    assert fields.parse_id_set("N/A", "ids") == ()


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("gres:gpu:v100:2", {"v100": 2}),
        ("gres/gpu:v100:2", {"v100": 2}),
        ("gres:gpu:4", {"": 4}),
        ("gres/gpu=1", {"": 1}),
        ("cpu=2,gres/gpu:a100=3", {"a100": 3}),
        ("gres:gpu", {"": 1}),
        ("gpu:v100:8(S:0-1)", {"v100": 8}),
        ("gpu:v100:4(IDX:0-1,4-5),gpu:a100:1(IDX:2)", {"v100": 4, "a100": 1}),
        ("gpu:v100:0(IDX:N/A)", {"v100": 0}),
        ("gpu:no_consume:2,craynetwork:4", {"": 2}),
        ("(null)", {}),
        ("", {}),
        ("cpu=6", {}),
        ("gres:shard:3", {}),
    ],
)
def test_gpu_counts_are_read_from_every_form(text: str, gpus: dict[str, int]) -> None:
    assert fields.parse_gpus(text, "gres") == gpus


def test_gpu_indices_are_kept_with_their_type() -> None:
    found = fields.parse_gpus_with_ids("gpu:v100:4(IDX:0-1,4-5),gpu:a100:1(IDX:2)", "gres")
    assert found == (("v100", 4, (0, 1, 4, 5)), ("a100", 1, (2,)))


def test_the_first_of_a_key_counts() -> None:
    assert fields.scan_keys("A=1 B:c=x/y A=2 C=") == {"A": "1", "B:c": "x/y", "C": ""}


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (fields.parse_time_s, "yesterday"),
        (fields.parse_duration_s, "1:2:3:4"),
        (fields.parse_mib, "lots"),
        (fields.parse_id_set, "4-1"),
        (fields.parse_gpus, "gpu:a:b:2"),
        (fields.parse_count_range, "many"),
        (fields.parse_int, "1.5"),
    ],
)
def test_text_that_is_not_understood_names_the_field(parser: object, text: str) -> None:
    assert callable(parser)
    with pytest.raises(SlurmParseError, match="FIELD"):
        parser(text, "FIELD")
