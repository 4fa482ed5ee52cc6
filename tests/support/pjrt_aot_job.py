"""Compiles a tiny program for a TPU that is not there; runs in the environment `jax-newest`."""

import argparse
import json
import os
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
options = parser.parse_args()

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
sharding = SingleDeviceSharding(topology.devices[0])
x = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=sharding)
compiled = jax.jit(lambda x: jnp.tanh(x) * 2).lower(x).compile()
options.report.write_text(json.dumps({"text": compiled.as_text()}))
