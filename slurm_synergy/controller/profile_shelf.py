"""The store of measured profiles as users reach it: looking, importing, forgetting.

A profile decides how many cores a job is given, so nobody changes what others rely on: a key
belongs to whoever measured or imported it first; operators may change every one, and theirs are for
all.
"""

from __future__ import annotations

import json
import pwd
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from slurm_synergy.controller.learning_store import Subject
from slurm_synergy.controller.ledger import Ledger
from slurm_synergy.controller.profiling_results import MOST_OF_A_USER, is_anothers_own_key
from slurm_synergy.core.model import Profile
from slurm_synergy.errors import LeaseError, ModelError
from slurm_synergy.profiler.documents import from_document, to_document
from slurm_synergy.profiler.evidence import StoredProfile, checked_key

__all__ = ["ProfileShelf"]

_FOR_ALL = -1


class ProfileShelf:
    """Answers for the profiles in ``ledger``; thread-safe.

    ``catalogue`` tells the built-in profiles, whose names only operators may take.
    """

    def __init__(self, ledger: Ledger, catalogue: Callable[[str], Profile | None]) -> None:
        self._ledger, self._catalogue = ledger, catalogue

    def profiles(self, *, viewer_uid: int, operators: Collection[int]) -> Mapping[str, object]:
        """The profiles that this viewer may see, as documents with their owner's name."""
        seen = [
            stored
            for stored in self._ledger.stored_profiles()
            if viewer_uid in operators or _owner_uid(stored) in {_FOR_ALL, viewer_uid, *operators}
        ]
        return {"profiles": [{**to_document(one), "owner": _owner_name(one)} for one in seen]}

    def import_profile(
        self, text: str, *, uid: int, operators: Collection[int]
    ) -> Mapping[str, object]:
        """Keep the document ``text`` (JSON). Raises LeaseError when it may not or cannot be."""
        try:
            stored = from_document(json.loads(text))
        except (ModelError, ValueError, RecursionError) as err:
            raise LeaseError(f"the profile cannot be imported: {err}") from err
        if uid not in operators:
            stored = self._as_own(stored, uid)
        key = stored.profile.key
        before = self._ledger.stored_profile(key)
        self._refuse_others(before, key, uid, operators)
        self._ledger.save_profile(stored.profile, stored.evidence)
        return {"key": key, "replaced": before is not None}

    def forget_profile(
        self, key: str, *, uid: int, operators: Collection[int]
    ) -> Mapping[str, object]:
        """Drop what is kept under ``key``. Raises LeaseError when it may not or is not there."""
        try:
            before = self._ledger.stored_profile(checked_key(key))
        except ModelError as err:
            raise LeaseError(str(err)) from err
        lesson = self._ledger.lesson(Subject(job_id=0, key=key))
        if before is None and lesson is not None:
            # No cores were measured, but elastic jobs with the key were learned from.
            if uid not in operators and lesson.owner_uid != uid:
                raise LeaseError(f"what is known of {key!r} belongs to user id {lesson.owner_uid}")
        elif before is None:
            built_in = ": it is built in, and stays" if self._catalogue(key) else ""
            raise LeaseError(f"no profile is kept under {key!r}{built_in}")
        self._refuse_others(before, key, uid, operators)
        self._ledger.forget_profile(key)
        return {"key": key, "forgotten": True}

    def _as_own(self, stored: StoredProfile, uid: int) -> StoredProfile:
        """The profile as one of this user's."""
        key = stored.profile.key
        if self._catalogue(key) is not None:
            raise LeaseError(f"{key!r} is built in: take another key, or ask an operator")
        if is_anothers_own_key(key, uid):
            raise LeaseError(
                f"{key!r} is for jobs of another user that name no key: take another key "
                '(synergy-profile --key KEY, or "key" in the document)'
            )
        if stored.evidence is None:
            raise LeaseError(
                f"the profile {key!r} says nothing about its measurement; only operators import "
                "such ones. Measure it: synergy-profile COMMAND"
            )
        owned = [one for one in self._ledger.profiles_of(uid) if one != key]
        if len(owned) >= MOST_OF_A_USER:
            raise LeaseError(
                f"user id {uid} has {len(owned)} profiles, and cannot have more: forget some with "
                "'synergyctl profile forget KEY'"
            )
        return replace(stored, evidence=replace(stored.evidence, owner_uid=uid))

    def _refuse_others(
        self, before: StoredProfile | None, key: str, uid: int, operators: Collection[int]
    ) -> None:
        if before is None or uid in operators or _owner_uid(before) == uid:
            return
        raise LeaseError(
            f"the profile {key!r} belongs to {_owner_name(before) or 'all'}: only the owner and "
            "operators may change it; take another key"
        )


def _owner_uid(stored: StoredProfile) -> int:
    return stored.evidence.owner_uid if stored.evidence else _FOR_ALL


def _owner_name(stored: StoredProfile) -> Any:
    uid = _owner_uid(stored)
    if uid == _FOR_ALL:
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
