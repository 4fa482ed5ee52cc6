"""Measure matrix multiplications of TVM for a process in another environment.

    python tvm_measurer.py M K N

Each line of standard input is a list of configurations as JSON, each line of standard output the
list of their measurements. A single configuration is measured as in a search. Several are
finalists: they are compared in turns, in a new process.
"""

import json
import sys

from graphstash.tuning.measuring import Measurement, Pool
from graphstash.tuning.space import Value
from graphstash.tuning.targets.tvm_gemm import TvmGemm


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
    return pool.compare(configurations)


if __name__ == "__main__":
    main()
