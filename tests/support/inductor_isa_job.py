"""What becomes of code for AVX-512 on a host that generates code for AVX2.

    inductor_isa_job.py REPORT [--plain DIRECTORY]

First a function is compiled for AVX-512, and not run: this host may not have it. Then, with empty
directories of its own, it is compiled and run as on a host whose torch is told to use AVX2.
`--plain` uses a remote cache of torch without the hook, as plain as they come: a file per key of
torch.
"""

import argparse
import json
import os
import sys
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
parser.add_argument("--plain", type=Path)
options = parser.parse_args()
os.environ.pop("ATEN_CPU_CAPABILITY", None)  # the first function is for AVX-512 on any host

import torch
from torch._dynamo.utils import counters
from torch._inductor import cpu_vec_isa
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import fresh_inductor_cache

cpu_vec_isa.x86_isa_checker = lambda: ["avx2", "avx512"]

if options.plain:
    import torch._inductor.config
    from torch._inductor import remote_cache

    class Files(remote_cache.RemoteCacheBackend):
        def _get(self, key):
            file = options.plain / key
            return file.read_bytes() if file.exists() else None

        def _put(self, key, data):
            (options.plain / key).write_bytes(data)

    remote_cache.RemoteFxGraphCache.backend_override_cls = Files
    torch._inductor.config.fx_graph_remote_cache = True

torch.manual_seed(0)
# The graph cache is what is looked at; 1,000 is no multiple of a vector's length.
x = torch.randn(1000)


def work(x):
    return (x * 3 + 1).sigmoid() * x.exp()


class NotRunError(Exception):
    pass


def not_run(*args):
    raise NotRunError


def host(compute):
    torch._dynamo.reset()
    counters.clear()
    with fresh_inductor_cache(), torch.no_grad():
        try:
            error = (compute(x) - work(x)).abs().max().item()
        except NotRunError:
            error = None
    return {
        "isa": str(cpu_vec_isa.pick_vec_isa()),
        "fx": {name: n for name, n in counters["inductor"].items() if name.startswith("fxgraph")},
        "error": error,
    }


call, CompiledFxGraph.__call__ = CompiledFxGraph.__call__, not_run
first = host(torch.compile(work))
CompiledFxGraph.__call__ = call
os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
second = host(torch.compile(work))
report = {"first": first, "second": second}
report["has_hook"] = "graphstash.hooks.inductor" in sys.modules
options.report.write_text(json.dumps(report))
