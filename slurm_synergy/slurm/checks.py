"""Does this Slurm suit us: findings from what it shows of itself. Pure.

What could not be read has a finding of its own; the checks that need it are left out then.
Thresholds and reasons are measured or documented behaviour of Slurm 22.05 to 25.11.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from slurm_synergy.config import Settings
from slurm_synergy.core.wording import counted
from slurm_synergy.slurm import hostlist
from slurm_synergy.slurm.config_checks import check_partition, check_settings_of_slurm
from slurm_synergy.slurm.evidence import NOT_ALLOWED, Evidence
from slurm_synergy.slurm.facts import ConfigFacts, NodeFacts
from slurm_synergy.slurm.fields import parse_words
from slurm_synergy.slurm.findings import Finding, fail, ok, warn
from slurm_synergy.slurm.pool import gpu_type_of

__all__ = ["OLDEST", "slurm_findings"]

OLDEST = (22, 5)
"""The oldest Slurm release that is supported."""

_CLOCK_WARN_S, _CLOCK_FAIL_S = 5.0, 60.0
_JOBS_WARN = 0.8
_BROKEN_SETTINGS = "its settings are broken"  # said by job_submit.lua


def slurm_findings(evidence: Evidence, settings: Settings, *, acts: bool = True) -> list[Finding]:
    """All findings on Slurm, in the order of reading. ``acts``: the controller changes things."""
    found = list(_reach(evidence))
    config, partition = evidence.config, evidence.partition
    if config is None:
        return found
    found += _versions(evidence, config)
    found += check_settings_of_slurm(evidence, config, settings)
    if partition is not None:
        found += check_partition(config, partition, settings)
    found += _nodes(evidence, settings)
    found += _job_submit(evidence, config, acts)
    found += _limits(evidence, config)
    found += _rights(evidence, acts)
    found += _reservations(evidence, settings)
    return found


# what answers --------------------------------------------------------------------------------


def _reach(evidence: Evidence) -> Iterator[Finding]:
    remedies = {
        "client": "install Slurm's commands here, or set slurm.bin_dir to where they are",
        "controller": "see that slurmctld runs and that slurm.conf (slurm.conf in the settings, "
        "else SLURM_CONF) is that of this cluster; 'scontrol ping' tells",
        "partition": "create the partition in slurm.conf (see slurm.conf.d/synergy.conf), or set "
        "slurm.partition to the one that is meant",
    }
    for what, problem in evidence.problems:
        yield fail(
            what,
            problem,
            "without it nothing can be scheduled",
            remedies.get(what, "run the check as the controller's user; see what Slurm says"),
        )


def _versions(evidence: Evidence, config: ConfigFacts) -> Iterator[Finding]:
    server = config.raw.get("SLURM_VERSION", "")
    seen = f"slurmctld {server}, commands {evidence.client or 'unknown'}"
    if config.version[:2] < OLDEST:
        yield fail(
            "version",
            seen,
            "releases before 22.05 lack what the controller relies on",
            "upgrade Slurm to 22.05 or newer",
        )
    elif evidence.client_version[:2] > config.version[:2]:
        yield fail(
            "version",
            seen,
            "Slurm's commands must not be newer than its controller",
            "use the commands of slurmctld's release here (slurm.bin_dir)",
        )
    elif evidence.client_version[:2] != config.version[:2]:
        yield warn(
            "version",
            seen,
            "older commands work, but may not show all that is new",
            "install the commands of slurmctld's release here",
        )
    else:
        yield ok("version", seen)
    if evidence.server_time_s is not None:
        yield _clock(evidence.asked_s - evidence.server_time_s)


def _clock(ahead_s: float) -> Finding:
    # Slurm's answer has whole seconds: up to one of them is no difference.
    off_s = max(0.0, -ahead_s, ahead_s - 1.0)
    seen = f"this clock and slurmctld's agree within {max(off_s, 1.0):.0f} s"
    means = "credentials of MUNGE are refused when clocks differ by minutes; waiting times are off"
    remedy = "let both machines follow the same time server (chrony, ntpd)"
    if off_s <= _CLOCK_WARN_S:
        return ok("clock", seen)
    seen = f"this clock is {off_s:.0f} s {'ahead of' if ahead_s > 0 else 'behind'} slurmctld's"
    return (fail if off_s > _CLOCK_FAIL_S else warn)("clock", seen, means, remedy)


# nodes, admission, limits, rights, reservations -----------------------------------------------


def _nodes(evidence: Evidence, settings: Settings) -> Iterator[Finding]:
    if evidence.nodes is None or evidence.config is None or evidence.partition is None:
        return
    name = settings.slurm.partition
    inside = [node for node in evidence.nodes if name in node.partitions]
    kinds: dict[str, list[NodeFacts]] = {}
    for node in inside:
        kinds.setdefault(gpu_type_of(node) or "", []).append(node)
    without = kinds.pop("", [])
    gres = _words(evidence.config, "GresTypes")
    if "gpu" not in gres or not kinds:
        yield fail(
            "gres",
            f"GresTypes={','.join(gres) or '(none)'}, {counted(len(inside), 'node')} in partition "
            f"{name}, none of them with GPUs of one type",
            "there is nothing to schedule",
            "set GresTypes=gpu, Gres=gpu:TYPE:N on the nodes, and gres.conf",
        )
        return
    seen = ", ".join(
        f"{counted(len(nodes), 'node')} with {kind}" for kind, nodes in sorted(kinds.items())
    )
    if without:
        yield warn(
            "gres",
            f"{seen}; without: {_names(without)}",
            "nodes without GPUs, or with GPUs of several types, are not scheduled",
            f"take them out of partition {name}, or give each node GPUs of one type",
        )
    else:
        yield ok("gres", seen)
    unusable = [node for node in inside if not node.usable]
    if unusable:
        yield warn(
            "nodes",
            f"not usable: {_names(unusable)}",
            "nothing is started there",
            "'sinfo -R' tells why",
        )


def _words(config: ConfigFacts, key: str) -> tuple[str, ...]:
    return parse_words(config.raw.get(key, ""))


def _names(nodes: list[NodeFacts]) -> str:
    return hostlist.compress(sorted(node.name for node in nodes))


def _job_submit(evidence: Evidence, config: ConfigFacts, acts: bool) -> Iterator[Finding]:
    plugins = _words(config, "JobSubmitPlugins")
    seen = f"JobSubmitPlugins={','.join(plugins) or '(none)'}"
    worse = fail if acts else warn
    remedy = (
        "copy etc/job_submit.lua and synergy_site.lua beside slurm.conf, set JobSubmitPlugins=lua, "
        "restart slurmctld"
    )
    means = (
        "jobs are not checked, marked and held at submission: Slurm starts them by itself, and the "
        "user's request is lost when the controller changes it"
    )
    if "lua" not in plugins:
        yield worse("job_submit", seen, means, remedy)
        return
    if evidence.refusals is None:
        return
    ours = [text or "" for text in evidence.refusals]
    if not all("slurm-synergy:" in text for text in ours):
        said = next((text for text in ours if text), "") or "a job without GPUs would be taken"
        yield worse(
            "job_submit",
            f"{seen}, but it is not ours that answers: {_first_line(said)}",
            means,
            f"{remedy}; a site with a job_submit.lua of its own calls ours from it",
        )
        return
    if any(_BROKEN_SETTINGS in text for text in ours):
        yield worse(
            "job_submit",
            f"{seen}; {_first_line(ours[0])}",
            "no job is taken in the managed partition",
            "correct synergy_site.lua (slurmctld's log names the line), and touch job_submit.lua",
        )
        return
    yield ok("job_submit", f"{seen}; ours answers at submission")


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def _limits(evidence: Evidence, config: ConfigFacts) -> Iterator[Finding]:
    most = config.raw.get("MaxJobCount", "")
    count = evidence.job_count
    if count is not None and most.isdigit():
        seen = f"{counted(count, 'job')} known, MaxJobCount={most}"
        if count > _JOBS_WARN * int(most):
            yield warn(
                "job_count",
                seen,
                "Slurm refuses submissions at that number; finished jobs count until MinJobAge is "
                "over",
                "raise MaxJobCount",
            )
        else:
            yield ok("job_count", seen)
    enforced = set(_words(config, "AccountingStorageEnforce"))
    if enforced & {"limits", "qos", "safe", "all"}:
        yield warn(
            "enforced_limits",
            f"AccountingStorageEnforce={','.join(sorted(enforced))}",
            "Slurm does not hold managed jobs to limits on CPUs and memory, as an operator sets "
            "these, but all cores of their nodes count against the other jobs of their account",
            "limit GPUs (gres/gpu), jobs, nodes and time for this partition's users, and leave "
            "room in cpu limits",
        )


def _rights(evidence: Evidence, acts: bool) -> Iterator[Finding]:
    if evidence.rights is None:
        return
    if evidence.rights == "":
        yield ok("rights", "this user may operate Slurm (hold, release, reservations)")
        return
    remedy = (
        "run the controller (and this check) as root, SlurmUser, or an account with "
        "AdminLevel=Operator (sacctmgr modify user NAME set adminlevel=operator)"
    )
    seen = "Slurm refuses this user an operator's change"
    if evidence.rights != NOT_ALLOWED:
        seen = f"cannot tell: {evidence.rights}"
    means = "without an operator's rights nothing can be held, released or reserved"
    yield (fail if acts else warn)("rights", seen, means, remedy)


def _reservations(evidence: Evidence, settings: Settings) -> Iterator[Finding]:
    if evidence.reservations is None or evidence.partition is None:
        return
    pool = set(evidence.partition.nodes)
    if settings.pool.nodes:
        pool &= set(hostlist.expand(settings.pool.nodes))
    ours = settings.reservation_name
    others: Mapping[str, set[str]] = {
        one.name: pool & set(one.nodes)
        for one in evidence.reservations
        if one.name != ours and "OVERLAP" not in one.flags and pool & set(one.nodes)
    }
    active = [
        one.name for one in evidence.reservations if one.name in others and one.state == "ACTIVE"
    ]
    taken = {node for name in active for node in others[name]}
    there = any(one.name == ours for one in evidence.reservations)
    seen = f"ours ({ours}) is {'there' if there else 'not there'}"
    if not taken:
        coming = f", to come: {', '.join(sorted(others))}" if others else ""
        yield ok("reservations", f"{seen}, no other one on the pool's nodes now{coming}")
        return
    worse = fail if taken >= pool else warn
    yield worse(
        "reservations",
        f"{', '.join(sorted(active))}: {hostlist.compress(sorted(taken))}",
        "nothing is started on nodes that others have reserved",
        "wait for their end, delete them, or leave those nodes out of pool.nodes",
    )
