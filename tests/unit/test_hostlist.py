"""Host lists: every example is checked against what Slurm's own ``show hostnames`` printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_synergy.errors import SlurmParseError
from slurm_synergy.slurm.hostlist import compress, expand


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("v100-[1-4]", "v100-1 v100-2 v100-3 v100-4"),
        ("v100-[1-2,4],a100-1,login", "v100-1 v100-2 v100-4 a100-1 login"),
        ("node[001-003,010,099-101]", "node001 node002 node003 node010 node099 node100 node101"),
        (
            "rack[0-1]node[08-11]",
            "rack0node08 rack0node09 rack0node10 rack0node11 "
            "rack1node08 rack1node09 rack1node10 rack1node11",
        ),
        ("v100-1,v100-[1-2]", "v100-1 v100-1 v100-2"),
        ("v100-[3,1],a100-2", "v100-3 v100-1 a100-2"),
    ],
)
def test_lists_expand_as_slurm_expands_them(text: str, names: str) -> None:
    assert expand(text) == tuple(names.split())


def test_a_suffix_behind_several_brackets_is_understood() -> None:
    assert expand("r[1-2]n[3,5]-gpu") == ("r1n3-gpu", "r1n5-gpu", "r2n3-gpu", "r2n5-gpu")


@pytest.mark.parametrize("text", ["", "(null)", "None"])
def test_words_for_none_give_no_names(text: str) -> None:
    assert expand(text) == ()


@pytest.mark.parametrize(
    "text",
    ["v100-[1-", "v100-1]", "v100-[a-c]", "v100-[4-1]", "a,,b", "a b", "n[[1]]", "n[]", "n[1,]"],
)
def test_malformed_lists_are_refused_with_the_text(text: str) -> None:
    with pytest.raises(SlurmParseError) as caught:
        expand(text)
    assert caught.value.text == text


def test_a_list_of_absurd_size_is_refused_without_building_it() -> None:
    with pytest.raises(SlurmParseError, match="too many"):
        expand("n[0-999999999]x[0-999999999]")
    with pytest.raises(SlurmParseError, match="too many"):
        expand("a[1-6],b[1-6]", max_names=11)


def test_compress_writes_the_short_form_and_keeps_order_and_padding() -> None:
    assert compress(["v100-3", "v100-1", "a100-2", "v100-2"]) == "v100-[3,1],a100-2,v100-2"
    assert compress(["n08", "n09", "n10", "login", "n9"]) == "n[08-10],login,n9"
    assert compress(["n1-gpu", "n2-gpu", "n3-ib"]) == "n[1-2]-gpu,n3-ib"
    assert compress(["n9", "n10", "n099", "n100"]) == "n[9-10,099-100]"


@pytest.mark.parametrize("name", ["", "a,b", "n[1]", "a b"])
def test_compress_refuses_what_is_not_a_node_name(name: str) -> None:
    with pytest.raises(SlurmParseError):
        compress([name])


_names = st.from_regex(r"[a-z]{1,3}-?[0-9]{0,4}(-gpu|x)?", fullmatch=True)


@given(st.lists(_names, max_size=30))
def test_expand_undoes_compress(names: list[str]) -> None:
    assert expand(compress(names)) == tuple(names)


@given(
    st.text("nab-", min_size=1, max_size=4),
    st.integers(0, 2000),
    st.integers(0, 60),
    st.integers(1, 6),
)
def test_a_range_expands_to_its_numbers_padded(
    prefix: str, lo: int, count: int, width: int
) -> None:
    first, last = str(lo).zfill(width), str(lo + count)
    want = tuple(f"{prefix}{str(n).zfill(width)}" for n in range(lo, lo + count + 1))
    assert expand(f"{prefix}[{first}-{last}]") == want
    assert expand(compress(want)) == want
