"""A job that calls a tuned Triton kernel, on a host whose GPU is not there.

Triton compiles for real, by ptxas; a call ends before the launch (`warmup`), and so the benchmark
compiles and then takes a made-up time. Its host is the folder of its report.
"""

import argparse
import importlib.util
import json
import os
import stat
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
parser.add_argument("--n", type=int, action="append", default=[])
parser.add_argument("--no-eight-warps", action="store_true", help="ptxas refuses 8 warps")
parser.add_argument("--plain", action="store_true", help="triton.autotune instead")
parser.add_argument("--nothing-works", action="store_true", help="the GPU runs nothing")
parser.add_argument("--broken", choices=["team", "device"], help="what cannot be asked")
options = parser.parse_args()

host = options.report.parent
runs = host / "ptxas-runs"
runs.touch()
package = Path(str(importlib.util.find_spec("triton").origin)).parent
refuse = "cat $(echo $* | tr ' ' '\\n' | grep ptx$) | grep -q 'ntid 256' && exit 255"
for name in ("ptxas", "ptxas-blackwell"):
    real = package / "backends" / "nvidia" / "bin" / name
    wrapper = host / name
    count = f"echo run >> {runs}" + (f"; {refuse}" if options.no_eight_warps else "")
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) ;; *) {count};; esac\nexec {real} "$@"\n'
    )
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    if real.exists():
        os.environ[f"TRITON_{name.upper().replace('-', '_')}_PATH"] = str(wrapper)
os.environ["TRITON_CACHE_DIR"] = str(host / "triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from graphstash.tuning.memory.team import TeamMemory
from graphstash.tuning.targets import triton as target


class Driver:
    """Says that there is a GPU."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class Pointer:
    """What Triton asks a tensor for."""

    dtype = "torch.float32"

    def data_ptr(self):
        return 0


driver.set_active(Driver())
measured = []


def do_bench(call, quantiles):
    call()
    config = kernel.benched
    measured.append(str(config))
    time = abs(config.num_warps - 7) + config.kwargs["BLOCK"] / 1024  # 8 warps are best, then 4
    if options.nothing_works:
        time = float("inf")
    return [time, time * 0.99, time * 1.01]


decorate = triton.autotune if options.plain else target.autotune


@decorate(  # type: ignore[untyped-decorator]
    configs=[
        triton.Config({"BLOCK": block}, num_warps=warps, **({"maxnreg": 64} if warps == 8 else {}))
        for block in (256, 512)
        for warps in (2, 4, 8)
    ],
    key=["n"],
    do_bench=do_bench,
)
@triton.jit  # type: ignore[untyped-decorator]
def kernel(x, y, n, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def] # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


bench = kernel._bench


def note(*args, config, **meta):
    kernel.benched = config
    return bench(*args, config=config, **meta)


kernel._bench = note
if options.broken == "team":
    TeamMemory.schedule = lambda *_, **__: 1 // 0
elif options.broken == "device":
    target._device_type = None
chosen = []
for n in options.n or [1000]:
    for _ in range(2):
        kernel.run(Pointer(), Pointer(), n, grid=(1,), warmup=True)
    chosen.append([kernel.best_config.kwargs["BLOCK"], kernel.best_config.num_warps])
report = {
    "version": triton.__version__,
    "chosen": chosen,
    "measured": len(measured),
    "ptxas": len(runs.read_text().splitlines()),
}
options.report.write_text(json.dumps(report))
