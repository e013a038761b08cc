"""Pieces of HTML and SVG in which every text is escaped, whatever it says."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

__all__ = ["Markup", "join", "tag"]

_VOID = frozenset({"meta", "br", "line", "rect", "path", "circle", "polyline"})


class Markup(str):
    """Text that is markup already; anything else is escaped before it becomes part of one."""

    __slots__ = ()


def _safe(part: object) -> str:
    return part if isinstance(part, Markup) else escape(str(part), quote=True)


def join(parts: Iterable[object], between: str = "") -> Markup:
    """``parts`` one after another, those that are no markup escaped."""
    return Markup(escape(between).join(_safe(part) for part in parts))


def tag(name: str, /, *content: object, **attributes: object) -> Markup:
    """``<name attributes>content</name>``.

    Attribute names are written with ``_`` for ``-``, and with one at the end where Python needs it
    (``class_``); those that are None are left out. Content that is no Markup is escaped.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if not content and name in _VOID:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{join(content)}</{name}>")
