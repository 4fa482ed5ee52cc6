"""A job that calls a Helion kernel, which Helion tunes on the CPU: Pallas in interpret mode.

Helion's own cache stores and looks up; its search has two configurations. Its host is the folder of
its report.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
parser.add_argument("--plant", nargs="*", default=[], help="publishes these as entries")
parser.add_argument("--planted", type=int, default=0, help="looks for so many of them")
parser.add_argument("--broken-team", action="store_true", help="the team's entries fail")
options = parser.parse_args()

os.environ |= {
    "HELION_CACHE_DIR": str(options.report.parent / "helion"),
    "HELION_PALLAS_INTERPRET": "1",
    "HELION_REMOTE_CACHE_BACKEND": "graphstash.tuning.targets.helion.TeamBackend",
    "JAX_PLATFORMS": "cpu",
}

import helion
import helion.language as hl
import torch
from helion.autotuner import FiniteSearch
from helion.autotuner.remote_cache import RemoteAutotuneCache

from graphstash.tuning.targets import helion as team
from graphstash.tuning.targets.helion import TeamBackend

CONFIGS = [helion.Config(block_sizes=[rows, 64]) for rows in (32, 64)]
measured = []


class Search(FiniteSearch):
    """Counts what Helion measures."""

    def _autotune(self):
        measured.extend(self.configs)
        return super()._autotune()


def tuned(bound, args, **_):
    return RemoteAutotuneCache(Search(bound, args, CONFIGS))


@helion.kernel(backend="pallas", autotuner_fn=tuned)
def add(x, y):
    out = torch.empty_like(x)
    for tile in hl.tile(x.size()):
        out[tile] = x[tile] + y[tile]
    return out


def cache_of(rows):
    args = (torch.ones(rows, 64), torch.ones(rows, 64))
    bound = add.bind(args)
    return RemoteAutotuneCache(Search(bound, args, CONFIGS))


if options.broken_team:
    team._exchange_of = team._listed = lambda *_, **__: 1 // 0
x, y = torch.randn(64, 64), torch.randn(64, 64)
search = Search(add.bind((x, y)), (x, y), CONFIGS)
# Helion names no hardware for a CPU here, although it does in the key of an entry.
key = RemoteAutotuneCache(search).key
search._get_current_hardware_and_specialization = lambda: (
    key.hardware,
    str(key.specialization_key),
)
similar = search._find_similar_cached_configs(4)
report: dict[str, Any] = {"similar": [list(each.flat_config) for each in similar]}
report["is_right"] = bool(torch.allclose(add(x, y), x + y))
report |= {"chosen": dict(add.bind((x, y))._config), "measured": len(measured)}
for number, data in enumerate(options.plant):
    TeamBackend().put(cache_of(100 + number).key.stable_hash(), data)
found = [cache_of(100 + number).get() for number in range(options.planted)]
report["found"] = [each if each is None else str(each) for each in found]
options.report.write_text(json.dumps(report))
