"""Checks of this machine for ``synergyctl check``: MUNGE, files, addresses. Slurm is not asked."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from slurm_synergy.cli.control import ENDPOINT_FILE
from slurm_synergy.config import ANY_HOST, Mode, Settings, parse_address
from slurm_synergy.core.wording import counted
from slurm_synergy.errors import DevClusterError, MungeError
from slurm_synergy.slurm.findings import Finding, fail, ok, warn

__all__ = ["machine_findings"]

_CONNECT_S = 3.0
_MIB = 1024 * 1024


def machine_findings(
    settings: Settings, environment: Mapping[str, str], *, slurm_conf: str, acts: bool = True
) -> Iterator[Finding]:
    """All findings on this machine; ``slurm_conf`` is where slurmctld reads slurm.conf."""
    yield from _munge(settings, environment)
    yield from _state_dir(settings.state_dir, settings.journal.max_mib * settings.journal.keep)
    yield from _lease_service(settings)
    yield from _names(settings)
    if slurm_conf:
        yield from _lua(Path(slurm_conf).parent, settings, acts)


def _munge(settings: Settings, environment: Mapping[str, str]) -> Iterator[Finding]:
    from slurm_synergy.controller.auth import Authenticator, munge_socket

    socket_path = munge_socket(settings.leases.munge.socket, environment)
    try:
        Authenticator(socket_path).check()
    except MungeError as err:
        yield fail(
            "munge",
            str(err),
            "no job and no synergyctl could be authenticated",
            "start munged here, with the cluster's key",
        )
        return
    where = socket_path or "its default socket"
    yield ok("munge", f"makes and checks credentials ({where})")


# files ---------------------------------------------------------------------------------------


def _state_dir(directory: Path, journal_mib: int) -> Iterator[Finding]:
    try:
        found = directory.stat()
        names = sorted(directory.iterdir())
        # The address of the lease service is published on purpose.
        open_files = [one.name for one in names if one.name != "endpoint" and _is_open(one)]
    except FileNotFoundError:
        yield ok("state_dir", f"{directory} is not there yet: made at the controller's first start")
        return
    except OSError as err:
        yield warn(
            "state_dir",
            f"{directory}: {err.strerror}",
            "it belongs to another user: this check cannot tell whether it is in order",
            "run the check as the controller's user or root",
        )
        return
    problems = []
    if found.st_mode & 0o077:
        problems.append(f"its mode is {found.st_mode & 0o777:04o}")
    if open_files:
        problems.append(f"others may read {', '.join(open_files)}")
    if found.st_uid not in (os.geteuid(), 0):
        problems.append(f"it belongs to user id {found.st_uid}, this check runs as {os.geteuid()}")
    if problems:
        yield warn(
            "state_dir",
            f"{directory}: {'; '.join(problems)}",
            "requests, names and progress of all users are in there",
            f"chown to the controller's user, chmod 0700 {directory} and 0600 its files",
        )
    else:
        yield ok("state_dir", f"{directory}: private, {counted(len(names), 'file')}")
    yield _room(directory, journal_mib)


def _is_open(path: Path) -> bool:
    return bool(path.lstat().st_mode & 0o077)


def _room(directory: Path, journal_mib: int) -> Finding:
    free_mib = shutil.disk_usage(directory).free // _MIB
    seen = f"{free_mib} MiB free for {directory}"
    if free_mib < 2 * journal_mib:
        return warn(
            "disk",
            seen,
            f"the journal may grow to {journal_mib} MiB; with a full disk nothing is started",
            "free some space, or lower journal.max_mib or journal.keep",
        )
    return ok("disk", seen)


def _lua(directory: Path, settings: Settings, acts: bool) -> Iterator[Finding]:
    """job_submit.lua and its settings, where they can be read from here."""
    from slurm_synergy.devcluster.programs import job_submit_source

    script, site = directory / "job_submit.lua", directory / "synergy_site.lua"
    try:
        installed = script.read_bytes()
        ours = job_submit_source().read_bytes()
    except (OSError, DevClusterError):
        return  # on another machine: the finding 'job_submit' tells whether it is in force
    if installed == ours:
        yield ok("lua_version", f"{script} is that of this release")
    elif b"synergy:v=" in installed:
        yield warn(
            "lua_version",
            f"{script} is not that of this release",
            "the controller may expect what that script does not do, or allow what it refuses",
            "copy etc/job_submit.lua of this release there (if it was changed: merge)",
        )
    try:
        text = site.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    text = "\n".join(line.split("--")[0] for line in text.splitlines())
    yield _site(site, text, settings, fail if acts else warn)


def _site(
    site: Path, text: str, settings: Settings, worse: Callable[[str, str, str, str], Finding]
) -> Finding:
    wanted = settings.slurm.partition
    match = re.search(r"\bpartition\"?\]?\s*=\s*[\"']([^\"']+)[\"']", text)
    named = match[1] if match else "synergy"
    if named != wanted:
        return worse(
            "lua_site",
            f"{site}: partition = {named!r}, slurm.partition is {wanted!r}",
            "jobs of the managed partition are not checked, marked and held",
            f"set partition = {wanted!r} there, and touch job_submit.lua",
        )
    uids = re.search(r"\boperators\"?\]?\s*=\s*\{([^}]*)\}", text)
    known = {int(one) for one in re.findall(r"\d+", uids[1])} if uids else set()
    if os.geteuid() not in known | {0}:
        return worse(
            "lua_site",
            f"{site}: operators lacks user id {os.geteuid()}",
            "job_submit.lua vetoes that user's changes of managed jobs, so a controller that runs "
            "as it cannot start any",
            f"add {os.geteuid()} to operators there, and touch job_submit.lua",
        )
    match = re.search(r"\bmode\"?\]?\s*=\s*[\"']([^\"']+)[\"']", text)
    mode = match[1] if match else "act"
    if (mode == "act") != (settings.mode is Mode.ACT):
        return worse(
            "lua_site",
            f"{site}: mode = {mode!r}, mode of the settings is {settings.mode.value!r}",
            "jobs are held, and nobody starts them"
            if mode == "act"
            else "jobs are neither checked nor held: Slurm starts them by itself",
            f"set mode = {settings.mode.value!r} there, and touch job_submit.lua",
        )
    return ok("lua_site", f"{site}: partition, operators and mode agree with the settings")


# addresses -----------------------------------------------------------------------------------


def _lease_service(settings: Settings) -> Iterator[Finding]:
    file = settings.state_dir / "endpoint"
    try:
        address = file.read_text(encoding="utf-8").strip()
        host, port = parse_address(address)
    except (OSError, ValueError):
        yield _address_to_be(settings.leases.listen)
        return
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as err:
        yield fail(
            "endpoint",
            f"nothing answers at {address} ({file}): {err}",
            "jobs cannot reach the controller: they run on with their floor sets",
            "start slurm-synergyd (it rewrites that file), or open the port in the firewall",
        )
        return
    yield ok("endpoint", f"the controller answers at {address}")
    yield from _published(address)


def _published(address: str) -> Iterator[Finding]:
    try:
        words = ENDPOINT_FILE.read_text(encoding="utf-8").split()
    except OSError:
        return
    told = next((word for word in words if not word.startswith("#")), "")
    if told and told != address:
        yield warn(
            "published",
            f"{ENDPOINT_FILE} says {told}, the controller serves {address}",
            "users' commands and jobs may ask in the wrong place",
            f"write {address} to {ENDPOINT_FILE} on every node",
        )


def _address_to_be(listen: str) -> Finding:
    host, port = parse_address(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
    except OSError as err:
        return warn(
            "endpoint",
            f"leases.listen = {listen} cannot be used here: {err.strerror or err}",
            "no controller runs with this state directory, and none could serve leases there",
            "run the check on the controller's machine, end what uses the port, or choose another",
        )
    return ok("endpoint", f"no controller runs here; {listen} is free for it")


def _names(settings: Settings) -> Iterator[Finding]:
    """The name by which jobs call the controller, as this machine resolves it."""
    listen, _ = parse_address(settings.leases.listen)
    advertised = settings.leases.advertise
    name = parse_address(advertised)[0] if advertised else listen
    if name in ANY_HOST:
        name = socket.gethostname()
    remedy = "set leases.advertise to HOST:PORT with a name that every node resolves"
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(name, None)}
    except OSError as err:
        yield fail("names", f"{name}: {err}", "jobs cannot find the controller", remedy)
        return
    if all(address.startswith("127.") or address == "::1" for address in found):
        yield warn(
            "names",
            f"jobs are told {name}, which is only this machine",
            "on other machines that is another machine, or none: only jobs here could call",
            f"{remedy}, and listen on an address that they reach",
        )
        return
    yield ok("names", f"{name} is {', '.join(sorted(found))}")
