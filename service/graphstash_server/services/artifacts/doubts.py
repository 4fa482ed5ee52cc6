"""Doubts about limits. A limit far below what is stored may be a mistake, such as a wrong unit."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from graphstash_server.db.engine import Database
from graphstash_server.db.queries.usage import list_stored
from graphstash_server.services.namespaces import Budgets, PolicyLimits

__all__ = ["NOTHING_FREED", "LimitDoubts"]

NOTHING_FREED: Final[Mapping[str | None, int]] = {}


@dataclass(kw_only=True, eq=False)
class LimitDoubts:
    """Doubt a limit if the store or namespace has more than twice its soft limit when this process
    first uses the limit: after its start, or after a change of the namespace's policy.

    Nothing is evicted for a doubted limit until an operator confirms it or less is stored. A limit
    that uploads exceed later is not doubted: several processes may each admit an upload at once.
    """

    database: Database
    budgets: Budgets

    def __post_init__(self) -> None:
        self._judged: dict[str | None, tuple[object, bool]] | None = None

    async def about(
        self,
        sizes: Mapping[str | None, int],
        limits: PolicyLimits,
        freed_bytes: Mapping[str | None, int] = NOTHING_FREED,
    ) -> dict[str | None, str]:
        """Return the doubted limits of namespaces (None: the store), with the reason.

        Args:
            sizes: bytes that each stores now.
            limits: from the policies of namespaces.
            freed_bytes: bytes that a dry run would have evicted by then. They count as free in this
                result, but not in later calls.
        """
        if self._judged is None:
            stored: dict[str | None, int] = dict(map(tuple, await list_stored(self.database)))
            self._judged = {}
            self._judge(self._judged, {**stored, None: sum(stored.values())}, limits, freed_bytes)
        doubted = self._judge(self._judged, sizes, limits, freed_bytes)
        return {name: _reason(name, is_policy=name in limits.size_bytes) for name in doubted}

    def _judge(
        self,
        judged: dict[str | None, tuple[object, bool]],
        sizes: Mapping[str | None, int],
        limits: PolicyLimits,
        freed_bytes: Mapping[str | None, int],
    ) -> list[str | None]:
        """Judge limits that are new or whose policy has changed, in place. Return the doubted ones.

        The mark is part of a policy: this process may have missed another limit, which was replaced
        or removed since.
        """
        doubted = []
        for name, size_bytes in sizes.items():
            budget = self.budgets.store if name is None else self.budgets.of(name, limits)
            policy = None if name is None else (limits.size_bytes.get(name), limits.mark)
            excess_bytes = 0 if budget.soft_bytes is None else size_bytes - 2 * budget.soft_bytes
            is_new = name not in judged or judged[name][0] != policy
            judged[name] = policy, excess_bytes > 0 and (is_new or judged[name][1])
            if judged[name][1] and excess_bytes > freed_bytes.get(name, 0):
                doubted.append(name)
        return doubted


def _reason(namespace: str | None, *, is_policy: bool) -> str:
    """Return the reason, without sizes that a caller of one namespace must not read."""
    where = "the store" if namespace is None else f"the namespace {namespace}"
    advice = (
        f"graphstash namespace set {namespace} --limit"
        if is_policy
        else "GRAPHSTASH_STORE_LIMIT_BYTES, GRAPHSTASH_SOFT_LIMIT_BYTES, "
        "GRAPHSTASH_NAMESPACE_LIMIT_BYTES, GRAPHSTASH_NAMESPACE_LIMITS"
    )
    return (
        f"{where} has more than twice its soft limit. In case the limit is a mistake, nothing is "
        f"evicted for it: raise it ({advice}), or evict with `graphstash gc --evict-now`"
    )
