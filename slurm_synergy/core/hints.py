"""Hints: what a user tells us in the job's comment, ``synergy:key=value,key=value``.

The token is one word of the comment; the rest of the comment stays the user's. The grammar is that
of ``etc/job_submit.lua``, which refuses a malformed hint at submission already.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from slurm_synergy.core.model import Elasticity
from slurm_synergy.errors import HintError

__all__ = [
    "HINT_EXAMPLES",
    "MAX_HINT_BYTES",
    "Hints",
    "format_hints",
    "parse_hints",
    "replace_hints",
]

MAX_HINT_BYTES = 1024
"""Longest ``synergy:`` word that is read, in bytes; job_submit.lua has the same number."""

_PREFIX = "synergy:"
# What Lua's %s is: to str.split() other characters are blanks too, such as U+00A0.
_WORD = re.compile(r"[^ \t\n\v\f\r]+")
_LIST_EXAMPLE = "--comment=synergy:profile=resnet18-imagenet,min_mem=20G"
# Nine digits are the limit of the Lua side; fifteen are exact in its floats.
_DIGITS, _MOST_DIGITS = 9, 15
_MIB_PER_UNIT = {"M": 1, "G": 1024, "T": 1024 * 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """A job's hints; None where the user said nothing.

    ``profile`` names a model of the catalogue or of the profile store; ``min_mem_mib`` is what the
    processes need per node besides any cache; ``samples`` or ``epochs`` is the work; ``batch`` the
    smallest and largest total batch size; ``ckpt_dir`` where checkpoints go; ``grace_s`` how long
    the job may take to write one.
    """

    profile: str | None = None
    min_mem_mib: int | None = None
    samples: int | None = None
    epochs: int | None = None
    batch: tuple[int, int] | None = None
    elastic: Elasticity | None = None
    min_gpus: int | None = None
    max_gpus: int | None = None
    gpu_types: tuple[str, ...] | None = None
    scale_unit: int | None = None
    ckpt_dir: str | None = None
    grace_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """How one hint is read and written.

    ``parse`` gives None for a wrong value, which ``wrong`` says of it.
    """

    field: str
    parse: Callable[[str], Any]
    show: Callable[[Any], str]
    example: str
    wrong: str = "is malformed"


def _positive(text: str, digits: int = _DIGITS) -> int | None:
    return int(text) or None if re.fullmatch(rf"[0-9]{{1,{digits}}}", text) else None


def _batch(text: str) -> tuple[int, int] | None:
    low_text, dash, high_text = text.partition("-")
    low, high = _positive(low_text), _positive(high_text if dash else low_text)
    return (low, high) if low and high and low <= high else None


def _show_batch(batch: tuple[int, int]) -> str:
    return str(batch[0]) if batch[0] == batch[1] else f"{batch[0]}-{batch[1]}"


def _size_mib(text: str) -> int | None:
    match = re.fullmatch(r"([0-9]+\.?[0-9]*)([MGT]?)", text)
    if not match or len(match[1]) > 9 or float(match[1]) <= 0:
        return None
    return math.ceil(float(match[1]) * _MIB_PER_UNIT[match[2] or "M"])


def _show_size(mib: int) -> str:
    for unit in ("T", "G"):
        if mib % _MIB_PER_UNIT[unit] == 0:
            return f"{mib // _MIB_PER_UNIT[unit]}{unit}"
    return f"{mib}M"


def _matching(pattern: str) -> Callable[[str], str | None]:
    return lambda text: text if re.fullmatch(pattern, text) else None


def _elastic(text: str) -> Elasticity | None:
    return next((kind for kind in Elasticity if kind.value == text), None)


def _types(text: str) -> tuple[str, ...] | None:
    names = text.split("+")
    if not all(re.fullmatch(r"[A-Za-z0-9_.-]+", name) for name in names):
        return None
    return tuple(dict.fromkeys(names))


def _number(field: str, example: str, digits: int = _DIGITS) -> _Key:
    return _Key(
        field=field,
        parse=lambda text: _positive(text, digits),
        show=str,
        example=example,
        wrong=f"is not a whole number from 1 to {'9' * digits}",
    )


_KEYS: Mapping[str, _Key] = MappingProxyType(
    {
        "profile": _Key(
            field="profile",
            parse=_matching(r"[A-Za-z0-9][A-Za-z0-9._-]*"),
            show=str,
            example="profile=resnet18-imagenet",
        ),
        "min_mem": _Key(
            field="min_mem_mib", parse=_size_mib, show=_show_size, example="min_mem=20G"
        ),
        "samples": _number("samples", "samples=1281167", _MOST_DIGITS),
        "epochs": _number("epochs", "epochs=90", _MOST_DIGITS),
        "batch": _Key(
            field="batch", parse=_batch, show=_show_batch, example="batch=256 or batch=128-4096"
        ),
        "elastic": _Key(
            field="elastic",
            parse=_elastic,
            show=lambda kind: str(kind.value),
            example="elastic=rigid, scale or full",
        ),
        "min_gpus": _number("min_gpus", "min_gpus=2"),
        "max_gpus": _number("max_gpus", "max_gpus=16"),
        "gpu_types": _Key(
            field="gpu_types", parse=_types, show="+".join, example="gpu_types=v100+a100"
        ),
        "scale_unit": _number("scale_unit", "scale_unit=2"),
        "ckpt_dir": _Key(
            field="ckpt_dir",
            parse=_matching(r"/[^,]+"),
            show=str,
            example="ckpt_dir=/scratch/me/run1",
        ),
        "grace_s": _number("grace_s", "grace_s=60"),
    }
)

HINT_EXAMPLES: Mapping[str, str] = MappingProxyType(
    {name: key.example for name, key in _KEYS.items()}
)
"""Every known hint with a valid example, for messages and documentation."""


def parse_hints(comment: str) -> Hints:
    """The hints in a job's comment; all None when there is no ``synergy:`` word.

    Raises HintError, naming key, value and a valid example, for an unknown, repeated or malformed
    hint, and for two ``synergy:`` words.
    """
    tokens = [word for word in _WORD.findall(comment) if word.lower().startswith(_PREFIX)]
    for token in tokens:
        length = len(token.encode(errors="replace"))
        if length > MAX_HINT_BYTES:
            raise HintError(
                f"the {_PREFIX} list is {length} bytes long, and at most {MAX_HINT_BYTES} are "
                "taken; shorten names and paths"
            )
        if not token.startswith(_PREFIX):
            prefix, list_ = token[: len(_PREFIX)], token[len(_PREFIX) :]
            raise HintError(
                f'hints begin with "{_PREFIX}" in lower case, not "{prefix}"; '
                f"write {_PREFIX}{list_}"
            )
    if not tokens:
        return Hints()
    if len(tokens) > 1:
        raise HintError(
            f"the comment has {len(tokens)} {_PREFIX} lists; put all hints into one, "
            f"for example {_LIST_EXAMPLE}"
        )
    found: dict[str, Any] = {}
    for item in tokens[0].removeprefix(_PREFIX).split(","):
        if not item:
            raise HintError(
                f'the list "{tokens[0]}" has an empty hint; hints are one word of key=value and '
                f"commas, without spaces, for example {_LIST_EXAMPLE}"
            )
        name, equals, text = item.partition("=")
        if not equals:
            raise HintError(
                f'the hint "{item}" is not key=value; hints are one word without spaces, and '
                f'several values of one are joined by "+", for example {_LIST_EXAMPLE}'
            )
        key = _KEYS.get(name)
        if key is None:
            raise HintError(f'unknown hint "{name}"; known hints: {", ".join(sorted(_KEYS))}')
        if key.field in found:
            raise HintError(f"the hint {name} is given twice; give it once: {key.example}")
        value = key.parse(text)
        if value is None:
            raise HintError(f"the hint {name}={text} {key.wrong}; write {key.example}")
        found[key.field] = value
    hints = Hints(**found)
    if hints.min_gpus and hints.max_gpus and hints.min_gpus > hints.max_gpus:
        raise HintError(
            f"the hints min_gpus={hints.min_gpus} and max_gpus={hints.max_gpus} contradict each "
            "other; min_gpus must not be larger"
        )
    if hints.scale_unit and hints.max_gpus and hints.scale_unit > hints.max_gpus:
        raise HintError(
            f"the hints scale_unit={hints.scale_unit} and max_gpus={hints.max_gpus} contradict "
            "each other; the job grows in steps of scale_unit, which must not be larger"
        )
    return hints


def format_hints(hints: Hints) -> str:
    """The ``synergy:`` word for ``hints``, keys in fixed order; empty when there are none."""
    by_field = {key.field: (name, key) for name, key in _KEYS.items()}
    items = []
    for field in fields(hints):
        value = getattr(hints, field.name)
        if value is not None:
            name, key = by_field[field.name]
            items.append(f"{name}={key.show(value)}")
    return _PREFIX + ",".join(items) if items else ""


def replace_hints(comment: str, hints: Hints) -> str:
    """``comment`` with its ``synergy:`` words replaced by ``hints``; the user's words stay."""
    words = [word for word in _WORD.findall(comment) if not word.startswith(_PREFIX)]
    token = format_hints(hints)
    return " ".join([*words, token] if token else words)
