"""Who is calling: MUNGE credentials, checked with ``unmunge``, and the list of operators.

A credential is good once (munged refuses to decode it again), for a few minutes, and only for the
one call that its payload names.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from slurm_synergy.errors import ConfigError, LeaseError, MungeError

__all__ = [
    "MAX_CREDENTIAL_BYTES",
    "Authenticator",
    "control_payload",
    "encode_credential",
    "munge_socket",
    "new_nonce",
    "node_leases_payload",
    "node_request_payload",
    "operator_uids",
    "register_payload",
]

MAX_CREDENTIAL_BYTES = 4096
_MIN_NONCE, _MAX_NONCE = 16, 128
_TIMEOUT_S = 10.0
# unmunge's exit statuses from here on are about the credential, those below about munge itself.
_FIRST_BAD_CREDENTIAL = 8
_TOOLS_PATH = "/usr/bin:/usr/local/bin:/bin:/opt/munge/bin"


def register_payload(job_id: int, restart_count: int, rank: int, nonce: str) -> str:
    """What the credential of a Register call must say."""
    return f"synergy-register:{job_id}:{restart_count}:{rank}:{nonce}"


def control_payload(nonce: str, body: str = "") -> str:
    """What the credential of a control call must say; a body is part of it."""
    digest = f":{hashlib.sha256(body.encode()).hexdigest()}" if body else ""
    return f"synergy-control:{nonce}{digest}"


def node_request_payload(node: str, nonce: str) -> str:
    """What the credential of a node helper's call must say."""
    return f"synergy-node:{node}:{nonce}"


def node_leases_payload(node: str, nonce: str, content: bytes) -> str:
    """What the controller's credential over its answer to that call must say."""
    return f"synergy-node-leases:{node}:{nonce}:{hashlib.sha256(content).hexdigest()}"


def new_nonce(purpose: str = "") -> str:
    """A nonce that nobody can guess; ``purpose`` (a method's name) becomes its visible prefix."""
    return f"{purpose}-{secrets.token_hex(16)}" if purpose else secrets.token_hex(16)


def munge_socket(setting: Path | None, environment: Mapping[str, str]) -> Path | None:
    """munged's socket: ``leases.munge.socket``, else SYNERGY_MUNGE_SOCKET, else None (default)."""
    named = environment.get("SYNERGY_MUNGE_SOCKET")
    return setting or (Path(named) if named else None)


class Authenticator:
    """Decodes credentials through the munged behind ``socket`` (None: munge's default one).

    Raises MungeError where MUNGE is not installed.
    """

    def __init__(self, socket: Path | None = None) -> None:
        self._socket = socket
        self._argv = [_tool("unmunge"), "--keys=STATUS,UID", *_socket(socket)]

    def check(self) -> None:
        """Make a credential and decode it. Raises MungeError, with the remedy, if that fails."""
        nonce = new_nonce("check")
        try:
            credential = encode_credential(control_payload(nonce), self._socket)
            self.uid_of(credential, payload=control_payload(nonce), nonce=nonce)
        except LeaseError as err:
            raise MungeError(
                f"munge cannot be used, so no job could be authenticated: {err}; start munged on "
                "this machine, and set leases.munge.socket (or SYNERGY_MUNGE_SOCKET) to its socket "
                f"(now: {self._socket or 'the default of munge'})"
            ) from err

    def sign(self, payload: str) -> str:
        """A credential of this process over ``payload``. Raises MungeError."""
        return encode_credential(payload, self._socket)

    def uid_of(self, credential: str, *, payload: str, nonce: str) -> int:
        """The user id that made ``credential``, which must say exactly ``payload``.

        Raises LeaseError for a credential that is malformed, expired, used before, or made for
        another call; MungeError when munged, here on the controller's host, does not check it.
        """
        if not _MIN_NONCE <= len(nonce) <= _MAX_NONCE or not nonce.isascii():
            raise LeaseError(f"a nonce has {_MIN_NONCE} to {_MAX_NONCE} ASCII characters")
        if not credential.startswith("MUNGE:") or len(credential) > MAX_CREDENTIAL_BYTES:
            raise LeaseError("that is not a MUNGE credential")
        try:
            done = _run(self._argv, credential)
        except MungeError as err:
            raise MungeError(f"the controller could not check the credential: {err}") from err
        head, _, body = done.stdout.partition("\n\n")
        fields = dict(line.split(":", 1) for line in head.splitlines() if ":" in line)
        if done.returncode != 0:
            # A credential that decodes but is not good has its reason in STATUS only.
            why = fields.get("STATUS") or done.stderr.removeprefix("unmunge: Error: ")
            why = why.strip() or head
            if done.returncode < _FIRST_BAD_CREDENTIAL:
                raise MungeError(f"the controller could not check the credential: {why}")
            raise LeaseError(f"the MUNGE credential is not accepted by the controller: {why}")
        if not secrets.compare_digest(body.encode(), payload.encode()):
            raise LeaseError("the MUNGE credential was made for another call")
        uid = re.search(r"\((\d+)\)\s*$", fields.get("UID", ""))
        if uid is None:
            raise MungeError(
                f"the controller could not check the credential: no user id in {head!r}"
            )
        return int(uid.group(1))


def encode_credential(payload: str, socket: Path | None = None) -> str:
    """A fresh credential of this user. Raises MungeError when munged does not answer."""
    done = _run([_tool("munge"), "--no-input", "--string", payload, *_socket(socket)], "")
    if done.returncode != 0:
        raise MungeError(
            f"munge made no credential: {done.stderr.strip()}; is munged running, and is "
            "SYNERGY_MUNGE_SOCKET (or leases.munge.socket) its socket?"
        )
    return done.stdout.strip()


def operator_uids(operators: Iterable[str | int]) -> frozenset[int]:
    """User ids of the configured operators; root always is one. Raises ConfigError."""
    uids = {0}
    for operator in operators:
        if isinstance(operator, int) or operator.isdigit():
            uids.add(int(operator))
            continue
        try:
            uids.add(pwd.getpwnam(operator).pw_uid)
        except KeyError as err:
            raise ConfigError(
                "there is no such user here",
                key="operators",
                value=operator,
                remedy="name existing users or give numeric user ids",
            ) from err
    return frozenset(uids)


def _socket(socket: Path | None) -> list[str]:
    return [f"--socket={socket}"] if socket is not None else []


def _tool(name: str) -> str:
    found = shutil.which(name, path=_TOOLS_PATH) or shutil.which(name)
    if found is None:
        raise MungeError(f"the command {name} is not installed: install MUNGE")
    return found


def _run(argv: list[str], text: str) -> subprocess.CompletedProcess[str]:
    environment = {"LC_ALL": "C", "PATH": os.environ.get("PATH", _TOOLS_PATH)}
    try:
        return subprocess.run(
            argv,
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as err:
        raise MungeError(f"{argv[0]} gave no answer within {_TIMEOUT_S:g} s") from err
    except OSError as err:
        raise MungeError(f"{argv[0]} could not be run: {err}") from err
