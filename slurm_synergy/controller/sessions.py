"""The session tokens of registered tasks. Not thread-safe: its keeper holds the lock."""

from __future__ import annotations

import secrets

from slurm_synergy.controller.tasks import TaskIdentity

__all__ = ["Sessions"]


class Sessions:
    """One token per task, in both directions; a newer one ends the one before."""

    def __init__(self) -> None:
        self._tokens: dict[str, TaskIdentity] = {}
        self._token_of: dict[TaskIdentity, str] = {}
        self._of_job: dict[int, set[str]] = {}

    def begin(self, identity: TaskIdentity) -> str:
        """A new token of that task."""
        old = self._token_of.get(identity)
        if old is not None:
            self._forget(old)
        token = secrets.token_urlsafe(32)
        self._tokens[token], self._token_of[identity] = identity, token
        self._of_job.setdefault(identity.job_id, set()).add(token)
        return token

    def task_of(self, token: str) -> TaskIdentity | None:
        """The task that the token was given to."""
        return self._tokens.get(token)

    def end_all_of(self, job_id: int) -> None:
        """No token of the job is good any more."""
        for token in tuple(self._of_job.get(job_id, ())):
            self._forget(token)

    def _forget(self, token: str) -> None:
        identity = self._tokens.pop(token)
        del self._token_of[identity]
        left = self._of_job[identity.job_id]
        left.discard(token)
        if not left:
            del self._of_job[identity.job_id]
