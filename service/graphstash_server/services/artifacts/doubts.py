"""Doubts about limits: one far below what is stored may have a wrong unit."""

from collections.abc import Mapping
from dataclasses import dataclass

from graphstash_server.db.engine import Database
from graphstash_server.db.queries.usage import list_stored
from graphstash_server.services.namespaces import Budgets

__all__ = ["LimitDoubts"]


@dataclass(kw_only=True, eq=False)
class LimitDoubts:
    """Doubt a limit in the settings if more than twice as much was stored when this process began.

    Nothing is evicted for such a limit until an operator confirms it. A limit that uploads exceed
    later is not doubted, and neither is one in the policy of a namespace: an administrator sets it
    by name.
    """

    database: Database
    budgets: Budgets

    def __post_init__(self) -> None:
        self._doubted: frozenset[str | None] | None = None

    async def about(
        self, sizes: Mapping[str | None, int], limits: Mapping[str, int]
    ) -> dict[str | None, str]:
        """Return the reason for each doubted limit among those of namespaces (None: the store).

        Args:
            sizes: bytes that each of them stores now.
            limits: limits in the policies of namespaces.
        """
        if self._doubted is None:
            stored: dict[str | None, int] = dict(map(tuple, await list_stored(self.database)))
            stored[None] = sum(stored.values())
            self._doubted = frozenset(each for each in stored if self._is_far(each, stored[each]))
        return {
            name: _reason(name)
            for name, size_bytes in sizes.items()
            if name in self._doubted and name not in limits and self._is_far(name, size_bytes)
        }

    def _is_far(self, namespace: str | None, size_bytes: int) -> bool:
        budget = self.budgets.store if namespace is None else self.budgets.of(namespace, {})
        return budget.soft_bytes is not None and size_bytes > 2 * budget.soft_bytes


def _reason(namespace: str | None) -> str:
    """Return the reason without sizes, because a caller of one namespace may read it."""
    where = "the store" if namespace is None else f"the namespace {namespace}"
    return (
        f"{where} has more than twice its soft limit. In case the limit is a mistake, nothing is "
        "evicted for it: raise it (GRAPHSTASH_STORE_LIMIT_BYTES, GRAPHSTASH_SOFT_LIMIT_BYTES, "
        "GRAPHSTASH_NAMESPACE_LIMIT_BYTES, GRAPHSTASH_NAMESPACE_LIMITS), or evict with "
        "`graphstash gc --evict-now`"
    )
