"""Tasks of an invented kernel, which logs each build and its visible GPUs to a file."""

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from graphstash import tuning
from graphstash_schema import DeviceType

SPACE = tuning.ParameterSpace(
    {"tile": [8, 16, 32, 64, 128], "vector": [4, 8]}, constraints=["tile % vector == 0"]
)


def build(configuration: Mapping[str, Any]) -> Callable[[], Any]:
    """Build a kernel. Tiles above 64 fail."""
    with Path(os.environ["BUILT"]).open("a") as built:
        built.write(f"{configuration} on {os.environ.get('CUDA_VISIBLE_DEVICES')}\n")
    if configuration["tile"] > 64:
        raise ValueError("too large a tile")
    return lambda: configuration


def build_excessive(configuration: Mapping[str, Any]) -> Callable[[], Any]:
    """Hang for one configuration, and allocate 16 GiB for another."""
    match configuration:
        case {"tile": 64, "vector": 8}:
            signal.pause()
        case {"tile": 64, "vector": 4}:
            bytearray(16 * 1024**3)
    return build(configuration)


def build_nothing(configuration: Mapping[str, Any]) -> NoReturn:
    raise ValueError(configuration)


def cost(kernel: Callable[[], Any], calls: int) -> float:
    """Return a cost, lowest for a tile of 32 and a vector of 8."""
    del calls
    configuration = kernel()
    return float(1e-3 * (1 + abs(configuration["tile"] - 32) / 10 + 1 / configuration["vector"]))


def is_right(result: Any) -> bool:
    return result["tile"] != 32


def task_of(
    build: Callable[[Mapping[str, Any]], Any], *, target: str = "rows", **checks: Any
) -> tuning.Task:
    """Return a task of one kernel that a function builds."""
    problem = tuning.Problem("rows", (512,), "float32", DeviceType("cpu"), "made-up 1.0")
    return tuning.Task(
        problem, SPACE, tuning.CallableTarget(build, name=target, cost=cost, **checks)
    )


task = task_of(build)
other_target = task_of(build, target="rows of another library")
checked = task_of(build, is_right=is_right)
excessive = task_of(build_excessive)
impossible = task_of(build_nothing)
no_task = SPACE


class Undescribed(tuning.CallableTarget):
    """A target whose description is not JSON."""

    def describe(self) -> dict[str, Any]:
        return {"name": object()}


undescribed = tuning.Task(task.problem, SPACE, Undescribed(build, name="rows"))
