"""What Slurm had written to files of cgroups before we wrote something else, on disk.

The record is on disk before a file is changed, so that whoever comes after a dead helper can put
everything back.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from slurm_synergy.errors import ConfigError

__all__ = ["Originals"]

_MOST_BYTES = 16 * 1024**2


class Originals:
    """The record in ``path``, which root alone may write to. Raises ConfigError for one that
    cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = _load(path)

    def files(self) -> tuple[Path, ...]:
        """The files that we have changed."""
        return tuple(map(Path, self._known))

    def forget_gone(self) -> None:
        """Drop what is known of files that are gone: job or step has ended. Raises OSError."""
        gone = [name for name in self._known if not os.path.lexists(name)]
        for name in gone:
            del self._known[name]
        if gone:
            self._save()

    def slurms(self, file: Path, same: Callable[[str, str], bool]) -> str:
        """What Slurm has last written to ``file``, whatever is in it now. Raises OSError.

        ``same`` tells whether two texts mean the same.
        """
        now, known = file.read_text().strip(), self._known.get(str(file))
        return known[0] if known is not None and same(now, known[1]) else now

    def write(self, file: Path, text: str, same: Callable[[str, str], bool]) -> bool:
        """Have ``text`` in ``file`` and remember what was there; whether it had to be written.

        Raises OSError.
        """
        now = file.read_text().strip()
        if same(now, text):
            return False
        slurms = self.slurms(file, same)
        self._put(file, (slurms, text))
        file.write_text(text)
        if same(text, slurms):
            self._drop(file)
        return True

    def restore(self, file: Path, same: Callable[[str, str], bool]) -> None:
        """Put back what Slurm had there; a file that is gone is no error. Raises OSError."""
        known = self._known.get(str(file))
        if known is None:
            return
        with contextlib.suppress(FileNotFoundError):
            now = file.read_text().strip()
            # Anything else than ours is Slurm's newer word.
            if same(now, known[1]) and not same(now, known[0]):
                file.write_text(known[0] or "\n")
        self._drop(file)

    def _put(self, file: Path, values: tuple[str, str]) -> None:
        self._known[str(file)] = values
        self._save()

    def _drop(self, file: Path) -> None:
        del self._known[str(file)]
        self._save()

    def _save(self) -> None:
        # A power cut takes the cgroups with it; only the death of a process must be survived.
        fresh = self._path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as stream:
            json.dump(self._known, stream)
        fresh.replace(self._path)


def _load(path: Path) -> dict[str, tuple[str, str]]:
    try:
        with path.open("rb") as stream:
            found = json.loads(stream.read(_MOST_BYTES))
        return {str(file): (str(slurms), str(ours)) for file, (slurms, ours) in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as err:
        raise ConfigError(
            f"the record of changed cgroups cannot be read ({err})",
            file=str(path),
            remedy="restart the node's jobs or correct their cgroups by hand, then remove the file",
        ) from err
