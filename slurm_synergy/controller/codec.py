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
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from slurm_synergy.errors import ModelError

__all__ = ["decode", "encode", "field_names"]

T = TypeVar("T")

# By far the most values of a round; a subclass (an enum, say) is none of them.
_PLAIN = frozenset({type(None), bool, int, str})


def encode(value: object) -> Any:
    """``value`` as what ``json.dumps(..., allow_nan=False)`` accepts. Raises ModelError."""
    kind: Any = type(value)
    return value if kind in _PLAIN else _encoder(kind)(value)


@functools.cache
def field_names(kind: type) -> tuple[str, ...]:
    """The fields of a dataclass as ``encode`` writes them, in this order; none for other types."""
    if not dataclasses.is_dataclass(kind):
        return ()
    return tuple(field.name for field in dataclasses.fields(kind))


@functools.cache
def _encoder(kind: type) -> Callable[[Any], Any]:
    """How values of exactly that type are encoded. A round holds tens of thousands of values."""
    if dataclasses.is_dataclass(kind):
        return _of_dataclass(field_names(kind))
    if issubclass(kind, Enum):
        return attrgetter("value")
    if issubclass(kind, bool | int | str):
        return _as_it_is
    for base, encoder in _BY_BASE:
        if issubclass(kind, base):
            return encoder
    return _refuse


def _of_dataclass(names: tuple[str, ...]) -> Callable[[Any], dict[str, Any]]:
    if len(names) < 2:  # attrgetter yields tuples from two on
        return lambda value: {name: encode(getattr(value, name)) for name in names}
    values_of = attrgetter(*names)

    def encoder(value: Any) -> dict[str, Any]:
        return {
            name: one if type(one) in _PLAIN else encode(one)
            for name, one in zip(names, values_of(value), strict=True)
        }

    return encoder


def _as_it_is(value: Any) -> Any:
    return value


def _of_float(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _of_mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    return {
        key if type(key) is str else str(encode(key)): encode(item) for key, item in value.items()
    }


def _of_set(value: frozenset[Any] | set[Any]) -> list[Any]:
    return [encode(item) for item in sorted(value)]


def _of_sequence(value: Sequence[Any]) -> list[Any]:
    return [one if type(one) in _PLAIN else encode(one) for one in value]


def _refuse(value: Any) -> Any:
    raise ModelError(f"cannot be written as JSON: {value!r}")


_BY_BASE: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (float, _of_float),
    (Mapping, _of_mapping),
    (frozenset | set, _of_set),
    (Sequence, _of_sequence),
)


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
