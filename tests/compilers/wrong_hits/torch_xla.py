"""Pairs of programs for torch_xla's own CPU runtime."""

import os
from typing import Any

from compilers.wrong_hits.pairs import Pair, Relation, pair

__all__ = ["PAIRS", "SETTINGS", "VERSIONS", "install", "prepare"]

VERSIONS = {"2.7.0": ""}
"""Environment by torch_xla's version; empty is the tests' own."""

SETTINGS = {"hooks": ("torch_xla",)}


def prepare() -> None:
    """Import torch_xla without its runtime."""
    os.environ["PJRT_DEVICE"] = "CPU"

    import torch_xla  # noqa: F401 - imported once, for all programs

    import graphstash.hooks.torch_xla.hook  # noqa: F401 - imported once, for all programs


def install(cache: Any) -> None:
    from graphstash.hooks.torch_xla.hook import install

    assert install(cache) is not None


_IMPORT = """
import os

import torch
import torch.nn.functional as F
import torch_xla
"""

_START = """
HERE
device = torch_xla.device()


def of(*shape, **options):
    return torch.ones(*shape, device=device, **options)


def look_up(*results):
    torch_xla.sync()
"""


def _evaluates(name: str, expression: str, *values: str, **relation: Any) -> Pair:
    text = f"{_IMPORT}{_START.replace('HERE', '')}\nlook_up({expression})\n"
    return pair(name, text, *values, **relation)


def _after(name: str, *settings: str, **relation: Any) -> Pair:
    """Return a pair that makes a setting before the runtime starts."""
    return pair(name, f"{_IMPORT}{_START}\nlook_up(of(4, 4) @ of(4, 4))\n", *settings, **relation)


_TRAINING = """
model = torch.nn.Sequential(torch.nn.Linear(4, 4), HERE, torch.nn.Linear(4, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(of(2, 4)).sum().backward()
optimizer.step()
look_up()
"""

_SCALER = """
from torch.amp import GradScaler

weight = of(4, requires_grad=True)
scaler = GradScaler("xla", HERE)
scaler.scale((weight * 2).sum()).backward()
optimizer = torch.optim.SGD([weight], lr=0.1)
scaler._scale = torch.full((1,), 2.0).to(device)
scaler._growth_tracker = torch.zeros(1, dtype=torch.int32).to(device)
torch._amp_update_scale_(
    scaler._scale,
    scaler._growth_tracker,
    torch.zeros(1).to(device),
    scaler.get_growth_factor(),
    scaler.get_backoff_factor(),
    scaler.get_growth_interval(),
)
look_up()
"""

_RANDOM = """
HERE
result = torch.rand(4, device=device)
look_up()
"""

_LATE = """
start = torch_xla._XLAC._init_computation_client
HERE
result = torch.ones(4, device=torch_xla.device()).sin()
torch_xla.sync()
"""

_CUSTOM_CALL = (
    "torch_xla._XLAC._xla_custom_call([of(4)], 'target', [[4]], [torch.float32], False, "
    "HERE, 0, {})"
)

_QUANTIZE = (
    "torch_xla._XLAC._xla_HEREquantize_tensor(of(2, 2), [1.0, 2.0], [0, 0], -128, 127, 'int8', %s)"
)

_INDEX = "torch.tensor([1], device=device)"


def _trains(name: str, text: str, *values: str, **relation: Any) -> Pair:
    return pair(name, _IMPORT + _START.replace("HERE", "") + text, *values, **relation)


def _late(name: str, *values: str, **relation: Any) -> Pair:
    """Return a pair with settings before and after the start of the runtime."""
    return pair(name, _IMPORT + _LATE, *values, **relation)


_SWITCH = "os.environ['XLA_RNG_BIT_GENERATOR'] = 'philox'"
_FAST = "os.environ['XLA_FLAGS'] = '--xla_cpu_enable_fast_math=true'"
_FILE = "open('flags', 'w').write('--xla_cpu_enable_fast_math=true\\n'); "
_FLAG_FILE = f"{_FILE}os.environ['XLA_FLAGS'] = 'flags'"

