"""The report of a simulation, as one HTML file for people who run a cluster.

It compares a mechanism with a baseline on the same jobs. No script, nothing fetched, every text
that comes from a trace escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from slurm_synergy.core.model import Node
from slurm_synergy.simulator.comparison import (
    ALIKE,
    Pair,
    groups,
    mean,
    pairs,
    tally,
)
from slurm_synergy.simulator.markup import Markup, tag
from slurm_synergy.simulator.metrics import JobResult, percentile
from slurm_synergy.simulator.page import NOTES, Section, data_table, figure, page, paragraph
from slurm_synergy.simulator.report_charts import (
    Case,
    Scale,
    completion,
    gains,
    held,
    jobs_waiting,
    scale_of,
    speeds,
    times_by_group,
    times_overall,
)

__all__ = ["About", "Case", "render"]

_MOST_NAMED = 10
_MOST_GROUPS = 20

_MECHANISMS: Mapping[str, str] = MappingProxyType(
    {
        "proportional": "every job gets cores and memory in proportion to its GPUs, the usual rule",
        "tune": "every job gets the cores and memory that it can use, and never progresses slower "
        "than with its GPU-proportional share",
        "greedy": "jobs get all they can use in the order of the queue, and wait when it is not "
        "there, even if GPUs are free",
        "opt": "cores and memory are divided by a solver, as a bound of what is possible",
        "drf": "the job that holds the smallest part of the pool's scarcest resource comes first",
        "tetris": "short and small jobs come first, placed where they fit",
        "tetris_align": "jobs go where their demand is most like what is free",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What was simulated, in words. ``settings`` are name and value; ``command`` repeats it."""

    workload: str
    version: str
    command: str
    settings: tuple[tuple[str, str], ...] = ()


def render(ours: Case, base: Case | None, nodes: Sequence[Node], about: About) -> str:
    """The report as an HTML document. Raises ModelError when the two are not of the same jobs."""
    cases = [ours] if base is None else [ours, base]
    found = pairs(ours.result.jobs, base.result.jobs) if base is not None else ()
    scale = scale_of(max(one.jct_s for case in cases for one in case.result.jobs))
    sections = [
        _figures(cases, scale),
        _completion(cases, scale),
        _waiting(cases, found, scale),
        _resources(cases, nodes),
    ]
    if found:
        sections.append(_winners(found, scale, cases[1].name))
    sections += [_speed(cases), _method(cases, about)]
    title = f"What {ours.name} makes of {len(ours.result.jobs)} jobs"
    return page(title, _lead(cases, found, scale, nodes), sections)


def _lead(
    cases: Sequence[Case], found: Sequence[Pair], scale: Scale, nodes: Sequence[Node]
) -> list[Markup]:
    ours = cases[0]
    average = mean([one.jct_s for one in ours.result.jobs])
    pool = _pool(nodes)
    if not found:
        text = (
            f"Simulated on {pool}: from submission to completion the average job takes "
            f"{scale.of(average)} under {ours.name}."
        )
        return [paragraph(text, class_="lead")]
    before = mean([one.jct_s for one in cases[1].result.jobs])
    sooner, alike, later = tally(found)
    verdict = _verdict(before, average)
    text = (
        f"Simulated on {pool}: from submission to completion the average job takes "
        f"{scale.of(average)} under {ours.name}, and {scale.of(before)} under "
        f"{cases[1].name}. {verdict}"
    )
    limit = f"{ALIKE:.0%} of its completion time"
    cards = [
        (f"{before / average:.2f}×" if average else "1×", "average completion time, gain"),
        (f"{sooner}", f"jobs done sooner, by more than {limit}"),
        (f"{alike}", "jobs with hardly a difference"),
        (f"{later}", f"jobs done later, by more than {limit}"),
    ]
    return [
        paragraph(text, class_="lead"),
        tag("ul", *(tag("li", tag("b", b), tag("span", s)) for b, s in cards), class_="cards"),
    ]


def _verdict(before: float, average: float) -> str:
    gain = before / average if average else 1.0
    if gain > 1.005:
        return f"That is {gain:.2f} times sooner."
    if gain < 0.995:
        return f"That is {1 / gain:.2f} times later: for this workload the baseline is better."
    return "That makes no difference for this workload."


