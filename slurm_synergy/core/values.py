"""Frozen dataclasses that are made quickly.

A round for thousands of jobs makes tens of thousands of values. The constructor of a frozen
dataclass sets each field through ``object.__setattr__``, which takes most of the time of making it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar, cast

__all__ = ["maker", "quick"]

_T = TypeVar("_T")


def quick(cls: type[_T]) -> type[_T]:
    """Give a slotted, keyword-only dataclass a constructor that takes a third of the time.

    Nothing else changes. Fields of a frozen one are filled in while the object is of a class of the
    same layout that is not frozen; then it becomes one of ``cls``. A subclass must be made quick as
    well.
    """
    is_frozen = cast(Any, cls).__dataclass_params__.frozen
    draft = _draft(cls) if is_frozen else cls
    made = cast(Any, cls)
    made.__new__, made._make, made._make_unchecked = _constructors(cls, draft)
    made.__getnewargs_ex__ = _new_arguments
    del made.__init__
    return cls


def _draft(cls: type[Any]) -> type[Any]:
    """A class of the same layout that is not frozen."""
    return type(
        f"{cls.__name__}Draft",
        cls.__bases__,
        {
            "__slots__": cls.__dict__["__slots__"],
            "__setattr__": object.__setattr__,
            "__delattr__": object.__delattr__,
        },
    )


def maker(cls: type[_T], *, checked: bool = True) -> Callable[..., _T]:
    """A function that makes values of a quick class from the same keyword arguments.

    A call of a class gathers its arguments in a dictionary first, which takes about half of the
    time: for loops that make a value per job. Not ``checked``, its ``__post_init__`` is left out:
    for values that are known to be in order.
    """
    made = cast(Any, cls)
    return cast(Callable[..., _T], made._make if checked else made._make_unchecked)


def _constructors(cls: type[Any], draft: type[Any]) -> tuple[Any, Any, Any]:
    """``__new__`` and makers of ``cls``, written out as dataclasses write their ``__init__``."""
    known: dict[str, Any] = {"_new": object.__new__, "_draft": draft, "_missing": MISSING}
    known["cls"] = cls
    parameters, lines = [], []
    for field in fields(cls):
        parameters.append(field.name + _default(field, known))
        lines.append(_assignment(field))
    if draft is not cls:
        lines.append("self.__class__ = cls")
    check = ["self.__post_init__()"] if hasattr(cls, "__post_init__") else []
    body = "\n    ".join(["self = _new(_draft)", *lines, *check, "return self"])
    unchecked = "\n    ".join(["self = _new(_draft)", *lines, "return self"])
    listed = ", ".join(parameters)
    exec(f"def __new__(cls, *, {listed}):\n    {body}\n", known)
    exec(f"def _make(*, {listed}):\n    {body}\n", known)
    exec(f"def _make_unchecked(*, {listed}):\n    {unchecked}\n", known)
    makers = staticmethod(known["_make"]), staticmethod(known["_make_unchecked"])
    return known["__new__"], *makers


def _default(field: Field[Any], known: dict[str, Any]) -> str:
    if field.default is not MISSING:
        known[f"_default_{field.name}"] = field.default
        return f"=_default_{field.name}"
    if field.default_factory is not MISSING:
        known[f"_make_{field.name}"] = field.default_factory
        return "=_missing"
    return ""


def _assignment(field: Field[Any]) -> str:
    if field.default is MISSING and field.default_factory is not MISSING:
        return (
            f"self.{field.name} = _make_{field.name}() if {field.name} is _missing "
            f"else {field.name}"
        )
    return f"self.{field.name} = {field.name}"


def _new_arguments(self: Any) -> tuple[tuple[()], dict[str, Any]]:
    """For copies and pickles, which make the object anew."""
    return (), {field.name: getattr(self, field.name) for field in fields(self)}
