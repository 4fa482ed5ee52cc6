"""Measure the costs of a JAX job for its process, to the end of its uploads.

    costs_jax.py REPORT {small,gpt} [--count N]

small: N programs of a few operations, each run once; gpt: two steps of `gpt_jax.py`.
"""

import argparse
import atexit
import json
import runpy
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
parser.add_argument("job", choices=["small", "gpt"])
parser.add_argument("--count", type=int, default=100)
options = parser.parse_args()


def tell():
    cpu, wall = time.process_time(), time.monotonic()
    costs = {"all_cpu": cpu, "cpu": cpu - began[0], "wall": wall - began[1]}
    options.report.write_text(json.dumps(costs))


atexit.register(tell)  # registered before JAX is imported, so that it runs after the uploads

import jax
import numpy as np

jax.devices()
began = time.process_time(), time.monotonic()
if options.job == "gpt":
    script = Path(__file__).with_name("gpt_jax.py")
    sys.argv = [str(script), str(options.report), "--steps", "2"]
    runpy.run_path(str(script), run_name="__main__")
else:
    x = np.arange(8, dtype=np.float32)
    for number in range(options.count):
        jax.jit(lambda x, n=number: (x * float(n + 1) + jax.numpy.sin(x)).sum())(x)
