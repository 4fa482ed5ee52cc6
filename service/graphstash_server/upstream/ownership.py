"""OwnershipService: the state of a server's namespaces, which its regions follow."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from graphstash_schema import ErrorCode, Namespace
from graphstash_schema.names import LIST_START
from graphstash_schema.region import OwnedNamespace, UpstreamState
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.identifiers import find_cache_id
from graphstash_server.db.queries.policies import list_policies
from graphstash_server.db.queries.upstream import find_upstream_id
from graphstash_server.db.queries.withdrawals import list_ends
from graphstash_server.errors import ServerError

__all__ = ["OwnershipService"]


@dataclass(kw_only=True, eq=False)
class OwnershipService:
    """Identifies this server, and reports changes. Safe for concurrent calls."""

    database: Database
    upstream_url: str | None

    def __post_init__(self) -> None:
        self._own_id: str | None = None

    async def own_id(self) -> str:
        """Return the identifier of this server's database."""
        if self._own_id is None:
            async with self.database.writing() as connection:
                self._own_id = await find_cache_id(connection)
        return self._own_id

    def require(self) -> None:
        """Refuse a change that only the owner of the namespaces can make, if that is an upstream.

        Raises:
            ServerError: 403 on a region.
        """
        if self.upstream_url is not None:
            raise _owned_by(self.upstream_url)

    async def require_in_database(self) -> None:
        """Like `require`, for a command, which may lack the variables of the server. So the
        database also decides whether this is a region.
        """
        self.require()
        async with self.database.reading() as connection:
            if await find_upstream_id(connection) is not None:
                raise _owned_by("another server")

    async def read(self, *, may_read: Callable[[Namespace], Awaitable[bool]]) -> UpstreamState:
        """Return the state of the namespaces that a caller may read."""
        async with self.database.reading() as connection:
            ends = await list_ends(connection)
            policies = {each.namespace: each.policy for each in await list_policies(connection)}
        known = {*ends, *policies}
        names = [each for each in known if await may_read(each)]
        return UpstreamState(
            server=await self.own_id(),
            is_region=self.upstream_url is not None,
            is_complete=len(names) == len(known),
            namespaces={
                name: OwnedNamespace(
                    newest_withdrawal=ends.get(name, LIST_START),
                    policy=policies[name].model_dump(mode="json") if name in policies else None,
                )
                for name in names
            },
        )


def _owned_by(upstream: str) -> ServerError:
    return ServerError(
        ErrorCode.FORBIDDEN,
        f"this server is a region of {upstream}, which owns its namespaces: make this change there",
    )
