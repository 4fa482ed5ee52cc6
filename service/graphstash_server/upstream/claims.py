"""Claims of a process on a download or a publish, so that no other process of the region begins it.

A claim is short, so that another process can soon do the work of a process that has died. A process
renews its claims while it works.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final

__all__ = ["CLAIM", "keep_renewed"]

_LOGGER = logging.getLogger(__name__)

CLAIM: Final = timedelta(seconds=30)
_RENEWALS: Final = 3
"""Renewals in the time of a claim."""


@asynccontextmanager
async def keep_renewed(renew: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Renew a claim while the body runs. No renewal runs after it."""

    async def work() -> None:
        while True:
            await asyncio.sleep(CLAIM.total_seconds() / _RENEWALS)
            try:
                await renew()
            except Exception as error:  # noqa: BLE001 - the next one may succeed
                _LOGGER.warning("could not renew a claim: %s", error)

    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
