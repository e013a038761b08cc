"""Words that may become part of a command of Slurm: names and one-line texts, checked."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slurm_synergy.slurm import hostlist

__all__ = ["a_line", "a_word", "is_word", "node_words", "words"]

_WORD = re.compile(r"[A-Za-z0-9_.@+][A-Za-z0-9_.@+-]*")  # no option


def is_word(text: str) -> bool:
    """Whether ``text`` is a name that cannot be taken for fields or an option."""
    return _WORD.fullmatch(text) is not None


def a_word(text: str, what: str) -> str:
    """``text`` if it is such a name; else ``ValueError``."""
    if not is_word(text):
        raise ValueError(f"{what}: {text!r} is not a name (letters, digits and _ . @ + -)")
    return text


def words(texts: Sequence[str], what: str) -> str:
    """Names as a list of Slurm's; ``ValueError`` for none and for what is not a name."""
    if not texts:
        raise ValueError(f"{what}: give at least one")
    return ",".join(a_word(text, what) for text in texts)


def node_words(names: Sequence[str]) -> str:
    """Node names as a host list; ``ValueError`` for none."""
    if not names:
        raise ValueError("nodes: give at least one; Slurm would pick arbitrary ones")
    return hostlist.compress(names)


def a_line(text: str) -> str:
    """``text`` if no record of Slurm's can be forged with it; else ``ValueError``."""
    if re.search(r"[\x00-\x1f\x7f]", text):
        raise ValueError(f"comment {text!r}: control characters would forge Slurm's records")
    return text