def _pool(nodes: Sequence[Node]) -> str:
    kinds: dict[tuple[str, int, int, int], int] = {}
    for node in nodes:
        total = node.total
        key = (node.gpu_type, total.gpus, total.cpus, total.mem_mib // 1024)
        kinds[key] = kinds.get(key, 0) + 1
    return ", ".join(
        f"{count} node{'s' if count > 1 else ''} of {gpus} {kind} GPUs, {cpus} cores and {gib} GiB"
        for (kind, gpus, cpus, gib), count in kinds.items()
    )


# sections --------------------------------------------------------------------------------------


def _figures(cases: Sequence[Case], scale: Scale) -> Section:
    def jct(case: Case) -> list[float]:
        return [one.jct_s for one in case.result.jobs]

    rows: list[tuple[str, list[str], str]] = [
        (
            "average completion time",
            [scale.of(mean(jct(case))) for case in cases],
            "from submission to the end, waiting included",
        ),
        (
            "median completion time",
            [scale.of(percentile(jct(case), 0.5)) for case in cases],
            "half of the jobs are done sooner",
        ),
        (
            "99th percentile",
            [scale.of(case.result.summary["p99_jct_s"]) for case in cases],
            "one job in a hundred takes longer",
        ),
        (
            "average wait",
            [scale.of(mean([one.queue_s for one in case.result.jobs])) for case in cases],
            "time without GPUs",
        ),
        (
            "average run",
            [scale.of(mean([one.run_s for one in case.result.jobs])) for case in cases],
            "time with GPUs, restarts included",
        ),
        (
            "all jobs done after",
            [scale.of(case.result.summary["makespan_s"]) for case in cases],
            "from the first submission to the last completion",
        ),
        *(
            (name, [f"{case.result.summary[key]:.1%}" for case in cases], note)
            for name, key, note in (
                ("GPUs held", "gpu_util", "of the pool, averaged over the whole simulation"),
                ("cores held", "cpu_util", "held is not used: a job may hold more than it needs"),
                ("memory held", "mem_util", "a job's own memory and its cache of data"),
            )
        ),
        (
            "restarts per job",
            [f"{case.result.summary['restarts_per_job']:.2f}" for case in cases],
            "a job that was stopped for another one and came back",
        ),
    ]
    heads = ["", *(case.name for case in cases), NOTES]
    table = [[name, *values, tag("td", note, class_="note")] for name, values, note in rows]
    return Section("figures", "The figures", data_table(heads, table))


def _completion(cases: Sequence[Case], scale: Scale) -> Section:
    text = (
        "The higher a line is, the more jobs are done by that time. Where one line is to the left "
        "of the other, its jobs are done sooner."
    )
    chart = figure(completion(cases, scale), ident="jct")
    return Section("completion", "When jobs are done", paragraph(text), chart)


def _waiting(cases: Sequence[Case], found: Sequence[Pair], scale: Scale) -> Section:
    text = (
        "A completion time is time in the queue and time with GPUs. Cores and memory change the "
        "second at once; the first follows, because GPUs are given back earlier."
    )
    content = [paragraph(text), figure(times_overall(cases, scale), ident="times")]
    by_gpus = times_by_group(
        cases, scale, "By number of GPUs", lambda one: one.gpus, lambda key: f"{key} GPU"
    )
    by_model = times_by_group(
        cases, scale, "By model", lambda one: one.model, lambda key: str(key) or "unnamed"
    )
    for name, charts in (("gpus", by_gpus), ("model", by_model)):
        drawn = [figure(one, ident=f"times-{name}-{index}") for index, one in enumerate(charts)]
        content.append(tag("div", *drawn, class_="pair"))
    if len({one.ours.user for one in found}) > 1:
        content += [tag("h3", "By user"), _by_user(found, scale)]
    return Section("waiting", "Waiting and running", *content)


def _by_user(found: Sequence[Pair], scale: Scale) -> Markup:
    made = groups(found, lambda one: one.user)
    rows = [
        [
            one.name,
            one.jobs,
            scale.of(one.ours_s),
            scale.of(one.base_s),
            scale.of(one.queue_s),
            scale.of(one.base_queue_s),
            f"{one.gain:.2f}×",
        ]
        for one in made[:_MOST_GROUPS]
    ]
    heads = ["user", "jobs", "average", "baseline", "wait", "baseline's wait", "gain"]
    table = data_table(heads, rows)
    if len(made) <= _MOST_GROUPS:
        return table
    note = f"The {_MOST_GROUPS} users with most jobs, of {len(made)}."
    return tag("div", table, paragraph(note))


def _resources(cases: Sequence[Case], nodes: Sequence[Node]) -> Section:
    text = (
        "What the jobs hold of the pool. A mechanism that divides cores and memory well holds the "
        "same GPUs for a shorter time; when the queue never empties, the GPUs are full under both."
    )
    charts = [
        held(cases, nodes, "gpus", "GPUs held"),
        held(cases, nodes, "cpus", "Cores held"),
        held(cases, nodes, "mem_mib", "Memory held"),
        jobs_waiting(cases),
    ]
    drawn = [figure(chart, ident=f"held-{index}") for index, chart in enumerate(charts)]
    return Section("resources", "The pool over time", paragraph(text), *drawn)


def _winners(found: Sequence[Pair], scale: Scale, baseline: str) -> Section:
    sooner, alike, later = tally(found)
    text = (
        f"Against {baseline}, {sooner} of {len(found)} jobs are done sooner, {later} later, and "
        f"{alike} at about the same time (within {ALIKE:.0%}). A job is later when another one "
        "that became faster or was started earlier took its turn; while it runs it is never "
        "slower than with its proportional share."
    )
    content = [paragraph(text), figure(gains(found, baseline), ident="gains")]
    content += [tag("h3", "Jobs that gain most"), _named(found[:_MOST_NAMED], scale)]
    losers = [one for one in reversed(found) if one.gain < 1][:_MOST_NAMED]
    if losers:
        content += [tag("h3", "Jobs that lose most"), _named(losers, scale)]
    else:
        content.append(paragraph("No job is done later than under the baseline."))
    return Section("gain", "Winners and losers", *content)


def _named(found: Sequence[Pair], scale: Scale) -> Markup:
    rows = [
        [
            f"job {one.ours.job_id}",
            one.ours.model,
            one.ours.user,
            one.ours.gpus,
            scale.of(one.ours.jct_s),
            scale.of(one.base.jct_s),
            f"{one.gain:.2f}×",
        ]
        for one in found
    ]
    return data_table(["", "model", "user", "GPUs", "completion", "baseline", "gain"], rows)


def _speed(cases: Sequence[Case]) -> Section:
    text = (
        "How fast each job ran while it had GPUs, compared with running alone on exactly its "
        "GPU-proportional share of cores and memory (1×). Restarts count as time without progress."
    )
    models: dict[str, list[JobResult]] = {}
    for one in cases[0].result.jobs:
        models.setdefault(one.model or "unnamed", []).append(one)
    rows = [
        [
            name,
            len(those),
            f"{mean([one.speedup for one in those]):.2f}×",
            f"{min(one.speedup for one in those):.2f}×",
            f"{max(one.speedup for one in those):.2f}×",
        ]
        for name, those in sorted(models.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    table = data_table(["model", "jobs", "average", "slowest", "fastest"], rows[:_MOST_GROUPS])
    heading = tag("h3", f"Speed by model, {cases[0].name}")
    drawn = figure(speeds(cases), ident="speeds")
    return Section("speed", "Speed while running", paragraph(text), drawn, heading, table)


def _method(cases: Sequence[Case], about: About) -> Section:
    names = [
        part
        for case in cases
        for part in (
            tag("dt", case.name),
            tag("dd", _MECHANISMS.get(case.mechanism, "a mechanism of this site")),
        )
    ]
    settings = data_table(["setting", "value"], [list(one) for one in about.settings])
    assumed = cases[0].result.assumptions
    content = [
        paragraph(
            "The simulation plays the controller's own rounds on a virtual clock: the code that "
            "decides here is the code that decides on the cluster. What is simulated is the "
            "hardware: how fast a job runs with given cores and memory comes from published or "
            "measured figures of its model. Storage bandwidth shared between jobs, interference "
            "and network placement are not simulated."
        ),
        paragraph("Workload: ", about.workload),
        tag("dl", *names),
        settings,
    ]
    if assumed:
        items = [tag("li", text) for text in assumed]
        content += [paragraph("The trace did not tell everything. Assumed:"), tag("ul", *items)]
    content += [
        paragraph("To repeat it: ", tag("code", about.command)),
        paragraph(f"slurm-synergy {about.version}"),
    ]
    return Section("method", "How this was made", *content)
