"""job_submit.lua where nothing is acted on: jobs pass as they are, with a mark."""

from __future__ import annotations

import pytest
from test_job_submit_lua import NO_VAL, SITE, Lua, lua, pytestmark

__all__ = ["lua", "pytestmark"]  # a fixture, and when it can be made

PASSIVE = ("observe", "advise")


@pytest.mark.parametrize("mode", PASSIVE)
def test_a_job_passes_unchanged_but_for_its_mark(lua: Lua, mode: str) -> None:
    lua.site({**SITE, "mode": mode})
    answer = lua.submit(admin_comment="tool: x")
    assert answer.accepted
    assert answer.fields["admin_comment"].startswith("tool: x synergy:v=1,wrapper=yes,gpn=4,")
    assert answer.fields.get("priority") in (None, f"{NO_VAL}")
    assert "min_nodes" not in answer.fields or answer.fields["min_nodes"] == f"{NO_VAL}"
    assert "SYNERGY_ENDPOINT" not in answer.env


@pytest.mark.parametrize("mode", PASSIVE)
@pytest.mark.parametrize(
    "given",
    [
        {"tres_per_node": None, "tres_per_job": "gres:gpu:4"},
        {"comment": "synergy:colour=red"},
        {"priority": 0},
        {"tres_per_node": "gres:gpu:v100:64"},
        {"script": None},
        {"broken": "tres_per_node"},
        {"broken": "set admin_comment"},
    ],
)
def test_nothing_is_refused_whatever_acting_would_say(
    lua: Lua, mode: str, given: dict[str, object]
) -> None:
    lua.site({**SITE, "mode": mode})
    answer = lua.submit(**given)  # type: ignore[arg-type]
    assert (answer.accepted, answer.user) == (True, "")


@pytest.mark.parametrize("mode", PASSIVE)
def test_no_change_is_vetoed(lua: Lua, mode: str) -> None:
    lua.site({**SITE, "mode": mode})
    record = {"partition": "synergy", "admin_comment": "synergy:v=1,wrapper=yes"}
    assert lua.modify(record=record, min_cpus=9).accepted
    lua.site({**SITE, "mode": "act"})
    assert not lua.modify(record=record, min_cpus=9).accepted


def test_acting_is_what_a_file_without_a_mode_means(lua: Lua) -> None:
    assert "mode" not in SITE
    assert lua.submit().fields["priority"] == "0"


def test_a_broken_file_refuses_nothing_where_nothing_is_acted_on(lua: Lua) -> None:
    text = 'return {\n  partition = "synergy",\n  mode = "%s",\n  shapes = {{}}\n}\n'
    lua.site(text % "observe")
    assert lua.submit().accepted
    lua.site(text % "act")
    assert not lua.submit().accepted
    lua.site({**SITE, "mode": "watch"})
    refused = lua.submit()
    assert not refused.accepted
    assert "mode must be observe, advise or act" in refused.log
