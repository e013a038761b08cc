from __future__ import annotations

import string
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_synergy.core.hints import (
    HINT_EXAMPLES,
    MAX_HINT_BYTES,
    Hints,
    format_hints,
    parse_hints,
    replace_hints,
)
from slurm_synergy.core.model import Elasticity
from slurm_synergy.errors import HintError

ROOT = Path(__file__).parents[2]


def test_all_hints_are_read() -> None:
    comment = (
        "for the paper synergy:profile=resnet18-imagenet,min_mem=20G,samples=7,epochs=90,"
        "batch=128-4096,elastic=full,min_gpus=2,max_gpus=16,gpu_types=v100+a100,scale_unit=2,"
        "ckpt_dir=/scratch/me,grace_s=60 please"
    )
    assert parse_hints(comment) == Hints(
        profile="resnet18-imagenet",
        min_mem_mib=20 * 1024,
        samples=7,
        epochs=90,
        batch=(128, 4096),
        elastic=Elasticity.ADAPTIVE,
        min_gpus=2,
        max_gpus=16,
        gpu_types=("v100", "a100"),
        scale_unit=2,
        ckpt_dir="/scratch/me",
        grace_s=60,
    )


@pytest.mark.parametrize(
    "comment", ["Synergy:epochs=3", "SYNERGY:epochs=3", "synergy:samples=2 Synergy:epochs=3"]
)
def test_the_prefix_in_another_case_is_refused_with_the_right_spelling(comment: str) -> None:
    with pytest.raises(HintError, match=r"lower case.*write synergy:epochs=3"):
        parse_hints(comment)


@pytest.mark.parametrize("comment", ["", "just words", "synergyx:a=b", "my-synergy:profile=x"])
def test_a_comment_without_the_word_has_no_hints(comment: str) -> None:
    assert parse_hints(comment) == Hints()


@pytest.mark.parametrize(
    ("size", "mib"), [("500M", 500), ("1T", 2**20), ("1.5G", 1536), ("300", 300), ("0.1M", 1)]
)
def test_sizes_are_binary_and_rounded_up_to_mib(size: str, mib: int) -> None:
    assert parse_hints(f"synergy:min_mem={size}").min_mem_mib == mib


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("min_mem=20X", ["min_mem=20X", "min_mem=20G"]),
        ("min_mem=-1G", ["min_mem=-1G"]),
        ("min_mem=0", ["min_mem=0"]),
        ("batch=9-3", ["batch=9-3", "batch=128-4096"]),
        ("samples=1e6", ["samples=1e6", "samples=1281167"]),
        ("samples=0", ["samples=0"]),
        ("samples=٣", ["is not a whole number from 1 to 999999999999999; write samples=1281167"]),
        ("scale_unit=0", ["scale_unit=0 is not a whole number from 1 to 999999999; write scale_"]),
        ("min_gpus=two", ["min_gpus=two is not a whole number from 1 to 999999999; write"]),
        ("min_mem=much", ["min_mem=much is malformed"]),
        ("epochs=", ["epochs=", "epochs=90"]),
        ("elastic=yes", ["elastic=yes", "rigid, scale or full"]),
        ("gpu_types=v100++a100", ["gpu_types"]),
        ("ckpt_dir=relative", ["ckpt_dir=/scratch"]),
        ("profile=a/b", ["profile=a/b"]),
        ("min_men=20G", ["min_men", "min_mem", "profile"]),
        ("profile", ["key=value", "without spaces"]),
        ("", ["empty hint", "without spaces"]),
        ("epochs=1,", ["empty hint", "without spaces"]),
        ("epochs=1, samples=2", ["empty hint", "without spaces"]),
        ("samples=1000000000000000", ["samples=1000000000000000", "samples=1281167"]),
        ("batch=1000000000", ["batch=1000000000"]),
        ("epochs=1,epochs=2", ["twice"]),
        ("min_gpus=8,max_gpus=2", ["min_gpus=8", "max_gpus=2"]),
        ("scale_unit=8,max_gpus=4", ["scale_unit=8", "max_gpus=4", "steps of scale_unit"]),
    ],
)
def test_a_bad_hint_is_refused_with_its_name_and_what_is_right(
    token: str, words: list[str]
) -> None:
    with pytest.raises(HintError) as caught:
        parse_hints(f"note synergy:{token}")
    for word in words:
        assert word in str(caught.value)


