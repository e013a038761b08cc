"""``synergy-srun``: srun whose tasks run under the launcher, with stale variables cleaned.

Standard library only, because a job with a thousand tasks starts it from a shared file system.
Everything that srun understands is passed on as it stands.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_synergy.errors import LeaseError
from slurm_synergy.jobside import environment, process, trouble
from slurm_synergy.jobside.environment import ENDPOINT_FILE, LEASE_STOP_EXIT
from slurm_synergy.jobside.private import command_number

__all__ = ["HELP", "Invocation", "main", "parse", "srun_options"]

_REQUEUE_WAIT_S = 120.0
_MAX_RERUNS = 3
_LOOK_AGAIN_S = 10.0
# A slurmd that is restarted is back within these.
_LAUNCH_PAUSES_S = (3.0, 10.0, 20.0, 40.0)
_REFUSED_PAUSE_S = 3.0
# Nodes report to a new slurmctld within these. An srun that comes before finds them busy, and asks
# again after two minutes (seen with 22.05).
_REPORT_PAUSE_S = 5.0
_PLAIN_ERROR = 1  # srun's own
_USAGE = 2

HELP = """\
usage: synergy-srun [srun options] [synergy options] [--] command [arguments]

Runs a training command in a Slurm job under slurm-synergy. All options of srun are passed on.
Added where you did not choose yourself: -N and -n of the whole allocation, -c with all cores of the
node divided by its tasks, --kill-on-bad-exit=1, and --cpu-bind=none with several tasks on a node.
Every task sees all GPUs that the job has on its node. Outside a job the command runs directly.

