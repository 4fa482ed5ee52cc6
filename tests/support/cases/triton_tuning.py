"""Call a tuned Triton kernel on a host without a GPU.

ptxas really compiles. A call ends before the launch (`warmup`), so the benchmark compiles and then
uses an invented time. `support.compiler_jobs.TritonJobs` counts the runs of ptxas.
"""

from typing import Any

import triton
import triton.language as tl
from triton.runtime import driver

from graphstash.tuning.memory.team import TeamMemory
from graphstash.tuning.targets import triton as target
from support.cases.gpus import Driver, Pointer
from support.cases.triton_kernels import assembled


@triton.jit  # type: ignore[untyped-decorator] # Triton ships no types
def scaled(x, y, n, scale, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def] # noqa: N803 - Triton's convention
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * scale, mask=at < n)


def tuned(
    *, works: bool = True, broken: str = "", scale: float = 2.0, times: int = 3
) -> dict[str, Any]:
    """Call the kernel twice; return the measured, compiled and chosen configurations.

    Args:
        works: whether the GPU runs kernels.
        broken: "team" or "device", whose calls raise.
        scale: argument of the kernel that is part of `key`, and is not a size.
        times: how many times `do_bench` returns: the three quantiles, or 1 for a number.
    """
    driver.set_active(Driver())
    measured = []
    benched: Any = None

    def do_bench(call: Any, quantiles: Any) -> list[float] | float:
        call()
        measured.append(str(benched))
        time = abs(benched.num_warps - 7) + benched.kwargs["BLOCK"] / 1024  # 8 is best, then 4
        if not works:
            time = float("inf")
        return time if times == 1 else [time, time * 0.99, time * 1.01]

    configs = [
        triton.Config({"BLOCK": block}, num_warps=warps, **({"maxnreg": 64} if warps == 8 else {}))
        for block in (256, 512)
        for warps in (2, 4, 8)
    ]
    kernel: Any = target.autotune(configs=configs, key=["n", "scale"], do_bench=do_bench)(scaled)
    bench = kernel._bench

    def note(*args: Any, config: Any, **meta: Any) -> Any:
        nonlocal benched
        benched = config
        return bench(*args, config=config, **meta)

    kernel._bench = note
    if broken == "team":
        TeamMemory.schedule = lambda *_, **__: 1 // 0  # type: ignore[method-assign, assignment] # breaks it
    elif broken == "device":
        target._device_type = None  # type: ignore[assignment] # breaks it
    for _ in range(2):
        kernel.run(Pointer(), Pointer(), 1000, scale, grid=(1,), warmup=True)
    best = kernel.best_config
    return {
        "chosen": [best.kwargs["BLOCK"], best.num_warps],
        "measured": len(measured),
        "ptxas": assembled(),
    }
