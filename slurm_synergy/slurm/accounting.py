"""The limits of accounts and QOS as slurmctld has them now, and when they leave more room. Pure.

Slurm does not tell a controller that an administrator has raised a limit, or that a job of the
same account has ended in another partition. Both show in ``scontrol show assoc_mgr``, which is
asked only while a job waits because of such a limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from slurm_synergy.errors import SlurmParseError
from slurm_synergy.slurm.fields import scan_keys
from slurm_synergy.slurm.parse import whole

__all__ = ["AccountingFacts", "Asker", "Bound", "parse_accounting"]

_T = TypeVar("_T")

_FIRST = "Current Association Manager state"
_NAMES = re.compile(r"(?:Grp|Max|Min)[A-Za-z]+")
_LIMIT = re.compile(r"([0-9][^()\s]*)(?:\(([0-9.]+)\))?")
# What runs down by the clock alone.
_BY_TIME = re.compile(r"Mins|Wall|Accrue")
_EXISTS = ""

Bound = tuple[str, str]
"""An account (empty for a QOS), and which of its limits for whom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """Whose job it is."""

    uid: int
    account: str
    qos: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountingFacts:
    """The limits of the ``accounts`` asked for and of all QOS, and how much of them is in use.

    ``limits`` has an entry for each association and QOS that exists as well. ``parents`` are the
    accounts right above those that were asked for, ``above`` tells of each which one that is.
    """

    accounts: frozenset[str] = frozenset()
    limits: Mapping[Bound, str] = field(default_factory=dict)
    used: Mapping[Bound, float] = field(default_factory=dict)
    parents: frozenset[str] = frozenset()
    above: Mapping[str, str] = field(default_factory=dict)

    def differs_from(self, before: AccountingFacts) -> bool:
        """Whether a limit is another one than ``before``, or gone; accounts that both know count.

        A limit that is new allows nothing, but an association or a QOS that is new may.
        """
        now, then = self._common(before, self.limits), self._common(before, before.limits)
        new = (bound for bound, limit in now.items() if limit == _EXISTS and bound not in then)
        return any(now.get(bound) != limit for bound, limit in then.items()) or any(new)

    def eased_since(self, before: AccountingFacts) -> bool:
        """Whether a limit is another one than ``before``, or less of one is in use."""
        if self.differs_from(before):
            return True
        then = self._common(before, before.used)
        return any(self.used.get(bound, 0.0) < used for bound, used in then.items())

    def gpus_left(self, who: Asker, gpu_type: str) -> dict[Bound, float]:
        """How many more GPUs of that type each limit on GPUs that concerns ``who`` would allow."""
        chain, account = set[str](), who.account
        while account and account not in chain:
            chain.add(account)
            account = self.above.get(account, "")
        names = ("gres/gpu", f"gres/gpu:{gpu_type}")
        return {
            bound: float(self.limits[bound]) - used
            for bound, used in self.used.items()
            if bound[1].endswith(names)
            and self.limits[bound].isdigit()
            and (bound[0] in chain if bound[0] else bound[1].startswith(f"{who.qos}("))
            and _is_of(bound, who)
        }

    def _common(self, other: AccountingFacts, given: Mapping[Bound, _T]) -> dict[Bound, _T]:
        known = (self.accounts & other.accounts) | {""}
        return {bound: value for bound, value in given.items() if bound[0] in known}


def parse_accounting(text: str, accounts: Iterable[str]) -> AccountingFacts:
    """``scontrol show assoc_mgr flags=assoc,qos accounts=...`` to facts. Raises SlurmParseError."""
    if not whole(text, "scontrol show assoc_mgr").lstrip().startswith(_FIRST):
        raise SlurmParseError(f"scontrol show assoc_mgr: no {_FIRST!r}", text)
    limits: dict[Bound, str] = {}
    used: dict[Bound, float] = {}
    above: dict[str, str] = {}
    account = record = part = ""
    for line in text.splitlines():
        keys = scan_keys(line)
        if line.startswith(("ClusterName=", "QOS=")):
            account = keys.get("Account", "")
            record = _words(*(keys.get(key, "") for key in ("QOS", "UserName", "Partition")))
            part = ""
            limits[account, record] = _EXISTS
        elif line.strip() and "=" not in line:
            part = line.strip()  # whose limits within a QOS follow
        parent = keys.get("ParentAccount", "").partition("(")[0]
        if parent:
            above[account] = parent
        for name, limit, use in _limits(line):
            bound = (account, _words(record, part, name))
            limits[bound] = limit
            if use is not None and not _BY_TIME.search(name):
                used[bound] = use
    return AccountingFacts(
        accounts=frozenset(accounts),
        limits=limits,
        used=used,
        parents=frozenset(above.values()),
        above=above,
    )


def _is_of(bound: Bound, who: Asker) -> bool:
    """Whether it is a limit of nobody else: of no other user, and of no other account in a QOS."""
    account, words = bound[0], bound[1].split()
    if account:
        return "(" not in words[0] or words[0].endswith(f"({who.uid})")
    if "MaxTRESPU" in words:
        return words[1] == str(who.uid)
    return "MaxTRESPA" not in words or words[1] == who.account


def _words(*words: str) -> str:
    return " ".join(word for word in words if word)


def _limits(line: str) -> Iterator[tuple[str, str, float | None]]:
    """Name, limit and use of everything in a line that is limited."""
    for word in line.split():
        name, _, rest = word.partition("=")
        if _NAMES.fullmatch(name) is None:
            continue
        for item in rest.split(","):
            what, _, told = item.rpartition("=")
            match = _LIMIT.fullmatch(told)
            if match is not None:
                yield _words(name, what), match[1], float(match[2]) if match[2] else None
