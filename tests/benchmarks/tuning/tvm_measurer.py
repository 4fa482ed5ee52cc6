"""Measure matrix multiplications of TVM for a process in another environment.

    python tvm_measurer.py M K N

Each line of standard input is a list of configurations as JSON, each line of standard output the
list of their measurements. A single configuration is measured as in a search. Several are
finalists: they are measured in turns, in a new process and more thoroughly.
"""

import json
import sys

from graphstash.tuning.measuring import Measurement, Method, Pool
from graphstash.tuning.space import Value
from graphstash.tuning.targets.tvm_gemm import TvmGemm

THOROUGH = Method(samples=25)


def main() -> None:
    target = TvmGemm(*map(int, sys.argv[1:]))
    with Pool(target) as pool:
        for line in sys.stdin:
            found = measured(pool, json.loads(line))
            print(json.dumps([each.to_json() for each in found]), flush=True)


def measured(pool: Pool, configurations: list[dict[str, Value]]) -> list[Measurement]:
    if len(configurations) == 1:
        pool.submit(configurations[0])
        return pool.results()
    with Pool(pool.target, method=THOROUGH) as alone:
        return alone.compare(configurations)


if __name__ == "__main__":
    main()
