"""Checks of slurm.conf and of the partition's record. Pure; see ``checks``."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slurm_synergy.config import EnforcementChoice, Settings
from slurm_synergy.core.wording import counted
from slurm_synergy.errors import ConfigError
from slurm_synergy.slurm.enforcing import choose_enforcement
from slurm_synergy.slurm.evidence import Evidence
from slurm_synergy.slurm.facts import ConfigFacts, PartitionFacts
from slurm_synergy.slurm.fields import as_null, parse_duration_s, parse_words
from slurm_synergy.slurm.findings import Finding, fail, ok, warn

__all__ = ["check_partition", "check_settings_of_slurm"]

_STOPPED_BY_LEASE = "85"
_LEAST_JOB_AGE_S = 10.0


def check_settings_of_slurm(
    evidence: Evidence, config: ConfigFacts, settings: Settings
) -> Iterator[Finding]:
    """What slurm.conf says for the whole cluster."""
    yield from _select(config)
    yield from _proctrack(config)
    yield from _requeue(config)
    yield from _append(config)
    yield from _timeouts(config, settings)
    yield from _privacy(config)
    yield from _preemption(evidence, config, settings)
    yield from _accounting(evidence, config)


def check_partition(
    config: ConfigFacts, partition: PartitionFacts, settings: Settings
) -> Iterator[Finding]:
    """The managed partition, and how cores can be handed out in it."""
    yield from _state(partition)
    yield from _cores(config, partition, settings)


# the cluster's configuration -----------------------------------------------------------------


def _select(config: ConfigFacts) -> Iterator[Finding]:
    parameters = ",".join(config.select_parameters)
    seen = f"SelectType={config.select_type}, SelectTypeParameters={parameters or '(none)'}"
    words = parameters.upper()
    if config.select_type != "select/cons_tres":
        yield fail(
            "select",
            seen,
            "GPUs and memory are not handed out one by one, so jobs cannot share a node",
            "set SelectType=select/cons_tres and SelectTypeParameters=CR_Core_Memory",
        )
    elif "MEMORY" not in words:
        yield fail(
            "select",
            seen,
            "Slurm does not count memory: jobs on one node could be given more than it has",
            "set SelectTypeParameters=CR_Core_Memory",
        )
    else:
        yield ok("select", seen)


def _proctrack(config: ConfigFacts) -> Iterator[Finding]:
    seen = f"ProctrackType={config.proctrack}"
    if config.proctrack == "proctrack/cgroup":
        yield ok("proctrack", seen)
        return
    yield warn(
        "proctrack",
        seen,
        "processes that leave a job's session survive it, and keep its GPUs busy unseen",
        "set ProctrackType=proctrack/cgroup",
    )


def _requeue(config: ConfigFacts) -> Iterator[Finding]:
    exits = {
        key: parse_words(config.raw.get(key, "")) for key in ("RequeueExit", "RequeueExitHold")
    }
    taken = [key for key, codes in exits.items() if _STOPPED_BY_LEASE in codes]
    if taken:
        yield warn(
            "requeue_exit",
            f"{taken[0]} has {_STOPPED_BY_LEASE}",
            "that is the exit status of a training that was stopped by lease; a script that ends "
            "with it is queued again by Slurm as well as by the controller",
            f"take {_STOPPED_BY_LEASE} off {taken[0]}",
        )
    if config.job_requeue:
        yield ok("requeue", "JobRequeue=1")
        return
    yield warn(
        "requeue",
        "JobRequeue=0",
        "jobs are not requeueable unless they ask for it; job_submit.lua asks for managed ones, "
        "jobs that came past it end when their node fails",
        "set JobRequeue=1",
    )


def _append(config: ConfigFacts) -> Iterator[Finding]:
    if config.raw.get("JobFileAppend") == "1":
        yield ok("append", "JobFileAppend=1")
        return
    yield warn(
        "append",
        f"JobFileAppend={config.raw.get('JobFileAppend', '0')}",
        "a job that is stopped and resumed loses the output of its earlier runs, unless submitted "
        "with --open-mode=append",
        "set JobFileAppend=1",
    )


def _timeouts(config: ConfigFacts, settings: Settings) -> Iterator[Finding]:
    message_s = _seconds(config, "MessageTimeout")
    longest_s = settings.slurm.command_timeout_s
    if message_s is not None and longest_s <= 2 * message_s:
        # Measured: commands give up after about twice MessageTimeout when slurmctld is gone.
        yield warn(
            "timeouts",
            f"MessageTimeout={message_s:g} s, slurm.command_timeout_s={longest_s:g}",
            "commands are ended before they could say what is wrong, or while a busy slurmctld "
            "still works on them",
            f"set slurm.command_timeout_s to more than {2 * message_s:g}",
        )
    age_s = _seconds(config, "MinJobAge")
    if age_s is not None and age_s < max(_LEAST_JOB_AGE_S, 3 * settings.scheduling.poll_s):
        yield warn(
            "job_age",
            f"MinJobAge={age_s:g} s",
            "Slurm forgets a finished job before the controller has looked again, which costs it "
            "a question about each of them",
            "leave MinJobAge at its default of 300",
        )
    yield ok(
        "kill_wait",
        f"KillWait={config.kill_wait_s:g} s, grace_s={settings.scheduling.grace_s:g}",
        "a stopped job has the grace to checkpoint, before Slurm's own end of it takes KillWait",
    )


def _seconds(config: ConfigFacts, key: str) -> float | None:
    text = config.raw.get(key)
    return parse_duration_s(text, key) if text else None


def _privacy(config: ConfigFacts) -> Iterator[Finding]:
    hidden = set(parse_words(config.raw.get("PrivateData", ""))) & {
        *("jobs", "nodes", "partitions", "reservations")
    }
    if hidden:
        yield warn(
            "privacy",
            f"PrivateData={','.join(sorted(hidden))}",
            "only operators see all jobs and nodes: a controller that is none would take the "
            "hidden ones for gone",
            "run the controller as root, SlurmUser or an operator (see the finding 'rights')",
        )


def _preemption(evidence: Evidence, config: ConfigFacts, settings: Settings) -> Iterator[Finding]:
    kind = config.raw.get("PreemptType", "")
    if as_null(kind) is None or kind == "preempt/none":
        yield ok("preemption", "PreemptType=preempt/none")
        return
    if evidence.partition_raw.get("PreemptMode") == "OFF":
        yield ok("preemption", f"PreemptType={kind}, but the partition has PreemptMode=OFF")
        return
    yield warn(
        "preemption",
        f"PreemptType={kind}, PreemptMode={config.raw.get('PreemptMode', '')}",
        "Slurm may end managed jobs for those of a higher partition or QOS, without the grace to "
        "checkpoint that the controller gives",
        f"set PreemptMode=OFF on partition {settings.slurm.partition}, or keep other partitions "
        "off its nodes",
    )


# the partition -------------------------------------------------------------------------------


def _state(partition: PartitionFacts) -> Iterator[Finding]:
    if partition.state == "UP":
        yield ok("partition", f"{partition.name}: up, {counted(len(partition.nodes), 'node')}")
    else:
        yield fail(
            "partition",
            f"{partition.name} is {partition.state}",
            "Slurm starts no job in it",
            f"scontrol update PartitionName={partition.name} State=UP",
        )


def _cores(config: ConfigFacts, partition: PartitionFacts, settings: Settings) -> Iterator[Finding]:
    """How cores can be handed out: OverSubscribe, TaskPlugin, ConstrainCores."""
    word, most = partition.oversubscribe
    seen = f"OverSubscribe={word}" + (f":{most}" if word == "FORCE" else "")
    if word == "FORCE":
        yield ok("oversubscribe", seen, "running jobs can trade cores in place")
    else:
        shared = settings.enforcement is EnforcementChoice.SHARED
        yield (fail if shared else warn)(
            "oversubscribe",
            f"{seen}, enforcement: {settings.enforcement.value}",
            "jobs cannot be allocated the same cores, so sharing them in place is not possible "
            "by this partition",
            f"set OverSubscribe=FORCE:N on partition {partition.name}, N the GPUs of its largest "
            "node; or stay with another enforcement",
        )
    try:
        helpers = settings.pool.node_helpers
        chosen = choose_enforcement(settings.enforcement, partition, config, node_helpers=helpers)
    except ConfigError as err:
        what = "the controller refuses to start with that"
        yield fail(
            "enforcement", f"enforcement: {settings.enforcement}: {err.what}", what, err.remedy
        )
    else:
        asked = settings.enforcement.value
        yield ok(
            "enforcement", f"enforcement: {asked}, works as {chosen.enforcement.value}", chosen.why
        )
    plugins = ",".join(config.task_plugins) or "task/none"
    constrained = config.raw.get("ConstrainCores", "").lower()
    seen = f"TaskPlugin={plugins}" + (f", ConstrainCores={constrained}" if constrained else "")
    if not config.task_plugins:
        yield warn(
            "task_plugin",
            seen,
            "Slurm binds no task to cores: jobs that do not run under synergy-srun use all cores "
            "of their node",
            "set TaskPlugin=task/affinity,task/cgroup",
        )
    elif constrained == "yes" and word != "FORCE":
        yield warn(
            "task_plugin",
            seen,
            "jobs are confined to the cores that Slurm gave them, so only a restart can give them "
            "more (enforcement: requeue)",
            f"set OverSubscribe=FORCE:N on partition {partition.name}",
        )
    else:
        yield ok("task_plugin", seen, "synergy-srun pins inside what Slurm allows")


def _accounting(evidence: Evidence, config: ConfigFacts) -> Iterator[Finding]:
    storage = config.raw.get("AccountingStorageType", "")
    if as_null(storage) is None or storage.endswith("/none"):
        yield ok("accounting", "no accounting storage", "no billing, no limits by account")
        return
    tres = parse_words(config.raw.get("AccountingStorageTRES", ""))
    if not any(word.startswith("gres/gpu") for word in tres):
        yield warn(
            "accounting",
            f"AccountingStorageTRES={','.join(tres)}",
            "accounting does not know GPUs, so neither can they be billed or limited, nor can "
            "'synergyctl simulate' learn from sacct",
            "add gres/gpu to AccountingStorageTRES",
        )
    else:
        yield ok("accounting", f"AccountingStorageTRES={','.join(tres)}")
    yield _billing(evidence.partition_raw.get("TRESBillingWeights", ""))


def _billing(weights: str) -> Finding:
    words = {
        key.strip().lower(): value
        for key, _, value in (item.partition("=") for item in weights.split(","))
    }
    seen = f"TRESBillingWeights={weights or '(none)'}"
    costs_cores = not weights or _is_positive(words.get("cpu", "0"))
    if costs_cores:
        return warn(
            "billing",
            seen,
            "managed jobs are allocated all cores of their nodes and are billed for them, however "
            "many they use",
            'bill GPUs: TRESBillingWeights="GRES/gpu=1.0" on the partition',
        )
    return ok("billing", seen)


def _is_positive(text: str) -> bool:
    match = re.match(r"[0-9.]+", text)
    return match is not None and float(match[0] if match[0].strip(".") else 0) > 0
