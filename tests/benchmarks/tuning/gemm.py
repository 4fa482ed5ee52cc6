"""Matrix multiplications that TVM compiles and this CPU runs, as problems for searchers.

TVM has an environment of its own, which is made on first use. Searchers stay in this process; a
process of that environment measures for them.
"""

import json
import math
import subprocess
from functools import partial
from pathlib import Path

from benchmarks.tuning.problems import Problem
from graphstash.tuning import GemmSpace
from support.environments import python_of

MEASURER = Path(__file__).with_name("tvm_measurer.py")


def gemms(lengths):
    """Yield a problem for each length: square matrices of float32, loops split into 4, 2 and 4."""
    for length in lengths:
        space = GemmSpace(length, length, length)
        with subprocess.Popen(
            [python_of("tvm"), MEASURER, *3 * [str(length)]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as measurer:
            compare = partial(_costs, measurer, space)
            _cost(compare, space.start)  # starts the measurer outside the measured time
            yield Problem(f"TVM {length}^3", space, partial(_cost, compare), compare=compare)


def _cost(compare, configuration):
    return compare([configuration])[0]


def _costs(measurer, space, configurations):
    measurer.stdin.write(json.dumps([space.named(each) for each in configurations]) + "\n")
    measurer.stdin.flush()
    if not (line := measurer.stdout.readline()):
        raise SystemExit("TVM cannot be measured here; the reason is above")
    return [math.inf if each["cost"] is None else each["cost"] for each in json.loads(line)]
