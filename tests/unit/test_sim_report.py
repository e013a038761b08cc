"""The HTML report: complete in one file, correct, and safe whatever the trace says."""

from __future__ import annotations

import json
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurm_synergy.cli.commands import cli
from slurm_synergy.errors import ConfigError, ModelError
from slurm_synergy.simulator.comparison import averaged, cumulative, pairs, tally
from slurm_synergy.simulator.metrics import JobResult
from slurm_synergy.simulator.report_charts import scale_of

HOSTILE = "<script>document.title='taken'</script>\"'><img src=x onerror=alert(1)>"
CLUSTER = "nodes:\n  - {name: n, count: 2, gpu_type: v100, gpus: 8, cpus: 24, mem_gib: 500}\n"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Page(HTMLParser):
    """What a browser would make of a page, as far as the tests ask."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.tables: list[list[list[str]]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if "td" in self._open or "th" in self._open:
            self.tables[-1][-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def simulate(directory: Path, *options: str) -> Result:
    (directory / "cluster.yaml").write_text(CLUSTER)
    accounts = ["JobID|User|Submit|Elapsed|AllocTRES"]
    for index in range(40):
        user = HOSTILE if index % 3 else "ann"
        gpus = (1, 2, 4, 8)[index % 4]
        accounts.append(
            f"{index}|{user}|2024-05-01T10:{index:02d}:00|0{index % 5 + 1}:00:00|gres/gpu={gpus}"
        )
    (directory / "accounts").write_text("\n".join(accounts) + "\n")
    argv = ["simulate", "--cluster", str(directory / "cluster.yaml")]
    argv += ["--trace", f"sacct:{directory / 'accounts'}", "--split", "50/30/20"]
    return CliRunner().invoke(cli, [*argv, *options])


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("report")
    path = directory / "report.html"
    result = simulate(directory, "--report", str(path), "--json")
    assert result.exit_code == 0, result.output
    (directory / "summary.json").write_text(result.stdout)
    return path


@pytest.fixture(scope="module")
def page(report: Path) -> Page:
    return Page(report.read_text(encoding="utf-8"))


def test_nothing_is_fetched_and_nothing_is_run(page: Page) -> None:
    for tag, attributes in page.tags:
        assert tag not in ("script", "img", "link", "iframe", "object", "embed", "base", "form")
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("href", "src", "action", "srcset", "xlink:href"):
                assert (value or "").startswith("#")
    policies = [a["content"] for t, a in page.tags if a.get("http-equiv")]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_the_style_fetches_nothing_either(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    assert "@import" not in text
    assert "url(" not in text
    assert "prefers-color-scheme: dark" in text


def test_hostile_names_are_shown_and_not_obeyed(page: Page, report: Path) -> None:
    assert HOSTILE in page.text
    assert "<img" not in report.read_text(encoding="utf-8")


def test_the_page_is_navigable(page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [a["href"] for t, a in page.tags if t == "a"]
    assert {(link or "").removeprefix("#") for link in links} <= set(ids)
    assert [t for t, _ in page.tags if t == "h1"] == ["h1"]
    assert ("html", {"lang": "en"}) in page.tags
    levels = [int(t[1]) for t, _ in page.tags if t in ("h1", "h2", "h3")]
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_every_picture_is_told_in_words_and_numbers(page: Page) -> None:
    pictures = [a for t, a in page.tags if t == "svg" and a.get("role") == "img"]
    assert len(pictures) >= 8
    ids = {a.get("id") for _, a in page.tags}
    for attributes in pictures:
        assert set((attributes["aria-labelledby"] or "").split()) <= ids
    figures = sum(t == "figure" for t, _ in page.tags)
    assert figures == len(pictures) == sum(t == "details" for t, _ in page.tags)


def test_the_figures_are_those_of_the_summary(page: Page, report: Path) -> None:
    summary = json.loads((report.parent / "summary.json").read_text())
    heads, *rows = page.tables[0]
    assert heads[1:3] == ["tune", "proportional"]
    table = {row[0]: row[1:3] for row in rows}
    scale = scale_of(1e5)
    assert table["average completion time"] == [
        scale.of(summary["avg_jct_s"]),
        scale.of(summary["baseline"]["avg_jct_s"]),
    ]
    assert table["cores held"] == [
        f"{summary['cpu_util']:.1%}",
        f"{summary['baseline']['cpu_util']:.1%}",
    ]
    assert summary["baseline"]["mechanism"] == "proportional"


def test_assumptions_and_the_command_are_told(page: Page) -> None:
    assert "elapsed times are taken as those at the GPU-proportional share" in page.text
    assert "synergyctl" in page.text


def test_another_baseline_and_none_at_all(tmp_path: Path) -> None:
    path = tmp_path / "other.html"
    options = ("--report", str(path), "--baseline", "greedy", "--mechanism", "proportional")
    assert simulate(tmp_path, *options).exit_code == 0
    assert Page(path.read_text()).tables[0][0][1:3] == ["proportional", "greedy"]
    result = simulate(tmp_path, "--baseline", "magic")
    assert isinstance(result.exception, ConfigError)
    assert "--baseline = 'magic'" in str(result.exception)


def test_a_report_that_cannot_be_written_is_refused_before_the_simulation(tmp_path: Path) -> None:
    result = simulate(tmp_path, "--report", str(tmp_path / "none" / "report.html"))
    assert isinstance(result.exception, ConfigError)
    assert "directory that does not exist" in str(result.exception)


# numbers ---------------------------------------------------------------------------------------


def job(job_id: int, jct_s: float) -> JobResult:
    return JobResult(
        job_id=job_id,
        model="m",
        user="u",
        gpus=1,
        submitted_s=0.0,
        started_s=0.0,
        completed_s=jct_s,
        jct_s=jct_s,
        queue_s=0.0,
        run_s=jct_s,
        restarts=0,
        speedup=1.0,
        ftf=1.0,
    )


def test_jobs_are_paired_and_counted_by_gain() -> None:
    ours = [job(1, 10.0), job(2, 10.0), job(3, 10.0)]
    base = [job(3, 5.0), job(1, 30.0), job(2, 10.2)]
    found = pairs(ours, base)
    assert [(one.ours.job_id, one.gain) for one in found] == [(1, 3.0), (2, 1.02), (3, 0.5)]
    assert tally(found) == (1, 1, 1)
    with pytest.raises(ModelError, match="not of the same jobs"):
        pairs(ours, base[:2])


def test_a_staircase_is_averaged_without_loss() -> None:
    times, levels = [10.0, 10.5, 13.0, 40.0], [1.0, 0.0, 0.5, 0.25]
    points = averaged(times, levels, 50.0)
    area = 0.5 * 1.0 + 0.0 + 27.0 * 0.5 + 10.0 * 0.25
    width = (50.0 - 10.0) / len(points)
    assert sum(level for _, level in points) * width == pytest.approx(area)
    assert all(0.0 <= level <= 1.0 for _, level in points)
    assert averaged([], [], 5.0) == ()


def test_distributions_end_at_one() -> None:
    assert cumulative([3.0, 1.0, 2.0]) == ((1.0, 1 / 3), (2.0, 2 / 3), (3.0, 1.0))
    many = cumulative([float(one) for one in range(5000)])
    assert len(many) < 400
    assert many[-1] == (4999.0, 1.0)
    assert cumulative([]) == ()


@pytest.mark.parametrize(
    ("most_s", "value_s", "text"),
    [
        (60.0, 12.0, "12.0 s"),
        (7200.0, 90.0, "1.50 min"),
        (1e6, 3600.0, "1.00 h"),
        (1e7, 864e4, "100 d"),
    ],
)
def test_times_are_written_in_a_unit_that_suits(most_s: float, value_s: float, text: str) -> None:
    assert scale_of(most_s).of(value_s) == text


# files -----------------------------------------------------------------------------------------


def test_parquet_has_the_same_rows_as_csv(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow (extra report) is missing")
    table, plain = tmp_path / "jobs.parquet", tmp_path / "moments.parquet"
    result = simulate(tmp_path, "--jobs-out", str(table), "--timeline-out", str(plain))
    assert result.exit_code == 0, result.output
    rows = parquet.read_table(table).to_pylist()
    assert len(rows) == 40
    assert {type(rows[0][key]) for key in ("job_id", "gpus", "restarts")} == {int}
    assert rows[0]["user"] in ("ann", HOSTILE)
    assert parquet.read_table(plain).num_rows > 10


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    result = simulate(tmp_path, "--jobs-out", str(tmp_path / "jobs.parquet"))
    assert isinstance(result.exception, ConfigError)
    assert "slurm-synergy[report]" in str(result.exception)


# browser ---------------------------------------------------------------------------------------


def browser() -> str | None:
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


@pytest.mark.skipif(browser() is None, reason=f"no browser here ({', '.join(BROWSERS)})")
def test_a_real_browser_shows_the_page(report: Path, tmp_path: Path) -> None:
    program = browser()
    assert program
    argv = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    argv += [f"--user-data-dir={tmp_path}", "--enable-logging=stderr", "--v=0"]
    argv += ["--virtual-time-budget=2000", "--dump-dom", report.as_uri()]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    dom = Page(done.stdout)
    assert "CONSOLE" not in done.stderr, done.stderr
    assert [t for t, _ in dom.tags].count("svg") >= 8
    assert not any(t in ("script", "img") for t, _ in dom.tags)
    title = done.stdout.partition("<title>")[2].partition("</title>")[0]
    assert title == "What tune makes of 40 jobs"
    assert HOSTILE in dom.text