synergy options:
  --synergy-help        this text (also --help; srun's own: srun --help)
  --synergy-dry-run     print the srun command instead of running it
  --synergy-no-inject   leave the program's data loaders alone (same as SYNERGY_INJECT=0)

environment:
  SYNERGY_ENDPOINT          controller, host:port (default: the first line of
                            /etc/slurm-synergy/endpoint); without one the command just runs
  SYNERGY_CHECKPOINT_DIR    checkpoints of this job (default: the hint ckpt_dir, or
                            synergy-checkpoints/JOBID in SYNERGY_CHECKPOINT_ROOT or in the
                            directory of the submission; JOBID.2, JOBID.3, ... for further
                            commands of one script)
  SYNERGY_STOP_SIGNAL       signal that makes your program save and exit, for programs without our
                            data loader, e.g. USR1; without it they are sent TERM
  SYNERGY_REQUEUE_WAIT_S    how long to wait for the requeue after a stop (default 120)
  OMP_NUM_THREADS, CUDA_DEVICE_ORDER, and with several tasks MASTER_ADDR and MASTER_PORT
                            are filled in if unset

exit status: the command's own. 85 is reserved: stopped by the scheduler, to be continued. The
wrapper then waits for the requeue, and continues in place when none comes.
"""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What srun's options take: an argument of their own, an optional one behind "=", or none.
_SHORT_WITH_ARGUMENT = frozenset("AbBcCdDeFGiJLmMnNopqrStTwWx")
_SHORT_OPTIONAL = frozenset("IKk")
_LONG_WITH_ARGUMENT = _words(
    """
    account acctg-freq bb bbf bcast-exclude begin chdir cluster-constraint clusters comment
    constraint container container-id core-spec cores-per-socket cpu-bind cpu-freq cpus-per-gpu
    cpus-per-task deadline delay-boot dependency distribution epilog error exclude export extra
    extra-node-info gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres
    gres-flags het-group hint input job-name jobid licenses mail-type mail-user max-threads
    mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus mpi network nodefile nodelist nodes
    ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket ntasks-per-tres
    open-mode output partition power prefer priority profile prolog qos relative reservation
    segment signal slurmd-debug sockets-per-node switches task-epilog task-prolog thread-spec
    threads threads-per-core time time-min tmp tree-width tres-bind tres-per-task treewidth wait
    wckey
    """
)
_LONG_OTHER = _words(
    """
    autocomplete bcast bell compress consolidate-segments contiguous disable-status exact
    exclusive external get-user-env help hold immediate interactive kill-on-bad-exit label
    multi-prog nice no-allocate no-bell no-kill no-requeue oom-kill-step overcommit overlap
    oversubscribe preserve-env propagate pty quiet quit-on-interrupt reboot requeue resv-ports
    send-libs share spread-job stepmgr unbuffered usage use-min-nodes verbose version
    wait-for-children whole x11
    """
)
_SHORT_NAMES = {
    "n": "ntasks", "N": "nodes", "c": "cpus-per-task", "K": "kill-on-bad-exit", "h": "help",
    "V": "version", "F": "nodefile", "r": "relative", "w": "nodelist",
}  # fmt: skip
_SHAPING = _words("ntasks ntasks-per-node nodelist nodefile relative het-group")
# Runs "from slurm_synergy..." whatever the current directory and PYTHONPATH contain.
_BOOT = (
    "import sys; root = sys.argv.pop(1); root in sys.path or sys.path.insert(0, root); "
    "from slurm_synergy.jobside.launch import main; sys.exit(main())"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """A parsed command line. ``given`` maps long names of srun options to their values."""

    own: frozenset[str]
    options: tuple[str, ...]
    given: Mapping[str, str]
    command: tuple[str, ...]


def parse(argv: Sequence[str]) -> Invocation:
    """Split ``argv`` where srun would: at the first word that is neither option nor argument.

    Unknown long options pass as srun's, without an argument of their own.
    """
    own: set[str] = set()
    options: list[str] = []
    given: dict[str, str] = {}
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        if word.startswith("--synergy-"):
            own.add(word)
            continue
        name, value, wants_more = _long(word) if word.startswith("--") else _short(word, given)
        options.append(word)
        if wants_more and rest:
            value = rest.pop(0)
            options.append(value)
        given[name] = value
    return Invocation(own=frozenset(own), options=tuple(options), given=given, command=tuple(rest))


def _long(word: str) -> tuple[str, str, bool]:
    name, equals, value = word[2:].partition("=")
    known = _LONG_WITH_ARGUMENT | _LONG_OTHER
    if name not in known:
        # getopt accepts any unambiguous beginning of a name.
        longer = [full for full in known if full.startswith(name)]
        if len(longer) == 1:
            name = longer[0]
    return name, value, name in _LONG_WITH_ARGUMENT and not equals


def _short(word: str, given: dict[str, str]) -> tuple[str, str, bool]:
    for at, letter in enumerate(word[1:], start=1):
        name = _SHORT_NAMES.get(letter, letter)
        if letter in _SHORT_WITH_ARGUMENT:
            return name, word[at + 1 :], at + 1 == len(word)
        if letter in _SHORT_OPTIONAL:
            return name, word[at + 1 :], False
        given[name] = ""
    return name, "", False


def srun_options(
    invocation: Invocation, env: Mapping[str, str], *, binds_cpus: bool
) -> tuple[list[str], tuple[str, ...]]:
    """The options to add for this allocation, and the variables to remove from srun's environment.

    ``binds_cpus`` tells whether this Slurm can bind tasks to CPUs (else --cpu-bind only warns).
    """
    given = invocation.given
    nodes = given.get("nodes", "")
    own_nodes = int(nodes) if nodes.isdigit() else None
    added: list[str] = []
    shape = environment.step_shape(env, nodes=own_nodes)
    # With only a part of the shape given by the user the rest is a matter between him and srun.
    whole = _SHAPING.isdisjoint(given) and (not nodes or own_nodes is not None)
    if whole:
        added += [] if nodes else [f"--nodes={shape.nodes}"]
        added.append(f"--ntasks={shape.tasks}")
    per_task = 0
    if not {"cpus-per-task", "cpus-per-gpu", "exact", "overlap"} & set(given):
        per_task = _cpus_per_task(invocation, env, shape, own_nodes)
        if per_task:
            added.append(f"--cpus-per-task={per_task}")
    if "kill-on-bad-exit" not in given and "SLURM_KILL_BAD_EXIT" not in env:
        added.append("--kill-on-bad-exit=1")
    several = not (whole and shape.max_tasks_per_node == 1)
    if binds_cpus and several and "cpu-bind" not in given and "SLURM_CPU_BIND" not in env:
        added.append("--cpu-bind=none")
    return added, environment.stale_variables(env, per_task)


def _cpus_per_task(
    invocation: Invocation,
    env: Mapping[str, str],
    shape: environment.StepShape,
    own_nodes: int | None,
) -> int:
    if "SRUN_CPUS_PER_TASK" in env:
        return 0
    given = invocation.given
    node_cpus = shape.cpus_per_task * shape.max_tasks_per_node
    per_node, tasks = given.get("ntasks-per-node", ""), given.get("ntasks", "")
    if per_node.isdigit() and int(per_node):
        return node_cpus // int(per_node)
    if tasks.isdigit() and int(tasks):
        nodes = own_nodes or min(shape.nodes, int(tasks))
        return node_cpus // -(-int(tasks) // nodes)
    return shape.cpus_per_task


def _binds_cpus(env: Mapping[str, str]) -> bool:
    """Whether slurm.conf, where readable, loads a task plugin that can bind; True if unknown."""
    for name in (env.get("SLURM_CONF"), "/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf"):
        if not name or not Path(name).is_file():
            continue
        try:
            text = Path(name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return True
        settings = [line.partition("#")[0].strip().lower() for line in text.splitlines()]
        return any(
            line.startswith("taskplugin=") and "none" not in line.partition("=")[2]
            for line in settings
        )
    return True


def _say(text: str) -> None:
    sys.stderr.write(f"synergy-srun: {text}\n")
    sys.stderr.flush()


def _launcher() -> list[str]:
    root = str(Path(__file__).resolve().parents[2])
    # -E -P: the user's PYTHONPATH and current directory are for the user's program.
    return [sys.executable, "-E", "-P", "-c", _BOOT, root, "--"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``synergy-srun``; returns the exit status."""
    invocation = parse(sys.argv[1:] if argv is None else argv)
    known = {"--synergy-help", "--synergy-dry-run", "--synergy-no-inject"}
    unknown = sorted(invocation.own - known)
    if unknown:
        _say(f"unknown option {unknown[0]}; known are {', '.join(sorted(known))}")
        return _USAGE
    if "--synergy-help" in invocation.own or "help" in invocation.given:
        sys.stdout.write(HELP)
        return 0
    env = dict(os.environ)
    if "--synergy-no-inject" in invocation.own:
        env["SYNERGY_INJECT"] = "0"
    asks_srun = not {"version", "usage"}.isdisjoint(invocation.given)
    if asks_srun or invocation.given.get("cpu-bind") == "help":
        return _exec(["srun", *invocation.options, *invocation.command], env)
    if not invocation.command:
        _say("no command given; try synergy-srun --help")
        return _USAGE
    if not env.get("SLURM_JOB_ID"):
        ignored = f", ignoring {' '.join(invocation.options)}" if invocation.options else ""
        _say(f"not inside a Slurm job: running {invocation.command[0]} directly{ignored}")
        return _exec([*_launcher(), *invocation.command], env)
    return _in_job(invocation, env)


def _exec(argv: Sequence[str], env: Mapping[str, str]) -> int:
    program = process.find_program(argv[0], env.get("PATH", os.defpath))
    try:
        os.execve(program, list(argv), env)
    except OSError as err:
        _say(f"cannot run {argv[0]}: {err.strerror}")
        return process.spawn_exit_code(err)


def _in_job(invocation: Invocation, env: dict[str, str]) -> int:
    if "multi-prog" in invocation.given:
        _say("--multi-prog has no single command to wrap: plain srun, without leases")
        return _exec(["srun", *invocation.options, *invocation.command], env)
    added, stale = srun_options(invocation, env, binds_cpus=_binds_cpus(env))
    for name in stale:
        del env[name]
    if "cpu-bind" in invocation.given or "SLURM_CPU_BIND" in env:
        env["SYNERGY_KEEP_BINDING"] = "1"  # its user's choice
    env.setdefault(trouble.ERROR_EXIT_VARIABLE, str(trouble.ERROR_EXIT))
    argv = ["srun", *invocation.options, *added, *_launcher(), *invocation.command]
    if "--synergy-dry-run" in invocation.own:
        import shlex

        sys.stdout.write(f"env {' '.join(f'-u {name}' for name in stale)} {shlex.join(argv)}\n")
        return 0
    _separate_checkpoints(invocation, env)
    own_input = {"input", "i"}.isdisjoint(invocation.given)
    rewind = _input_rewinder() if own_input else lambda: True
    return process.exit_like(_run_until_done(argv, env, rewind))


def _separate_checkpoints(invocation: Invocation, env: dict[str, str]) -> None:
    """Give the further commands of a script places of their own: one must not load another's."""
    cwd = env.get("PWD", "")
    number = command_number(env, "\0".join((cwd, *invocation.options, *invocation.command)))
    if number > 1 and not env.get("SYNERGY_CHECKPOINT_DIR"):
        env["SYNERGY_CHECKPOINT_DIR"] = environment.checkpoint_dir(env, cwd, command=number)


def _input_rewinder() -> Callable[[], bool]:
    """A function that makes our input readable anew from here; it is False where none can."""
    try:
        kind = os.fstat(0).st_mode
        begin = os.lseek(0, 0, os.SEEK_CUR) if stat.S_ISREG(kind) else 0
    except OSError:
        return lambda: True  # closed: nothing to read
    if stat.S_ISREG(kind):
        return lambda: os.lseek(0, begin, os.SEEK_SET) == begin
    # A terminal or /dev/null; srun has read a pipe, as of a here-document, to its end.
    return lambda: stat.S_ISCHR(kind)


def _run_until_done(argv: Sequence[str], env: Mapping[str, str], rewind: Callable[[], bool]) -> int:
    wait_s = _requeue_wait_s(env)
    mask = process.block_signals()
    reruns, pauses_s, refused = 0, list(_LAUNCH_PAUSES_S), False
    while True:
        try:
            code, terminated = _run_once(argv, env, mask)
        except OSError as err:
            _say(f"cannot run {argv[0]}: {err.strerror}")
            return process.spawn_exit_code(err)
        if code and not terminated and _has_controller(env) and trouble.lacks_gpus(env):
            _say(
                "Slurm started this job without its GPUs, as it may right after a restart of "
                "slurmctld: waiting for the requeue"
            )
            _requeued_within(wait_s)
            return code
        if trouble.is_slurm_error(code, env):
            answers = trouble.answers(env)
            # What is refused twice by a Slurm that answers is wrong, and stays so.
            if (
                terminated
                or (refused and answers)
                or not rewind()
                or _requeued_meanwhile(env, answers)
            ):
                return _PLAIN_ERROR
            refused |= answers
            continue
        if trouble.is_launch_error(code) and not terminated:
            if not pauses_s or trouble.has_steps(env) or not rewind():
                return code
            pause_s = pauses_s.pop(0)
            _say(f"Slurm could not launch the tasks (see above); trying again in {pause_s:g} s")
            if _requeued_within(pause_s):
                return code
            continue
        if code != LEASE_STOP_EXIT or terminated or not _has_controller(env):
            return code
        # Returning now would let the batch script go on and complete the job, losing its rest.
        if _requeued_within(wait_s) or reruns == _MAX_RERUNS:
            return code
        if _requeued_before(lambda: _obstacle(env, rewind)):
            return code
        reruns += 1
        _say(f"stopped, but not requeued within {wait_s:g} s: continuing here from the checkpoint")


def _requeued_meanwhile(env: Mapping[str, str], answers: bool) -> bool:
    """Wait before srun is tried again; True when the job is requeued meanwhile."""
    if answers:
        _say(f"srun failed before the tasks began (see above); once more in {_REFUSED_PAUSE_S:g} s")
        return _requeued_within(_REFUSED_PAUSE_S)
    _say("Slurm does not answer, so srun cannot start the tasks: waiting for it")
    while not trouble.answers(env):
        if _requeued_within(_LOOK_AGAIN_S):
            return True
    return _requeued_within(_REPORT_PAUSE_S)


def _obstacle(env: Mapping[str, str], rewind: Callable[[], bool]) -> str:
    """Why the command cannot run again in place now; empty when it can."""
    if not rewind():
        return "its input is a pipe, which cannot be read again"
    return "" if trouble.answers(env) else "Slurm does not answer"


def _requeued_before(obstacle: Callable[[], str]) -> bool:
    """Wait until nothing is in the way of running again; True when the requeue comes first."""
    said = ""
    while why := obstacle():
        if why != said:
            _say(f"stopped, not requeued, and {why}: waiting on for the requeue")
            said = why
        if _requeued_within(_LOOK_AGAIN_S):
            return True
    return False


def _requeue_wait_s(env: Mapping[str, str]) -> float:
    text = env.get("SYNERGY_REQUEUE_WAIT_S", "")
    try:
        wait_s = float(text) if text else _REQUEUE_WAIT_S
    except ValueError:
        wait_s = -1.0
    if 0 <= wait_s < 1e6:
        return wait_s
    _say(f"SYNERGY_REQUEUE_WAIT_S = {text!r} is no number of seconds; using {_REQUEUE_WAIT_S:g}")
    return _REQUEUE_WAIT_S


def _has_controller(env: Mapping[str, str]) -> bool:
    try:
        text = Path(ENDPOINT_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    try:
        return bool(environment.endpoint_from(env, text, ENDPOINT_FILE))
    except LeaseError:
        return False


def _run_once(argv: Sequence[str], env: Mapping[str, str], mask: set[int]) -> tuple[int, bool]:
    """Run srun to its end, passing signals on; (exit status, whether TERM came meanwhile)."""
    child = process.spawn(argv, env, mask)
    terminated = False
    while True:
        info = process.fetch_signal(3600.0)
        code = process.reap(child)
        if code is not None:
            return code, terminated or _requeued_within(0.0)
        if info is None or info.si_signo == signal.SIGCHLD:
            continue
        terminated |= info.si_signo == signal.SIGTERM
        if not _srun_has_it(info):
            os.kill(child, info.si_signo)


def _srun_has_it(info: signal.struct_siginfo) -> bool:
    if process.sent_by_terminal(info):
        return True
    # slurmstepd signals the whole step; only its direct child may have been meant alone.
    return info.si_pid != os.getppid() and process.sent_by_slurmstepd(info)


def _requeued_within(wait_s: float) -> bool:
    deadline_s = time.monotonic() + wait_s
    while True:
        left_s = deadline_s - time.monotonic()
        info = process.fetch_signal(left_s)
        if info is not None and info.si_signo in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            return True
        if info is None and left_s <= 0:
            return False


if __name__ == "__main__":
    sys.exit(main())
