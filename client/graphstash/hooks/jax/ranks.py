"""The rank store of a `jax.distributed` job, in JAX's coordination service."""

from functools import cache
from typing import Any, Final

import jax
from jax._src import distributed

__all__ = ["JaxRanks", "ranks"]

_MAX_WAIT_SECONDS: Final = 60.0
"""Maximum seconds per call; a longer wait consists of several calls."""

_MIN_WAIT_SECONDS: Final = 0.1
"""Minimum seconds per call. A wait shorter than the round trip to the service finds nothing."""


class JaxRanks:
    """A `RankStore` in the key-value store of the coordination service."""

    def __init__(self, client: Any, *, rank: int, size: int) -> None:
        self._client = client
        self.rank = rank
        self.size = size

    @property
    def compiles_together(self) -> bool:
        """Whether a compilation exchanges data with the job's other processes.

        On GPUs, XLA distributes autotuning among the processes (openxla/xla#22164). With
        `jax_share_binary_between_hosts`, all other processes wait for the first process's result.
        """
        shares = bool(getattr(jax.config, "jax_share_binary_between_hosts", False))
        return shares or jax.default_backend() == "gpu"

    def claim(self, name: str, value: bytes) -> bytes:
        """See `RankStore`."""
        try:
            self._client.key_value_set_bytes(name, value)
        except RuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            found: bytes = self._client.blocking_key_value_get_bytes(name, 10_000)
            return found
        return value

    def set(self, name: str, value: bytes) -> None:
        """See `RankStore`."""
        self._client.key_value_set_bytes(name, value)

    def wait(self, name: str, *, timeout_seconds: float) -> bytes | None:
        """See `RankStore`."""
        if timeout_seconds <= 0 and hasattr(self._client, "key_value_try_get_bytes"):  # 0.4.36
            return self._try_get(name)
        left = timeout_seconds
        while True:
            seconds = min(left, _MAX_WAIT_SECONDS)
            try:
                found: bytes = self._client.blocking_key_value_get_bytes(
                    name, int(max(seconds, _MIN_WAIT_SECONDS) * 1000)
                )
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            else:
                return found
            left -= seconds
            if left <= 0:
                return None

    def _try_get(self, name: str) -> bytes | None:
        try:
            found: bytes = self._client.key_value_try_get_bytes(name)
        except RuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
            return None
        return found

    def delete(self, name: str) -> None:
        """See `RankStore`."""
        self._client.key_value_delete(name)


def ranks() -> JaxRanks | None:
    """Return the store that this job's processes share, or None if the job has one process."""
    state = distributed.global_state
    if state.client is None or state.num_processes in (None, 1):
        return None
    return _ranks(state.client, state.process_id, state.num_processes)


@cache
def _ranks(client: Any, rank: int, size: int) -> JaxRanks:
    return JaxRanks(client, rank=rank, size=size)