def test_a_list_longer_than_the_limit_is_refused_however_it_is_filled() -> None:
    room = MAX_HINT_BYTES - len("synergy:ckpt_dir=/")
    assert parse_hints(f"synergy:ckpt_dir=/{'x' * room}").ckpt_dir == "/" + "x" * room
    assert parse_hints(f"{'x' * 5000} synergy:ckpt_dir=/x").ckpt_dir == "/x", "the user's own words"
    umlauts = "ä" * (room // 2 + 1)
    for token in (f"ckpt_dir=/{'x' * (room + 1)}", f"ckpt_dir=/{umlauts}", "," * 100_000):
        with pytest.raises(HintError, match=r"bytes long, and at most 1024 are taken; shorten"):
            parse_hints(f"synergy:{token}")
    with pytest.raises(HintError, match="at most 1024") as caught:
        parse_hints(f"SYNERGY:{'x' * 5000}")
    assert len(str(caught.value)) < 200


def test_two_lists_of_hints_are_refused() -> None:
    with pytest.raises(HintError, match="one"):
        parse_hints("synergy:epochs=1 synergy:samples=2")


def test_every_example_is_valid() -> None:
    for name, example in HINT_EXAMPLES.items():
        first = example.split(" or ")[0].split(",")[0]
        assert parse_hints(f"synergy:{first}") != Hints(), name


def test_the_admission_script_knows_the_same_hints() -> None:
    lua = (ROOT / "etc" / "job_submit.lua").read_text()
    body = lua.split("local HINTS = {", 1)[1].split("\n}", 1)[0]
    names = {line.split("=")[0].strip() for line in body.splitlines() if "parse =" in line}
    assert names == set(HINT_EXAMPLES)


_counts = st.none() | st.integers(1, 999_999_999)
_work = st.none() | st.integers(1, 10**15 - 1)
_FIRST = string.ascii_letters + string.digits
# Not from_regex, which takes five times as long for the same.
_names = st.tuples(st.sampled_from(_FIRST), st.text(_FIRST + "._-", max_size=20)).map("".join)
_hints = st.builds(
    Hints,
    profile=st.none() | _names,
    min_mem_mib=st.none() | st.integers(1, 999_999_999),
    samples=_work,
    epochs=_work,
    batch=st.none()
    | st.tuples(st.integers(1, 999_999_999), st.integers(1, 999_999_999)).map(
        lambda pair: (min(pair), max(pair))
    ),
    elastic=st.none() | st.sampled_from(Elasticity),
    min_gpus=st.none() | st.integers(1, 8),
    max_gpus=st.none() | st.integers(8, 64),
    gpu_types=st.none() | st.lists(_names, min_size=1, max_size=3, unique=True).map(tuple),
    scale_unit=st.none() | st.integers(1, 8),
    ckpt_dir=st.none()
    | st.text(string.ascii_lowercase + "/._-", min_size=1, max_size=20).map("/".__add__),
    grace_s=_counts,
)


@given(hints=_hints)
def test_written_hints_are_read_back(hints: Hints) -> None:
    assert parse_hints(format_hints(hints)) == hints


@given(
    hints=_hints,
    words=st.lists(st.text(string.ascii_lowercase, min_size=1, max_size=8), max_size=4),
)
def test_replacing_hints_keeps_the_users_words(hints: Hints, words: list[str]) -> None:
    before = " ".join([*words, "synergy:epochs=3"])
    after = replace_hints(before, hints)
    assert parse_hints(after) == hints
    assert [word for word in after.split() if not word.startswith("synergy:")] == words


def test_every_field_has_a_hint() -> None:
    assert len(fields(Hints)) == len(HINT_EXAMPLES)


@pytest.mark.parametrize("blank", ["\u00a0", "\u3000", "\x1c", "\x85"])
def test_only_what_lua_takes_for_a_blank_ends_a_word(blank: str) -> None:
    # job_submit.lua has let these pass; refusing them later would keep the job waiting for ever.
    assert parse_hints(f"mine{blank}synergy:bogus=1") == Hints()
    assert parse_hints(f"synergy:ckpt_dir=/a{blank}b").ckpt_dir == f"/a{blank}b"
    assert parse_hints("mine\vsynergy:epochs=2").epochs == 2
