"""One process of a job on JAX whose array and program span all of them.

    ranks_jax_job.py REPORT --rank 0 --size 2 --broken 1 --port 29500

The report: results, how often XLA compiled the collective program, what the cache counted.
"""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
parser.add_argument("--rank", type=int)
parser.add_argument("--size", type=int)
parser.add_argument("--broken", default="")
parser.add_argument("--port", type=int)
options = parser.parse_args()

os.environ["JAX_PLATFORMS"] = "cpu"
if str(options.rank) in options.broken.split(","):
    os.environ["GRAPHSTASH_URL"] = "http://127.0.0.1:9"

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import compiler
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import graphstash

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{options.port}", options.size, options.rank)

# The second name is that of 0.4.31.
names = ("backend_compile_and_load", "backend_compile")
name = next(name for name in names if hasattr(compiler, name))
compile_program = getattr(compiler, name)
compiled = []


def compile_and_note(backend, module, *arguments, **named):
    compiled.append(str(module.operation.attributes["sym_name"]))
    return compile_program(backend, module, *arguments, **named)


setattr(compiler, name, compile_and_note)

mesh = Mesh(np.array(jax.devices()), ("ranks",))
split = NamedSharding(mesh, PartitionSpec("ranks"))
whole = NamedSharding(mesh, PartitionSpec())
local = np.arange(8.0, dtype=np.float32) + options.rank
x = jax.make_array_from_process_local_data(split, local)


def collective(x):
    return jnp.sin(x).sum()


total = jax.jit(collective, out_shardings=whole)(x)
report = {
    "total": float(total).hex(),
    "compiled": sum("collective" in name for name in compiled),
    "stats": asdict(graphstash.stats()),
}
options.report.write_text(json.dumps(report))
