"""Charts: axes with round numbers, drawings that are well-formed, texts that are escaped."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_synergy.simulator.charts import (
    BarChart,
    Chart,
    Form,
    LineChart,
    Part,
    Series,
    Unit,
    linear_ticks,
    log_ticks,
    written,
)
from slurm_synergy.simulator.markup import Markup, tag
from slurm_synergy.simulator.raster import can_write_png, write_png
from slurm_synergy.simulator.svg import draw, svg_file

SVG = "{http://www.w3.org/2000/svg}"
LINES = LineChart(
    title="Gain <b>&</b>",
    description='from "low" to high',
    x_label="load",
    y_label="gain",
    series=(
        Series(name="a<script>", points=((1.0, 0.5), (10.0, 2.0)), form=Form.MARKED),
        Series(name="b", points=((1.0, 1.0), (10.0, 1.0)), form=Form.STEP),
        Series(name="none", points=()),
    ),
    log_x=True,
    y_unit=Unit.TIMES,
    guide=1.0,
)
BARS = BarChart(
    title="Times",
    description="",
    y_label="h",
    categories=("one", "a name that is much too long to be written beside another"),
    parts=(Part(name="run", values=(1.0, 2.0)), Part(name="wait", values=(3.0, 0.0))),
    stacked=True,
)


@given(st.floats(-1e3, 1e3), st.floats(1e-2, 1e6))
def test_ticks_cover_the_values_with_few_round_steps(low: float, span: float) -> None:
    ticks = linear_ticks(low, low + span)
    slack = 1e-6 * max(abs(low), span)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= low + span - slack
    assert 2 <= len(ticks) <= 9
    step = ticks[1] - ticks[0]
    digits = f"{step:.3e}".rstrip("0123456789+-").rstrip("e").rstrip("0").replace(".", "")
    assert digits in {"1", "2", "25", "5"}, step


def test_ticks_exist_where_nothing_varies() -> None:
    assert len(linear_ticks(0.0, 0.0)) >= 2
    assert linear_ticks(3.0, 3.0)[-1] > 3.0


def test_logarithmic_ticks_are_within() -> None:
    assert log_ticks(0.3, 40.0) == (0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
    assert log_ticks(1.0, 1e6) == (1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.1234, Unit.PERCENT, "12.3 %"),
        (1234567.0, Unit.PLAIN, "1\u202f234\u202f567"),
        (2.5, Unit.TIMES, "2.5×"),
        (0.00001, Unit.PLAIN, "1e-05"),
        (0.0, Unit.PLAIN, "0"),
    ],
)
def test_numbers_are_written_for_people(value: float, unit: Unit, text: str) -> None:
    assert written(value, unit) == text


def test_what_is_no_markup_is_escaped_in_content_and_attributes() -> None:
    made = tag("p", "<b>", Markup("<i>x</i>"), title='"<', class_="a", data_x=None)
    assert made == '<p title="&quot;&lt;" class="a">&lt;b&gt;<i>x</i></p>'


@pytest.mark.parametrize("chart", [LINES, BARS], ids=["lines", "bars"])
def test_a_drawing_is_well_formed_and_told_in_words(chart: Chart) -> None:
    root = ET.fromstring(draw(chart, ident="x"))
    assert root.get("role") == "img"
    ids = {one.get("id") for one in root.iter()}
    assert set((root.get("aria-labelledby") or "").split()) <= ids
    assert root.findtext(f"{SVG}title") == chart.title
    assert root.findtext(f"{SVG}desc") == chart.description
    assert not list(root.iter(f"{SVG}script"))


def test_a_file_of_its_own_carries_style_title_and_legend() -> None:
    root = ET.fromstring(svg_file(LINES).partition("\n")[2])
    texts = [one.text for one in root.iter(f"{SVG}text")]
    assert {"Gain <b>&</b>", "a<script>", "b"} <= set(texts)
    assert "prefers-color-scheme: dark" in (root.findtext(f"{SVG}style") or "")


def test_every_mark_can_be_read_off() -> None:
    root = ET.fromstring(draw(LINES, ident="x"))
    told = [one.findtext(f"{SVG}title") for one in root.iter(f"{SVG}circle")]
    assert told == ["a<script>: 1, 0.5×", "a<script>: 10, 2×"]


def test_stacked_bars_stand_on_each_other() -> None:
    root = ET.fromstring(draw(BARS, ident="x"))
    bars = {
        one.findtext(f"{SVG}title"): (float(one.get("y", 0)), float(one.get("height", 0)))
        for one in root.iter(f"{SVG}rect")
    }
    run, wait = bars["one, run: 1"], bars["one, wait: 3"]
    assert wait[0] + wait[1] == pytest.approx(run[0], abs=0.2)
    assert wait[1] == pytest.approx(3 * run[1], abs=0.5)


@pytest.mark.skipif(not can_write_png(), reason="matplotlib (extra report) is not installed")
@pytest.mark.parametrize("chart", [LINES, BARS], ids=["lines", "bars"])
def test_png_is_written_by_matplotlib(tmp_path: Path, chart: Chart) -> None:
    path = tmp_path / "figure.png"
    write_png(chart, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000
