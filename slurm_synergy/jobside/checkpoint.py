"""Checkpoints: directories that are either complete and verified, or not there.

Layout of one checkpoint, format version 1::

    step-000000001200/
      objects.pt        states of the registered objects (objects.json where torch is not in use)
      rank-00000.pt     random number generators of rank 0, one file a rank (or .json)
      part-NAME/        what the object NAME has written itself, on all ranks together (shards)
      state.json        position and the user's own JSON values
      MANIFEST.json     sizes and BLAKE2b sums of all the files above

It is written as ``step-000000001200.tmp-<restart>``, every file and the directory are synced, the
manifest comes last, then the directory is renamed and its parent synced. The last two stay.
Nothing of ours is pickled: tensors go through ``torch.save`` and are read with
``weights_only=True``. An object that writes files answers for how it reads them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from slurm_synergy.errors import CheckpointError
from slurm_synergy.jobside.checkpoint_files import (
    bytes_in,
    check_sums,
    sums_of,
    sync_dir,
    sync_tree,
    write_file,
)

__all__ = [
    "FORMAT_VERSION",
    "Checkpoint",
    "CheckpointStore",
    "Progress",
]

FORMAT_VERSION = 1
_KEEP = 2
_POLL_S = 0.02
_NAME = re.compile(r"step-(\d{12})(\.old)?")
_LEFT_OVER = re.compile(r"step-\d{12}\.(tmp-\d+|del)")
_MANIFEST = "MANIFEST.json"
# What reading a file that anybody may have written can end with.
_UNREADABLE = (
    *(CheckpointError, OSError, ValueError, KeyError, TypeError),
    *(AttributeError, OverflowError, RecursionError),
)
_STATE = "state.json"
_PART = "part-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where training stands, independent of the number of ranks.

    ``step`` batches and ``samples`` (of all ranks) since the job began; ``epoch_samples`` and
    ``epoch_batches`` within ``epoch``; ``seed`` of the sample order (-1: not chosen yet).
    """

    step: int = 0
    samples: int = 0
    epoch: int = 0
    epoch_samples: int = 0
    epoch_batches: int = 0
    seed: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was read and verified.

    ``parts`` are the directories of the objects that write files themselves; ``rank_state`` is
    None for a rank it lacks; ``took_s`` is how long it took to write (0: by a
    release that did not measure it).
    """

    path: Path
    progress: Progress
    objects: Mapping[str, Any]
    user_state: dict[str, Any]
    rank_state: Mapping[str, Any] | None
    took_s: float = 0.0
    parts: Mapping[str, Path] = field(default_factory=dict)


def _torch() -> Any:
    """The torch that the program imported itself; None: it has none and needs none."""
    return sys.modules.get("torch")


def _dump(stem: Path, payload: Mapping[str, Any]) -> None:
    """Write ``payload`` as ``stem.pt`` where torch is in use, else as ``stem.json``."""
    torch = _torch()
    if torch is not None:
        write_file(stem.with_name(stem.name + ".pt"), lambda file: torch.save(payload, file))
        return
    try:
        text = json.dumps(payload, allow_nan=True)
    except (TypeError, ValueError) as err:
        raise CheckpointError(
            f"{stem.name}: a state cannot be written as JSON: {err};"
            " state_dict() of an object must return numbers, strings, lists and dicts"
        ) from err
    write_file(stem.with_name(stem.name + ".json"), lambda file: file.write(text.encode()))


def _load(stem: Path) -> Any:
    """Read what :func:`_dump` wrote; None when there is no such file."""
    as_json, as_tensors = (stem.with_name(stem.name + end) for end in (".json", ".pt"))
    if as_json.exists():
        return json.loads(as_json.read_bytes())
    if not as_tensors.exists():
        return None
    try:
        import torch
    except ImportError as err:
        raise CheckpointError(f"{as_tensors}: reading it needs PyTorch: {err}") from err
    return torch.load(as_tensors, map_location="cpu", weights_only=True)


def _refused_by_safe_load(payload: Mapping[str, Any]) -> str:
    """The names of the objects whose state cannot be read back without unpickling code."""
    torch = _torch()
    names = []
    for name, state in payload.items():
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        try:
            torch.load(buffer, map_location="cpu", weights_only=True)
        except Exception:  # noqa: BLE001 - whatever it is, loading would meet it as well
            names.append(repr(name))
    return ", ".join(names)


class CheckpointStore:
    """The checkpoints of one job in ``directory``, seen by one of its ``ranks``.

    All ranks call :meth:`save` at the same step; rank 0 publishes once every rank's file is
    there, the others wait for that, at most ``wait_s`` seconds. The directory must be on
    storage that all ranks share.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int = 0,
        ranks: int = 1,
        restart: int = 0,
        wait_s: float = 120.0,
    ) -> None:
        self.directory, self.rank, self.ranks = directory, rank, ranks
        self._restart, self._wait_s = restart, wait_s
        self._read_back = False
        self._began_s = 0.0

    # -- writing -------------------------------------------------------------------------------

    def save(
        self,
        progress: Progress,
        objects: Callable[[], Mapping[str, Any]],
        user_state: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        parts: Mapping[str, Callable[[Path], object]] | None = None,
    ) -> Path:
        """Publish a checkpoint and return its directory.

        ``objects`` is called on rank 0 alone, each of ``parts`` on all ranks, with the directory
        for its files. Raises CheckpointError when nothing was published;
        what was written is removed and the previous checkpoint stays.
        """
        final = self.directory / f"step-{progress.step:012d}"
        temporary = final.with_name(f"{final.name}.tmp-{self._restart}")
        self._began_s = time.monotonic()
        try:
            self._make(temporary)
            for name, write in (parts or {}).items():
                place = temporary / f"{_PART}{name}"
                place.mkdir(mode=0o700, exist_ok=True)
                write(place)
            _dump(temporary / f"rank-{self.rank:05d}", rank_state)
            if self.rank == 0:
                self._publish(temporary, final, progress, objects(), user_state)
            else:
                self._await_publication(temporary, final)
        except CheckpointError:
            self._abandon(temporary)
            raise
        except OSError as err:
            self._abandon(temporary)
            raise CheckpointError(
                f"cannot save a checkpoint in {self.directory}: {err.strerror or err};"
                " the previous one is kept. Check free space, quota and permissions,"
                " or set SYNERGY_CHECKPOINT_DIR"
            ) from err
        except Exception as err:
            self._abandon(temporary)
            raise CheckpointError(
                f"cannot save a checkpoint in {self.directory}: {type(err).__name__}: {err};"
                " the previous one is kept"
            ) from err
        return final

    def _make(self, temporary: Path) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.ranks == 1:
            shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(mode=0o700, exist_ok=True)
        status = temporary.lstat()
        # On storage that maps root to another user, what we make is not root's.
        ours = status.st_uid in (os.geteuid(), self.directory.stat().st_uid)
        if not stat.S_ISDIR(status.st_mode) or not ours:
            raise CheckpointError(
                f"{temporary} is a link or another user's: nothing is written into it; remove it,"
                " or set SYNERGY_CHECKPOINT_DIR to a directory that only this user may write to"
            )

    def _publish(
        self,
        temporary: Path,
        final: Path,
        progress: Progress,
        objects: Mapping[str, Any],
        user_state: Mapping[str, Any],
    ) -> None:
        _dump(temporary / "objects", objects)
        self._check_readable(temporary, objects)
        state = {
            "version": FORMAT_VERSION,
            **asdict(progress),
            "ranks": self.ranks,
            "user_state": user_state,
        }
        try:
            text = json.dumps(state, indent=1)
        except (TypeError, ValueError) as err:
            raise CheckpointError(f"state() holds a value that JSON cannot express: {err}") from err
        write_file(temporary / _STATE, lambda file: file.write(text.encode()))
        self._await_ranks(temporary)
        for place in temporary.glob(f"{_PART}*"):
            sync_tree(place)
        manifest = {
            "version": FORMAT_VERSION,
            "step": progress.step,
            "took_s": round(time.monotonic() - self._began_s, 3),
            "files": sums_of(temporary),
        }
        write_file(
            temporary / _MANIFEST, lambda file: file.write(json.dumps(manifest, indent=1).encode())
        )
        sync_dir(temporary)
        old = final.with_name(final.name + ".old")
        if final.exists():
            # The same step again, after the end of an epoch or a damaged one: loading knows .old.
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        temporary.rename(final)
        sync_dir(self.directory)
        self._prune(final)

    def _check_readable(self, temporary: Path, objects: Mapping[str, Any]) -> None:
        """Read the first checkpoint of a run back, as loading will: fail now rather than then."""
        torch = _torch()
        if self._read_back or torch is None:
            return
        try:
            torch.load(temporary / "objects.pt", map_location="cpu", weights_only=True, mmap=True)
        except Exception as err:
            names = _refused_by_safe_load(objects) or "(unknown)"
            raise CheckpointError(
                f"the state of {names} holds more than tensors, numbers, strings, lists and dicts,"
                " so it could not be loaded safely (weights_only); convert such values in"
                f" state_dict(): {err}"
            ) from err
        self._read_back = True

    def _await_ranks(self, temporary: Path) -> None:
        deadline_s = time.monotonic() + self._wait_s
        wanted = {f"rank-{rank:05d}" for rank in range(self.ranks)}
        while True:
            names = [path.name for path in temporary.iterdir() if path.suffix != ".part"]
            stems = {name.partition(".")[0] for name in names}
            failed = sorted(name for name in names if name.endswith(".failed"))
            if failed:
                raise CheckpointError(f"{temporary}: {', '.join(failed)} could not be saved")
            missing = sorted(wanted - stems)
            if not missing:
                return
            if time.monotonic() > deadline_s:
                raise CheckpointError(
                    f"{temporary}: no file from {', '.join(missing)} within {self._wait_s:g} s;"
                    " is SYNERGY_CHECKPOINT_DIR on storage that all nodes share?"
                )
            time.sleep(_POLL_S)

    def _await_publication(self, temporary: Path, final: Path) -> None:
        # Longer than rank 0 waits for this rank, and for as long as its files grow.
        patience_s = 2 * self._wait_s
        deadline_s, seen_bytes = time.monotonic() + patience_s, -1
        while True:
            # Listing makes a network file system look again; a plain exists() may be cached.
            names = {path.name for path in self.directory.iterdir()}
            if temporary.name not in names:
                if final.name in names:
                    return
                raise CheckpointError(f"{final}: rank 0 could not publish it")
            now_bytes = bytes_in(temporary)
            if now_bytes != seen_bytes:
                deadline_s, seen_bytes = time.monotonic() + patience_s, now_bytes
            if time.monotonic() > deadline_s:
                raise CheckpointError(f"{final}: rank 0 did not publish it in {patience_s:g} s")
            time.sleep(_POLL_S)

    def _abandon(self, temporary: Path) -> None:
        if self.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            return
        with contextlib.suppress(OSError):
            (temporary / f"rank-{self.rank:05d}.failed").touch()

    def _prune(self, newest: Path) -> None:
        complete = [path for _step, path in self._candidates() if path.suffix != ".old"]
        kept = {newest, *complete[:_KEEP]}
        for _step, path in self._candidates():
            if path in kept:
                continue
            doomed = path.with_name(f"{path.name.partition('.')[0]}.del")
            with contextlib.suppress(OSError):
                # Renamed first: a half removed checkpoint must not look like a damaged one.
                shutil.rmtree(doomed, ignore_errors=True)
                path.rename(doomed)
                shutil.rmtree(doomed)

    # -- reading -------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Whether there is any checkpoint, good or not."""
        return bool(self._candidates())

    def clear_left_overs(self) -> None:
        """Remove what an earlier incarnation left unfinished (rank 0, before training)."""
        if self.rank == 0 and self.directory.is_dir():
            for path in self.directory.iterdir():
                if _LEFT_OVER.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)

    def load_newest(self, say: Callable[[str], None]) -> Checkpoint | None:
        """The newest intact checkpoint; None when there is none at all.

        A damaged one costs one line through ``say`` and the one before it is taken. Raises
        CheckpointError when there are checkpoints and none is intact: training must not silently
        begin anew.
        """
        problems: list[str] = []
        damaged: list[Path] = []
        for step, path in self._candidates():
            try:
                checkpoint = self._read(path, step)
            except _UNREADABLE as err:
                problems.append(f"{path.name}: {err}")
                damaged.append(path)
                say(f"checkpoint {path} is damaged and skipped: {err}")
                continue
            self._set_aside(damaged)
            return checkpoint
        if problems:
            raise CheckpointError(
                f"{self.directory}: none of {len(problems)} checkpoints is intact"
                f" ({problems[0]}); restore a copy, or move the directory away to start from"
                " the beginning"
            )
        return None

    def _set_aside(self, damaged: list[Path]) -> None:
        """Keep damaged ones as evidence, but out of the way of later loads and prunes."""
        if self.rank != 0:
            return
        for path in damaged:
            with contextlib.suppress(OSError):
                aside = path.with_name(path.name + ".damaged")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)

    def _candidates(self) -> list[tuple[int, Path]]:
        """Newest first; the ``.old`` of a step behind the step itself."""
        try:
            names = [path.name for path in self.directory.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as err:
            raise CheckpointError(
                f"cannot read the checkpoints in {self.directory}: {err.strerror or err};"
                " correct its permissions or set SYNERGY_CHECKPOINT_DIR"
            ) from err
        matches = [match for name in names if (match := _NAME.fullmatch(name))]
        matches.sort(key=lambda match: (-int(match[1]), match[2] or ""))
        return [(int(match[1]), self.directory / match[0]) for match in matches]

    def _read(self, path: Path, step: int) -> Checkpoint:
        manifest = json.loads((path / _MANIFEST).read_bytes())
        if manifest["version"] != FORMAT_VERSION or manifest["step"] != step:
            raise CheckpointError(
                f"{_MANIFEST} is of version {manifest['version']}, step {manifest['step']};"
                f" expected version {FORMAT_VERSION}, step {step}"
            )
        check_sums(path, manifest["files"])
        state = json.loads((path / _STATE).read_bytes())
        objects = self._load_part(path / "objects")
        if objects is None:
            raise CheckpointError("the objects are missing")
        return Checkpoint(
            path=path,
            progress=Progress(**{field.name: int(state[field.name]) for field in fields(Progress)}),
            objects=objects,
            user_state=dict(state["user_state"]),
            rank_state=self._load_part(path / f"rank-{self.rank:05d}"),
            took_s=float(manifest.get("took_s", 0.0)),
            parts={
                place.name.removeprefix(_PART): place
                for place in path.glob(f"{_PART}*")
                if place.is_dir() and not place.is_symlink()
            },
        )

    @staticmethod
    def _load_part(stem: Path) -> Any:
        try:
            return _load(stem)
        except CheckpointError:
            raise
        except Exception as err:
            # torch.load reports a file it does not trust with UnpicklingError or RuntimeError.
            raise CheckpointError(f"{stem.name}: {type(err).__name__}: {err}") from err
