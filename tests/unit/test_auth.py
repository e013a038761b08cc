"""Credentials, checked by a real munged."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from slurm_synergy.controller.auth import (
    Authenticator,
    control_payload,
    encode_credential,
    new_nonce,
    operator_uids,
    register_payload,
)
from slurm_synergy.controller.auth import munge_socket as find_socket
from slurm_synergy.errors import ConfigError, LeaseError, MungeError


def test_a_credential_tells_who_made_it_once(munge_socket: Path) -> None:
    nonce = new_nonce()
    payload = register_payload(1, 0, 2, nonce)
    credential = encode_credential(payload, munge_socket)
    authenticator = Authenticator(munge_socket)
    assert authenticator.uid_of(credential, payload=payload, nonce=nonce) == os.getuid()
    with pytest.raises(LeaseError, match="Replayed credential"):
        authenticator.uid_of(credential, payload=payload, nonce=nonce)


def test_a_credential_is_bound_to_its_call(munge_socket: Path) -> None:
    nonce = new_nonce()
    credential = encode_credential(register_payload(1, 0, 2, nonce), munge_socket)
    with pytest.raises(LeaseError, match="another call"):
        Authenticator(munge_socket).uid_of(
            credential, payload=register_payload(1, 0, 3, nonce), nonce=nonce
        )


def test_a_payload_with_line_breaks_is_compared_whole(munge_socket: Path) -> None:
    payload = "a\n\nb\n"
    credential = encode_credential(payload, munge_socket)
    uid = Authenticator(munge_socket).uid_of(credential, payload=payload, nonce="n" * 20)
    assert uid == os.getuid()


@pytest.mark.parametrize(
    ("credential", "nonce", "why"),
    [
        ("", "n" * 20, "not a MUNGE credential"),
        ("AUTH:x", "n" * 20, "not a MUNGE credential"),
        ("MUNGE:" + "A" * 5000, "n" * 20, "not a MUNGE credential"),
        ("MUNGE:AAAA:", "n" * 20, "not accepted"),
        ("MUNGE:AAAA:", "short", "a nonce has 16 to 128"),
        ("MUNGE:AAAA:", "é" * 20, "ASCII"),
    ],
)
def test_what_is_no_credential_is_refused(
    munge_socket: Path, credential: str, nonce: str, why: str
) -> None:
    with pytest.raises(LeaseError, match=why):
        Authenticator(munge_socket).uid_of(credential, payload="p", nonce=nonce)


def test_a_silent_munged_is_named(tmp_path: Path) -> None:
    with pytest.raises(LeaseError, match="is munged running"):
        encode_credential("p", tmp_path / "none")
    with pytest.raises(MungeError, match=r"^the controller could not check the credential.*none"):
        Authenticator(tmp_path / "none").uid_of("MUNGE:AAAA:", payload="p", nonce="n" * 20)


def test_a_munge_that_cannot_be_used_is_found_at_the_start(
    munge_socket: Path, tmp_path: Path
) -> None:
    Authenticator(munge_socket).check()
    with pytest.raises(MungeError, match=r"start munged .*leases\.munge\.socket.*none\)$"):
        Authenticator(tmp_path / "none").check()


def test_the_setting_goes_before_the_variable_and_both_before_munges_default() -> None:
    environment = {"SYNERGY_MUNGE_SOCKET": "/run/env"}
    assert find_socket(Path("/run/set"), environment) == Path("/run/set")
    assert find_socket(None, environment) == Path("/run/env")
    assert find_socket(None, {"SYNERGY_MUNGE_SOCKET": ""}) is None


def test_nonces_differ_and_carry_their_purpose() -> None:
    assert new_nonce() != new_nonce()
    assert new_nonce("drain").startswith("drain-")
    assert control_payload("x") == "synergy-control:x"


def test_operators_are_users_of_this_machine() -> None:
    own = pwd.getpwuid(os.getuid()).pw_name
    assert operator_uids([own, 4242, "77"]) == {0, os.getuid(), 4242, 77}
    with pytest.raises(ConfigError, match="operators = 'nobody-of-that-name': there is no such"):
        operator_uids(["nobody-of-that-name"])
