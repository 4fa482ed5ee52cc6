"""Compiles for a TPU by hand, in a job that knows nothing of graphstash; JAX logs its key."""

import argparse
import json
import os
import re
import sys
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
options = parser.parse_args()
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import logging

import jax
import jax_prewarm_job
from jax.experimental import topologies


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


logged = Lines()
logger = logging.getLogger("jax._src.cache_key")
logger.addHandler(logged)
logger.setLevel(logging.DEBUG)
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
step, arguments = jax_prewarm_job.abstract_step(devices)
step.lower(*arguments).compile()
found = [re.search(r"hash (of|after) serializ\w+ (.+): (\w+)", line) for line in logged.lines]
found = [match.groups() for match in found if match]
options.report.write_text(
    json.dumps(
        {
            "jax": jax.__version__,
            "components": {name: digest for which, name, digest in found if which == "of"},
            "whole": [digest for which, _, digest in found if which == "after"][-1],
        }
    )
)
