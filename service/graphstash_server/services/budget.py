"""Budgets: how many bytes the store and each namespace may have."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

__all__ = ["Budget", "Budgets"]

_SOFT_SHARE = 0.9
_ROOM_SHARE = 0.95


class Budget(NamedTuple):
    """A hard limit, which no upload passes, and a soft one, above which eviction begins.

    Attributes:
        hard_bytes: None for no limit.
        soft_bytes: None for no limit.
    """

    hard_bytes: int | None
    soft_bytes: int | None

    @classmethod
    def of(cls, hard_bytes: int | None, soft_bytes: int | None = None) -> "Budget":
        """By default the soft limit is nine tenths of the hard one."""
        if soft_bytes is None and hard_bytes is not None:
            soft_bytes = int(hard_bytes * _SOFT_SHARE)
        return cls(hard_bytes, soft_bytes)

    @property
    def is_none(self) -> bool:
        """Whether there is no limit at all."""
        return self.hard_bytes is None and self.soft_bytes is None

    @property
    def goal_bytes(self) -> int | None:
        """Where eviction ends: a little below where it begins, so that not every upload evicts."""
        return None if self.soft_bytes is None else int(self.soft_bytes * _ROOM_SHARE)

    def is_passed_softly(self, used_bytes: int) -> bool:
        """Whether it is time to evict."""
        return self.soft_bytes is not None and used_bytes > self.soft_bytes

    def is_passed(self, used_bytes: int) -> bool:
        """Whether an upload that leads there is refused."""
        return self.hard_bytes is not None and used_bytes > self.hard_bytes


class Budgets:
    """Of a store and its namespaces."""

    def __init__(
        self,
        store: Budget,
        *,
        namespace_bytes: int | None = None,
        exceptions: Mapping[str, int] | None = None,
    ) -> None:
        """Sets them.

        Args:
            store: all namespaces together.
            namespace_bytes: hard limit of every namespace; None for no limit.
            exceptions: hard limits of namespaces by pattern (`ci-*`); the first that fits counts.
        """
        self.store = store
        self._default = Budget.of(namespace_bytes)
        self._exceptions = [
            (pattern, Budget.of(limit)) for pattern, limit in (exceptions or {}).items()
        ]

    def of(self, namespace: str, limits: Mapping[str, int]) -> Budget:
        """Of one namespace.

        Args:
            namespace: which one.
            limits: hard limits that namespaces have by their policies; they win.
        """
        if namespace in limits:
            return Budget.of(limits[namespace])
        for pattern, budget in self._exceptions:
            if fnmatchcase(namespace, pattern):
                return budget
        return self._default
