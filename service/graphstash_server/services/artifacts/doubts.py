"""Doubts about limits: one far below what is stored may have a wrong unit."""

from collections.abc import Mapping
from dataclasses import dataclass

from graphstash_server.db.engine import Database
from graphstash_server.db.queries.usage import list_stored
from graphstash_server.services.namespaces import Budget, Budgets

__all__ = ["LimitDoubts"]


@dataclass(kw_only=True, eq=False)
class LimitDoubts:
    """Doubt a limit if more than twice as much is stored.

    Nothing is evicted for such a limit until an operator confirms it. Uploads cannot exceed the
    limit of a namespace that far. They can exceed a soft limit of the store, so that limit is
    doubted only if it is exceeded when this process first uses it.
    """

    database: Database
    budgets: Budgets

    def __post_init__(self) -> None:
        self._is_store_doubted: bool | None = None

    async def about(
        self, sizes: Mapping[str | None, int], limits: Mapping[str, int]
    ) -> dict[str | None, str]:
        """Return the reason for each doubted limit among those of namespaces (None: the store).

        Args:
            sizes: bytes that each of them stores now.
            limits: limits in the policies of namespaces.
        """
        store = self.budgets.store
        if self._is_store_doubted is None:
            stored = await list_stored(self.database)
            self._is_store_doubted = _is_far(store, sum(size for _, size in stored))
        return {
            name: _reason(name, is_policy=name in limits)
            for name, size_bytes in sizes.items()
            if _is_far(store if name is None else self.budgets.of(name, limits), size_bytes)
            and (name is not None or self._is_store_doubted)
        }


def _is_far(budget: Budget, size_bytes: int) -> bool:
    return budget.soft_bytes is not None and size_bytes > 2 * budget.soft_bytes


def _reason(namespace: str | None, *, is_policy: bool) -> str:
    """Return the reason without sizes, because a caller of one namespace may read it."""
    where = "the store" if namespace is None else f"the namespace {namespace}"
    way_out = (
        f"graphstash namespace set {namespace} --limit"
        if is_policy
        else "GRAPHSTASH_STORE_LIMIT_BYTES, GRAPHSTASH_SOFT_LIMIT_BYTES, "
        "GRAPHSTASH_NAMESPACE_LIMIT_BYTES, GRAPHSTASH_NAMESPACE_LIMITS"
    )
    return (
        f"{where} has more than twice its soft limit. In case the limit is a mistake, nothing is "
        f"evicted for it: raise it ({way_out}), or evict with `graphstash gc --evict-now`"
    )
