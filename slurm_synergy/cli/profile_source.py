"""Where ``synergyctl`` finds a profile: a file, the controller's store, this user's folder, or the
built-in catalogue."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_synergy.cli.control import ask, find_target
from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.errors import ConfigError, LeaseError, ModelError
from slurm_synergy.profiler.command import profiles_folder
from slurm_synergy.profiler.documents import from_document
from slurm_synergy.profiler.evidence import StoredProfile, checked_key

__all__ = ["Found", "check_tells_of_cores", "find_profile", "read_document", "store", "write_file"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A profile and, in words, where it was found."""

    stored: StoredProfile
    place: str


def store(config: Path | None) -> tuple[list[Mapping[str, Any]], str]:
    """The documents of the controller's store, or none and why there are none."""
    try:
        documents: list[Mapping[str, Any]] = ask(find_target(config, os.environ), "profiles")[
            "profiles"
        ]
    except (ConfigError, LeaseError) as err:
        if config is not None:
            raise
        return [], str(err)
    return documents, ""


def read_document(path: Path) -> StoredProfile:
    """The profile in a file. Raises ModelError naming it for anything else."""
    try:
        return from_document(json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as err:
        raise ModelError(f"{path}: not a profile, which is a JSON document: {err}") from err
    except FileNotFoundError as err:
        raise ModelError(
            f"{path}: there is no such file; name one, or a profile ('synergyctl profile list')"
        ) from err
    except OSError as err:
        raise ModelError(f"{path}: cannot be read: {err.strerror}; name a readable file") from err
    except ValueError as err:
        raise ModelError(f"{path}: {err}") from err


def check_tells_of_cores(stored: StoredProfile) -> None:
    """Raise ModelError for a profile from which nothing follows for cores and memory."""
    profile = stored.profile
    remedy = "measure it with synergy-profile, or name another ('synergyctl profile list')"
    if not profile.gpu_rate_per_gpu:
        raise ModelError(f"profile {profile.key!r} knows the speed of no GPU type: {remedy}")
    if profile.pipeline is None and profile.table is None:
        raise ModelError(
            f"profile {profile.key!r} does not say how fast data gets ready with how many cores: "
            f"{remedy}"
        )


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` write the file of the option --output. Raises ConfigError."""
    try:
        write(path)
    except OSError as err:
        raise ConfigError(
            f"cannot be written: {err.strerror}",
            key="--output",
            value=str(path),
            remedy="name a file in a directory that you may write",
        ) from err


def find_profile(name: str, config: Path | None) -> Found:
    """The profile called ``name``, a file's path or a key. Raises ModelError if there is none."""
    path = Path(name)
    if path.suffix == ".json" or path.parent != Path():
        return Found(stored=read_document(path), place=str(path))
    key = checked_key(name)
    documents, silent = store(config)
    for document in documents:
        if document["key"] == key:
            return Found(stored=from_document(document), place="the controller's store")
    own = profiles_folder() / f"{key}.json"
    if own.is_file():
        return Found(stored=read_document(own), place=str(own))
    if key in CATALOGUE:
        return Found(stored=StoredProfile(profile=CATALOGUE[key]), place="the built-in catalogue")
    asked = (
        f"the controller could not be asked: {silent}"
        if silent
        else "nor in the controller's store"
    )
    raise ModelError(
        f"there is no profile {key!r}: not in {own.parent}, not built in; {asked} "
        "(see 'synergyctl profile list')"
    )
