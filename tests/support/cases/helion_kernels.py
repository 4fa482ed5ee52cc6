"""Call a Helion kernel, which Helion tunes on the CPU: Pallas in interpret mode.

Helion's own cache stores and looks up. Its search has two configurations.
"""

from collections.abc import Sequence
from typing import Any

import helion
import helion.language as hl
import torch
from helion.autotuner import FiniteSearch
from helion.autotuner.remote_cache import RemoteAutotuneCache

from graphstash.tuning.targets import helion as team
from graphstash.tuning.targets.helion import TeamBackend

CONFIGS = [helion.Config(block_sizes=[rows, 64]) for rows in (32, 64)]
measured: list[Any] = []


class Search(FiniteSearch):  # type: ignore[misc] # Helion ships no types
    """A search that records its measurements."""

    def _autotune(self) -> Any:
        measured.extend(self.configs)
        return super()._autotune()


def cache_of(bound: Any, arguments: Any, **_: Any) -> Any:
    return RemoteAutotuneCache(Search(bound, arguments, CONFIGS))


@helion.kernel(backend="pallas", autotuner_fn=cache_of)  # type: ignore[untyped-decorator] # Helion ships no types
def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(x.size()):
        out[tile] = x[tile] + y[tile]
    return out


def cache_of_rows(rows: int) -> Any:
    arguments = (torch.ones(rows, 64), torch.ones(rows, 64))
    return cache_of(add.bind(arguments), arguments)


def tuned(
    *, plant: Sequence[str] = (), planted: int = 0, is_broken: bool = False
) -> dict[str, Any]:
    """Return the configurations that Helion measured, chose and found.

    Args:
        plant: entries that the job publishes.
        planted: number of these entries that it looks up.
        is_broken: whether the team's entries fail.
    """
    if is_broken:
        team._exchange_of = team._fetch_listed = lambda *_, **__: 1 // 0  # type: ignore[assignment] # breaks it
    x, y = torch.randn(64, 64), torch.randn(64, 64)
    search = Search(add.bind((x, y)), (x, y), CONFIGS)
    # For a CPU, Helion names the hardware in the key of an entry, but not here.
    key = RemoteAutotuneCache(search).key
    search._get_current_hardware_and_specialization = lambda: (
        key.hardware,
        str(key.specialization_key),
    )
    report: dict[str, Any] = {
        "similar": [list(each.flat_config) for each in search._find_similar_cached_configs(4)],
        "is_right": bool(torch.allclose(add(x, y), x + y)),
        "chosen": dict(add.bind((x, y))._config),
        "measured": len(measured),
    }
    for number, data in enumerate(plant):
        TeamBackend().put(cache_of_rows(100 + number).key.stable_hash(), data)
    found = [cache_of_rows(100 + number).get() for number in range(planted)]
    return report | {"found": [each and str(each) for each in found]}
