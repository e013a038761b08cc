"""Values of the model as JSON and back, for the ledger and the journal.

``encode`` takes frozen dataclasses, enums, mappings, sequences and scalars; ``decode`` rebuilds
them from the declared types. Numbers that JSON lacks are written as the words ``inf``, ``-inf``
and ``nan``. A field that a record lacks gets its default, so that records of the previous release
can be read.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from slurm_synergy.errors import ModelError

__all__ = ["decode", "encode"]

T = TypeVar("T")

# By far the most values of a round; a subclass (an enum, say) is none of them.
_PLAIN = frozenset({type(None), bool, int, str})


def encode(value: object) -> Any:
    """``value`` as what ``json.dumps(..., allow_nan=False)`` accepts. Raises ModelError."""
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    names = _field_names(kind)
    if names:
        return {name: encode(getattr(value, name)) for name in names}
    return _encode_other(value)


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    """The fields of a dataclass; none for other types. A round holds tens of thousands of them."""
    if not dataclasses.is_dataclass(kind):
        return ()
    return tuple(field.name for field in dataclasses.fields(kind))


def _encode_other(value: object) -> Any:
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(encode(key)): encode(item) for key, item in value.items()}
    if isinstance(value, frozenset | set):
        return [encode(item) for item in sorted(value)]
    if isinstance(value, Sequence):
        return [encode(item) for item in value]
    raise ModelError(f"cannot be written as JSON: {value!r}")


def decode(kind: type[T], data: object) -> T:
    """The ``kind`` that ``data`` was encoded from. Raises ModelError when it does not fit."""
    try:
        return cast(T, _decode(kind, data))
    except (TypeError, ValueError, KeyError, AttributeError) as err:
        raise ModelError(f"not a valid {kind.__name__}: {err}") from err


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _decode(kind: Any, data: Any) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        return _decode(next(arg for arg in args if arg is not type(None)), data)
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_decode(args[0], item) for item in _a_list(data))
        return tuple(_decode(arg, item) for arg, item in zip(args, _a_list(data), strict=True))
    if origin is not None and issubclass(origin, Mapping):
        return {_key(args[0], key): _decode(args[1], item) for key, item in data.items()}
    if dataclasses.is_dataclass(kind):
        hints = _hints(cast(type, kind))
        names = {f.name for f in dataclasses.fields(kind)}
        known = {name: _decode(hints[name], data[name]) for name in names & data.keys()}
        return cast(type, kind)(**known)
    if kind is float:
        return float(data)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(data)
    if kind in (int, str, bool) and type(data) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {data!r}")
    return data


def _a_list(data: object) -> Sequence[object]:
    if not isinstance(data, list):
        raise TypeError(f"expected a list, got {data!r}")
    return data


def _key(kind: Any, key: str) -> Any:
    return kind(key) if kind is int else _decode(kind, key)
