"""Follower: probes the upstream every three seconds, and applies its changes.

Each process probes. One process at a time applies policies and withdrawals to the database. One
transaction deletes an artifact and adds the withdrawal to this server's own list, which hosts
follow. If there is no artifact, a download may be storing it. So the process adds the withdrawal,
and then tries again to delete the artifact: either the download's commit finds the entry
(`fetches`), or the artifact is deleted here.

The bytes are deleted last, because a blob store may be slow or refuse it.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from pydantic import ValidationError

from graphstash_schema import Digest, InvalidValueError, Namespace
from graphstash_schema.names import LIST_START, ListPosition
from graphstash_schema.protocol import API_PREFIX
from graphstash_schema.region import UpstreamState
from graphstash_schema.withdrawals import Withdrawal, WithdrawalCause, WithdrawalList
from graphstash_server.artifact import Artifact
from graphstash_server.clock import Clock, jitter
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.artifacts import list_stored_rows
from graphstash_server.db.queries.locks import claim_chore
from graphstash_server.db.queries.shared import QUEUED_UNTIL
from graphstash_server.db.queries.upstream import (
    find_earlier,
    find_position,
    find_upstream_id,
    has_artifacts,
    list_positions,
    lock_position,
    note_positions,
    note_upstream_id,
    put_position,
)
from graphstash_server.db.queries.withdrawals import add_gap, add_withdrawals
from graphstash_server.errors import ServerError, StartError
from graphstash_server.keys import StoredKey
from graphstash_server.services.artifacts.service import ArtifactService
from graphstash_server.services.namespaces import PolicyService
from graphstash_server.upstream.access import UpstreamAccess
from graphstash_server.upstream.client import UpstreamBusyError, UpstreamClient, UpstreamError
from graphstash_server.upstream.ownership import OwnershipService
from graphstash_server.upstream.setting_aside import UPSTREAM, SetAside

__all__ = ["Follower"]

_LOGGER = logging.getLogger(__name__)

_EVERY_SECONDS: Final = 3.0
_DOWN_SECONDS: Final = 1.0
_TURN: Final = timedelta(seconds=2)
_PRUNE: Final = timedelta(hours=1)
_COLLECT_SECONDS: Final = 5.0
_PAGE: Final = 200
_PAGES_AT_ONCE: Final = 20


@dataclass(kw_only=True, eq=False)
class Follower:
    """Probe the upstream and apply its changes. Cancelling it loses nothing."""

    client: UpstreamClient
    database: Database
    artifacts: ArtifactService
    policies: PolicyService
    access: UpstreamAccess
    ownership: OwnershipService
    set_aside: SetAside
    clock: Clock

    def __post_init__(self) -> None:
        self._refusal = ""
        self._newest: dict[Namespace, ListPosition] = {}
        self._noted: dict[Namespace, ListPosition] = {}
        self._uncollected: list[Digest] = []
        self._unknown_policies: set[Namespace] = set()
        self._comparisons: dict[Namespace, _Comparison] = {}
        """Comparisons that are not finished."""
        self._differing: dict[Namespace, StoredKey | None] = {}
        """Namespaces in which copies may differ, with the last copy that was compared."""

    async def begin(self) -> None:
        """Probe the upstream before the server serves.

        Raises:
            StartError: the server must not be a region of this upstream, or this is its first start
                and the upstream does not answer.
        """
        async with self.database.reading() as connection:
            known = await find_upstream_id(connection)
            is_used = await has_artifacts(connection)
        if known is None and is_used:
            raise StartError(
                "the store has artifacts that are not from an upstream: start a region with an "
                "empty data directory or database"
            )
        try:
            state = await self.client.probe()
        except UpstreamError as error:
            if known is None:
                raise StartError(
                    f"a region needs its upstream for the first start: {error}; check "
                    "GRAPHSTASH_UPSTREAM_URL and GRAPHSTASH_UPSTREAM_TOKEN"
                ) from None
            self.client.mark_down(str(error))
            _LOGGER.warning("the region starts without its upstream: %s", error)
            return
        if (refusal := await self._why_refused(state)) is not None:
            raise StartError(refusal)
        async with self.database.writing() as connection:
            await note_upstream_id(connection, state.server)
        await self._note_ends(state)
        await self._apply_policies(state)
        self.client.mark_up()

    async def run(self) -> None:
        """Probe and apply changes, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_EVERY_SECONDS * (0.75 + 0.25 * jitter())):
                    await self.client.went_down.wait()
            if not self.client.is_up.is_set():
                await asyncio.sleep(_DOWN_SECONDS * (0.75 + 0.25 * jitter()))
            try:
                await self._round()
            except (UpstreamError, ServerError) as error:
                _LOGGER.warning("could not apply changes of the upstream, will retry: %s", error)
            except Exception:
                _LOGGER.exception("following the upstream failed and will be retried")

    async def _round(self) -> None:
        try:
            state = await self.client.probe()
        except UpstreamBusyError:
            return
        except UpstreamError as error:
            self.client.mark_down(str(error))
            return
        refusal = await self._why_refused(state)
        if refusal is not None:
            if refusal != self._refusal:
                _LOGGER.error("%s", refusal)
            self._refusal = refusal
            self.client.mark_down(refusal)
            return
        self._refusal = ""
        async with self.database.writing() as connection:
            is_turn = await claim_chore(
                connection, "follow the upstream", now=self.clock(), every=_TURN
            )
            is_pruning = await claim_chore(
                connection, "forget callers of the upstream", now=self.clock(), every=_PRUNE
            )
        self.client.mark_up()
        self._newest = {name: owned.newest_withdrawal for name, owned in state.namespaces.items()}
        if is_turn:
            await self._note_ends(state)
            await self._apply_withdrawals()
            await self._apply_policies(state)
        await self._drop_some_differing()
        await self._collect()
        if is_pruning:
            await self.access.prune()

    async def _why_refused(self, state: UpstreamState) -> str | None:
        """Return why this server must not be a region of the upstream, or None."""
        url = self.client.url
        async with self.database.reading() as connection:
            known = await find_upstream_id(connection)
        if state.server == await self.ownership.own_id():
            return (
                f"{url} is this server itself, or has a copy of its database: set "
                "GRAPHSTASH_UPSTREAM_URL to the server that owns the namespaces"
            )
        if state.is_region:
            return (
                f"{url} is itself a region: set GRAPHSTASH_UPSTREAM_URL to its upstream, because "
                "regions of regions could form a cycle"
            )
        if not state.is_complete:
            return (
                f"GRAPHSTASH_UPSTREAM_TOKEN cannot read every namespace of {url}, so the region "
                "would miss withdrawals and policies: create a token with --grant 'write:*'"
            )
        if known is not None and state.server != known:
            return (
                f"{url} is another server than the one whose artifacts this region keeps "
                f"({state.server}, not {known}): set GRAPHSTASH_UPSTREAM_URL back, or start with "
                "an empty data directory or database"
            )
        return None

    async def _note_ends(self, state: UpstreamState) -> None:
        """Store where the lists of unused namespaces end: the region has nothing to withdraw there.
        If a job uses such a namespace during a partition, later withdrawals concern its bytes.
        """
        ends = {name: owned.newest_withdrawal for name, owned in state.namespaces.items()}
        changed = dict(ends.items() - self._noted.items())
        if changed:
            async with self.database.writing() as connection:
                await note_positions(connection, changed)
        self._noted = ends

    async def _apply_policies(self, state: UpstreamState) -> None:
        here = {each.namespace: each.policy for each in await self.policies.list_all()}
        for name, owned in state.namespaces.items():
            try:
                policy = owned.known_policy
            except ValidationError as error:
                if name not in self._unknown_policies:
                    _LOGGER.warning("the policy of %s is of a later release: %s", name, error)
                self._unknown_policies.add(name)
                continue
            if policy is not None and here.get(name) != policy:
                await self.policies.put(name, policy, UPSTREAM)
        for name in here:
            if name not in state.namespaces or state.namespaces[name].policy is None:
                await self.policies.remove(name, UPSTREAM)

    async def count_behind(self) -> int:
        """Return the number of followed namespaces with withdrawals that the last probe named and
        that the region has not applied.
        """
        async with self.database.reading() as connection:
            followed = await list_positions(connection)
        return sum(
            position.number < self._newest.get(namespace, LIST_START).number
            for namespace, position in followed.items()
        )

    async def _apply_withdrawals(self) -> None:
        """Apply the withdrawals of all namespaces. One that fails delays no other one."""
        async with self.database.reading() as connection:
            followed = await list_positions(connection)
        failed: dict[Namespace, Exception] = {}
        for namespace, position in followed.items():
            try:
                await self._follow(namespace, position)
            except (UpstreamError, ServerError) as error:
                failed[namespace] = error
                self.client.count("follow_failed")
                if not self.client.is_up.is_set():
                    break
        if failed:
            _LOGGER.warning(
                "could not apply the withdrawals of %d namespaces, will retry; of %s: %s",
                len(failed),
                *next(iter(failed.items())),
            )

    async def _follow(self, namespace: Namespace, position: ListPosition) -> None:
        """Apply the withdrawals of a namespace after a position."""
        newest = self._newest.get(namespace, LIST_START)
        last = None
        while position not in (last, newest):
            page, doubted = await self._page(namespace, position)
            applied = page.position
            if page.is_complete:
                self._comparisons.pop(namespace, None)
                await self._apply(namespace, page, doubted=doubted, position=position)
            else:
                comparison = self._comparisons.get(namespace)
                if comparison is None or comparison.start != position:
                    comparison = await self._begin_comparison(namespace, position, page.position)
                if not await self._compare_some(namespace, comparison):
                    break
                del self._comparisons[namespace]
                await self._break_list(namespace)  # hosts may have copied what was set aside since
                applied = comparison.end
            async with self.database.writing() as connection:
                if not await put_position(connection, namespace, applied, after=position):
                    break
            last, position = position, applied
            if doubted:
                self._differing[namespace] = None

    async def _apply(
        self, namespace: Namespace, page: WithdrawalList, *, doubted: int, position: ListPosition
    ) -> None:
        """Apply the entries of a page. Doubt those with a number below `doubted`."""
        for entry in page.withdrawals:
            if entry.number < doubted:
                await self._doubt(namespace, entry)
            elif await self._is_at(namespace, position):
                await self._withdraw(namespace, entry)
        if any(entry.number < doubted for entry in page.withdrawals):
            await self._break_list(namespace)  # hosts may have copied what was set aside since

    async def _is_at(self, namespace: Namespace, position: ListPosition) -> bool:
        """Return whether the region has still applied the withdrawals up to a position. Otherwise,
        another process has applied more, and jobs may have published the same bytes again.
        """
        async with self.database.reading() as connection:
            return await find_position(connection, namespace) == position

    async def _page(self, namespace: Namespace, after: ListPosition) -> tuple[WithdrawalList, int]:
        """Return the withdrawals after a position, and the number of the first that is certainly
        new.

        The list does not continue at a position that the upstream lost when it was restored from a
        backup. If it then still has an earlier position of this region, or its first entry, return
        all withdrawals between this and the next position that the list lacks, and a page after
        them. The list then names every withdrawal that the region has not applied: an artifact that
        it does not name was not withdrawn, although the upstream may lack it.
        """
        page = await self._read_page(namespace, after)
        if page.is_complete or after == LIST_START or self._is_comparing(namespace, after):
            return page, 0
        async with self.database.reading() as connection:
            earlier = await find_earlier(connection, namespace)
        lacked = after
        for known in (*earlier, LIST_START):
            older = await self._read_page(namespace, known)
            if older.is_complete:
                return await self._read_until(namespace, older, lacked.number), lacked.number
            lacked = known
        return page, 0

    async def _read_until(
        self, namespace: Namespace, page: WithdrawalList, number: int
    ) -> WithdrawalList:
        """Read further pages until the list ends or reaches a number."""
        while page.position.number < number and page.position != page.newest:
            more = await self._read_page(namespace, page.position)
            if not more.is_complete:
                raise UpstreamError(f"the withdrawals of {namespace} changed while they were read")
            page = more.model_copy(update={"withdrawals": page.withdrawals + more.withdrawals})
        if page.withdrawals and page.withdrawals[0].number < number:
            await self._break_list(namespace)
        return page

    async def _break_list(self, namespace: Namespace) -> None:
        """Give this server's own list a gap: hosts set their copies aside, and a download that
        began before stores none (`queries.upstream.is_withdrawn_since`).
        """
        async with self.database.writing() as connection:
            await add_gap(connection, namespace, now=self.clock())
            await lock_position(connection, namespace)  # see `_refuse_withdrawn` of uploads

    def _is_comparing(self, namespace: Namespace, start: ListPosition) -> bool:
        comparison = self._comparisons.get(namespace)
        return comparison is not None and comparison.start == start

    async def _read_page(self, namespace: Namespace, after: ListPosition) -> WithdrawalList:
        path = f"{API_PREFIX}/{namespace}/withdrawals?after={after}"
        answer = await self.client.ask(path)
        if answer.status != 200:
            raise UpstreamError(f"the withdrawals of {namespace} answer {answer.status}")
        return answer.parse(WithdrawalList)

    async def _withdraw(self, namespace: Namespace, entry: Withdrawal) -> None:
        if (withdrawn := _withdrawn(namespace, entry)) is not None:
            key, digest, cause = withdrawn
            await self._drop(key, digest, cause=cause)
            self.client.count("withdrawn")

    async def _doubt(self, namespace: Namespace, entry: Withdrawal) -> None:
        """Set an artifact aside unless the upstream has it. The restored upstream may have
        withdrawn it, or the region may have applied this withdrawal before the artifact was
        published again.
        """
        if (withdrawn := _withdrawn(namespace, entry)) is None:
            return
        key, digest, _ = withdrawn
        copy = await self.artifacts.find_row(key)
        if copy is not None and copy.digest.sha256 == digest.sha256:
            found = await self.client.look_up(namespace, [key], is_comparison=True)
            if not any(each.digest == str(digest) for each in found.found):
                await self.set_aside.add(copy)

    async def _drop(self, key: StoredKey, digest: Digest, *, cause: WithdrawalCause) -> None:
        if await self._delete(key, digest, cause=cause):
            return
        async with self.database.writing() as connection:
            await add_withdrawals(connection, [(key, digest)], cause=cause, now=self.clock())
            await lock_position(connection, key.namespace)  # see `_refuse_withdrawn` of uploads
        await self._delete(key, digest, cause=cause)

    async def _delete(self, key: StoredKey, digest: Digest, *, cause: WithdrawalCause) -> bool:
        withdrawn = await self.artifacts.withdraw(
            key, actor=UPSTREAM, digest=str(digest), cause=cause
        )
        if withdrawn is None:
            return False
        self._uncollected.append(withdrawn)
        return True

    async def _collect(self) -> None:
        """Delete the bytes of deleted artifacts. Leave them to maintenance if that takes long."""
        digests, self._uncollected = self._uncollected, []
        with suppress(TimeoutError):
            async with asyncio.timeout(_COLLECT_SECONDS):
                await self.artifacts.collect(digests)

    async def _begin_comparison(
        self, namespace: Namespace, start: ListPosition, end: ListPosition
    ) -> "_Comparison":
        await self._break_list(namespace)
        self._comparisons[namespace] = comparison = _Comparison(start, end)
        return comparison

    async def drop_differing(self) -> None:
        """Drop each copy whose bytes differ from the upstream's, in the next rounds: the upstream
        evicted or lost the artifact, which its list does not say, and a job then published another
        one. So all regions serve the same executable. Keep the copies that the upstream lacks.
        """
        async with self.database.reading() as connection:
            followed = await list_positions(connection)
        self._differing = dict.fromkeys(followed) | self._differing

    async def _drop_some_differing(self) -> None:
        """Compare some pages of copies, see `drop_differing`. The namespaces take turns, so neither
        a large one nor one with a low rate delays others.
        """
        for _ in range(_PAGES_AT_ONCE):
            if not self._differing:
                return
            namespace, after = next(iter(self._differing.items()))
            page = await self._page_of_sent(namespace, after)
            del self._differing[namespace]
            if page is None:
                continue
            try:
                await self._drop_differing(namespace, page[0])
                after = page[1]
            except UpstreamError as error:
                _LOGGER.warning("could not compare copies in %s, will retry: %s", namespace, error)
                return
            finally:
                self._differing[namespace] = after

    async def _drop_differing(self, namespace: Namespace, copies: Sequence[Artifact]) -> None:
        if not copies:
            return
        keys = [row.key for row in copies]
        found = await self.client.look_up(namespace, keys, is_comparison=True)
        digests = {each.key: each.digest for each in found.found}
        for row in copies:
            digest = str(row.digest)
            if row.withheld_at is None and digests.get(row.key.key, digest) != digest:
                await self._drop(row.key, row.digest, cause=WithdrawalCause.REPLACED)

    async def _page_of_sent(
        self, namespace: Namespace, after: StoredKey | None
    ) -> tuple[list[Artifact], StoredKey] | None:
        """Return the copies of a page that are not queued, and the last key of the page. None if no
        copy follows. Call it before a look-up, because a queued artifact may be sent after it.
        """
        async with self.database.reading() as connection:
            rows = await list_stored_rows(connection, namespace, after=after, limit=_PAGE)
        sent = [row for row in rows if row.pinned_until != QUEUED_UNTIL]
        return (sent, rows[-1].key) if rows else None

    async def _compare_some(self, namespace: Namespace, comparison: "_Comparison") -> bool:
        """Set the copies aside that the upstream does not have, after a gap in its list: they may
        have been withdrawn. Queued artifacts stay. Return whether all copies have been compared.
        Each call compares some, so that other namespaces need not wait for a large one.
        """
        for _ in range(_PAGES_AT_ONCE):
            page = await self._page_of_sent(namespace, comparison.compared)
            if page is None:
                return True
            sent, last = page
            if sent:
                keys = [row.key for row in sent]
                found = await self.client.look_up(namespace, keys, is_comparison=True)
                valid = {(each.key, each.digest) for each in found.found}
                for row in sent:
                    if (row.key.key, str(row.digest)) not in valid:
                        await self.set_aside.add(row)
                    elif row.withheld_at is not None:
                        await self.set_aside.confirm(row.key, row.digest)
            comparison.compared = last
        return False


def _withdrawn(
    namespace: Namespace, entry: Withdrawal
) -> tuple[StoredKey, Digest, WithdrawalCause] | None:
    """Parse a withdrawal. Return None for one of a later release, whose artifacts no job of this
    server reads.
    """
    try:
        return (
            StoredKey.parse_path(f"{namespace}/{entry.key}"),
            Digest.parse(entry.digest, size_bytes=0),
            WithdrawalCause(entry.cause),
        )
    except (InvalidValueError, ValueError):
        return None


@dataclass
class _Comparison:
    """A comparison of all copies of a namespace with the upstream's artifacts.

    Attributes:
        start: position at which the upstream's list does not continue.
        end: end of the upstream's list when the comparison began. Of later withdrawals, the
            comparison finds only some, so the region reads the list from here on.
        compared: last compared artifact.
    """

    start: ListPosition
    end: ListPosition
    compared: StoredKey | None = None