_ONE_CPU = "cpus = os.sched_getaffinity(0); os.sched_setaffinity(0, {min(cpus)})"
_ALL_CPUS = "os.sched_setaffinity(0, cpus)"
_NONE = "del os.environ['XLA_FLAGS']"
_SYNC = "os.environ['PJRT_CPU_ASYNC_CLIENT'] = '0'"

PAIRS = (
    # Attributes that torch_xla omits from graph names
    _evaluates("celu alpha", "F.celu(of(4), HERE)", "1.0", "2.0"),
    _trains("celu alpha in training", _TRAINING, "torch.nn.CELU(1.0)", "torch.nn.CELU(2.0)"),
    _trains("elu alpha in training", _TRAINING, "torch.nn.ELU(1.0)", "torch.nn.ELU(0.5)"),
    _trains("elu or selu in training", _TRAINING, "torch.nn.ELU(1.0)", "torch.nn.SELU()"),
    _evaluates("pixel_shuffle factor", "F.pixel_shuffle(of(1, 16, 4, 4), HERE)", "2", "4"),
    _trains("growth factor", _SCALER, "growth_factor=2.0", "growth_factor=4.0"),
    _trains("backoff factor", _SCALER, "backoff_factor=0.5", "backoff_factor=0.25"),
    _trains("growth interval", _SCALER, "growth_interval=2000", "growth_interval=10"),
    _evaluates(
        "divisor of avg_pool2d",
        "F.avg_pool2d(of(1, 1, 4, 4), 2, divisor_override=HERE)",
        "None",
        "7",
    ),
    _evaluates(
        "divisors of avg_pool2d", "F.avg_pool2d(of(1, 1, 4, 4), 2, divisor_override=HERE)", "3", "7"
    ),
    _evaluates(
        "divisor of avg_pool3d",
        "F.avg_pool3d(of(1, 1, 4, 4, 4), 2, divisor_override=HERE)",
        "8",
        "5",
    ),
    _evaluates("index_add dim", f"of(1, 1).index_add(HERE, {_INDEX}, of(1, 1))", "0", "1"),
    _evaluates(
        "index_copy dim", f"of(2, 2).index_copy(HERE, {_INDEX}, of(2, 2)[:1, :1])", "0", "1"
    ),
    _evaluates("quantize axis", _QUANTIZE.replace("HERE", "") % "HERE", "0", "1"),
    _evaluates("dequantize axis", _QUANTIZE.replace("HERE", "de") % "HERE", "0", "1"),
    # Attributes that no key can cover
    *(
        _evaluates(name, expression, reason=reason)
        for name, expression, reason in (
            ("custom call", _CUSTOM_CALL.replace("HERE", "'a'"), "custom_call"),
            ("exponential", "of(4).exponential_()", "exponential_"),
            ("gumbel softmax", "F.gumbel_softmax(of(4))", "exponential_"),
            ("bernoulli with a tensor", "of(4).bernoulli_(of(1))", "bernoulli_ with a tensor"),
            (
                "empty tensor of another dtype",
                "torch.cat([of(4), of(0, dtype=torch.float64)])",
                "cat",
            ),
            ("two values of one attribute", "F.celu(of(4), 1.0), F.celu(of(4), 2.0)", "celu"),
            (
                "divisor beside no divisor",
                (
                    "F.avg_pool2d(of(1, 1, 4, 4), 2), "
                    "F.avg_pool2d(of(1, 1, 4, 4), 2, divisor_override=7)"
                ),
                "avg_pool",
            ),
        )
    ),
    # Attributes that graph names contain
    _evaluates("operation", "of(4).HERE()", "sin", "cos"),
    _evaluates("shape", "of(HERE).sin()", "4", "8"),
    # Settings of the process
    _after("matmul precision", "", "torch_xla._XLAC._xla_set_mat_mul_precision('highest')"),
    _after("denormal numbers as zero", "", "torch.set_flush_denormal(True)"),
    _after("XLA flags", "", _FAST),
    _after("file of XLA flags", "", _FLAG_FILE),
    _after("compilation by StableHLO", "", "os.environ['XLA_STABLEHLO_COMPILE'] = '1'"),
    _after("type of all tensors", "", "os.environ['XLA_USE_BF16'] = '1'"),
    _after("number of threads", "", "os.environ['NPROC'] = '1000'"),
    _late(
        "number of threads before and after the start",
        "os.environ['NPROC'] = '1000'; start()",
        "start(); os.environ['NPROC'] = '1000'",
    ),
    _after("number of devices", "", "os.environ['CPU_NUM_DEVICES'] = '2'"),
    _trains("generator of random numbers", _RANDOM, "", _SWITCH),
    # Settings before and after the runtime reads them
    *(
        _late(f"{name} before and after the start", before, after)
        for name, before, after in (
            ("file of flags", f"{_FLAG_FILE}; start()", f"start(); {_FLAG_FILE}"),
            ("asynchronous client", f"{_SYNC}; start()", f"start(); {_SYNC}"),
            ("flags", f"{_FAST}; start()", f"start(); {_FAST}"),
        )
    ),
    _late("CPUs around the start", "start()", f"{_ONE_CPU}; start(); {_ALL_CPUS}"),
    _late("CPUs after the start", "start()", f"start(); {_ONE_CPU}", relation=Relation.EQUAL),
    _late("flags after the start", "start()", f"start(); {_FAST}"),
    _late("flags that were there at the start", "start()", f"{_FAST}; start(); {_NONE}"),
    _late("flags between two graphs", f"start(); {_FAST}; {_NONE}", f"{_FAST}; start()"),
    # Programs that compile to one executable
    _evaluates(
        "side of solve_triangular, which torch computes",
        "torch.linalg.solve_triangular(of(2, 2), of(2, 2), upper=True, left=HERE)",
        "True",
        "False",
        relation=Relation.EQUAL,
    ),
    _evaluates("nothing but the host", "of(4).sin()", relation=Relation.EQUAL),
    _evaluates("number that is a parameter", "of(4) * HERE", relation=Relation.EQUAL),
    _evaluates(
        "slope that is a parameter",
        "F.leaky_relu(of(4), HERE)",
        "0.1",
        "0.2",
        relation=Relation.EQUAL,
    ),
    _evaluates(
        "values of data", "torch.full((4,), HERE.0).to(device) * 2", relation=Relation.EQUAL
    ),
    _after("seed", "torch.manual_seed(1)", "torch.manual_seed(2)", relation=Relation.EQUAL),
    _after("threads", "", "torch.set_num_threads(1)", relation=Relation.EQUAL),
    _after(
        "order of XLA flags",
        "os.environ['XLA_FLAGS'] = '--xla_cpu_enable_fast_math=true --xla_backend_extra_options='",
        "os.environ['XLA_FLAGS'] = '--xla_backend_extra_options= --xla_cpu_enable_fast_math=true'",
        relation=Relation.EQUAL,
    ),
    _after(
        "directory of dumps",
        "os.environ['XLA_FLAGS'] = '--xla_dump_to=one'",
        "os.environ['XLA_FLAGS'] = '--xla_dump_to=other'",
        relation=Relation.EQUAL,
    ),
    _trains(
        "usual value in another graph",
        "HERE\nresult = of(4).sin()\nlook_up()\n",
        "",
        "F.celu(of(4), 1.0)",
        relation=Relation.EQUAL,
    ),
    _trains("same growth factor", _SCALER, "growth_factor=4.0", relation=Relation.EQUAL),
    _trains("same alpha in training", _TRAINING, "torch.nn.CELU(2.0)", relation=Relation.EQUAL),
)
