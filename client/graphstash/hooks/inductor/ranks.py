"""The store of a `torch.distributed` job's process group, shared by its ranks."""

import os
import time
import weakref
from typing import Any, Final

import torch.distributed as dist
from torch._inductor import config

__all__ = ["TorchRanks", "ranks", "setting_with_rank"]

_POLL_SECONDS: Final = 0.02
_MAX_POLL_SECONDS: Final = 0.2


class TorchRanks:
    """A `RankStore` in torch's key-value store: a TCP, file or hash store.

    No call blocks inside the store, because NCCL's watchdog uses the same connection.

    The reference is weak: a store that outlived its process group would give the next group at the
    same address stale addresses.
    """

    def __init__(self, store: Any, *, rank: int, size: int) -> None:
        self._store = weakref.proxy(store)
        self.rank = rank
        self.size = size

    @property
    def compiles_together(self) -> bool:
        """Whether Inductor gathers from all ranks while it compiles a graph.

        It exchanges estimates for overlapping (`comms.py`, `overlap_scheduling.py`), compares
        graphs (`spmd_check.py`) or distributes autotuning (`distributed_autotune.py`).
        """
        overlap = getattr(config, "aten_distributed_optimizations", None)
        return bool(
            config.reorder_for_compute_comm_overlap
            or getattr(config, "distributed_max_autotune_gemm", False)
            or getattr(overlap, "enable_overlap_scheduling", False)
            or getattr(overlap, "spmd_check", False)
        )

    def claim(self, name: str, value: bytes) -> bytes:
        """See `RankStore`."""
        found: bytes = self._store.compare_set(name, "", value.decode())
        return found

    def set(self, name: str, value: bytes) -> None:
        """See `RankStore`."""
        self._store.set(name, value)

    def wait(self, name: str, *, timeout_seconds: float) -> bytes | None:
        """See `RankStore`."""
        until = time.monotonic() + timeout_seconds
        pause = _POLL_SECONDS
        while not self._store.check([name]):
            if time.monotonic() >= until:
                return None
            time.sleep(pause)
            pause = min(2 * pause, _MAX_POLL_SECONDS)
        found: bytes = self._store.get(name)
        return found

    def delete(self, name: str) -> None:
        """See `RankStore`."""
        self._store.delete_key(name)


def setting_with_rank() -> str:
    """Return the setting for which Inductor writes the rank into a graph after its key, or "".

    torch 2.15 does so when it merges several all-gathers into one (`bucketing.py`), or replaces one
    by local operations (`decomp_comms.py`).
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return ""
    if getattr(config, "bucket_all_gathers_fx", "none") != "none":
        return "bucket_all_gathers_fx"
    options = getattr(config, "aten_distributed_optimizations", None)
    names = ("collective_bucketing", "allow_comms_decompositions")
    return next((name for name in names if getattr(options, name, False)), "")


_known: Final[weakref.WeakKeyDictionary[Any, TorchRanks | None]] = weakref.WeakKeyDictionary()


def ranks() -> TorchRanks | None:
    """Return the store of this job's ranks, or None without a process group or with one rank.

    None also in a forked child with its parent's group, because both would use one connection.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    store = dist.distributed_c10d._get_default_store()
    if store not in _known:
        _known[store] = TorchRanks(store, rank=dist.get_rank(), size=dist.get_world_size())
    return _known[store]


def _after_fork() -> None:
    if dist.is_available() and dist.is_initialized():
        _known[dist.distributed_c10d._get_default_store()] = None


os.register_at_fork(after_in_child=_after_fork)
