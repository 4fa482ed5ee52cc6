"""Programs for torch_xla's own CPU runtime: operations, how they run, and settings.

The meaning of a program is the module to which torch_xla lowers it, which each program reports, and
the settings that affect the key. torch_xla's own name of a graph omits some attributes of
operations. Programs with one name may therefore lower to different modules.
"""

import random
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

from compilers.wrong_hits import torch_xla as pairs
from compilers.wrong_hits.generated.programs import laid_out, named
from compilers.wrong_hits.generated.recorder import Answer, asked_in_child

__all__ = ["AXES", "meaning", "prepare", "text"]


def _each(call: str, *values: object) -> tuple[str, ...]:
    return tuple(call.replace("HERE", str(value)) for value in values)


_INDEX = "torch.tensor([1, 0], device=device)"

OPERATIONS = named(
    *_each("x.HERE()", "sin", "cos", "exp", "tanh", "abs", "sigmoid", "floor", "round", "frac"),
    *_each("F.celu(x, HERE)", "1.0", "2.0", "3"),
    "F.celu(x, 2.0, inplace=True)",
    *_each("F.elu(x, HERE)", "1.0", "2.0"),
    *_each("F.HERE(x)", "selu", "silu", "mish", "hardswish", "hardsigmoid", "relu6", "logsigmoid"),
    *_each("F.gelu(x, approximate='HERE')", "none", "tanh"),
    *_each("F.hardtanh(x, HERE)", "-1, 1", "-2, 1", "-1, 2"),
    *_each("F.softplus(x, HERE)", "1, 20", "2, 20", "1, 10"),
    *_each("F.hardshrink(x, HERE)", "0.5", "0.25"),
    *_each("F.softshrink(x, HERE)", "0.5", "0.25"),
    *_each("F.threshold(x, HERE)", "0.5, 1", "0.25, 1", "0.5, 2"),
    *_each("F.leaky_relu(x, HERE)", "0.1", "0.2"),
    *_each("F.pixel_shuffle(x, HERE)", "1", "2", "4"),
    *_each("F.pixel_unshuffle(x, HERE)", "1", "2", "4"),
    *_each(
        "F.avg_pool2d(x, HERE)",
        *("2", "4", "2, 1", "2, 2, 1", "(2, 1)", "3, 2, 1, True", "3, 2, 1, False, False"),
        *("2, divisor_override=3", "2, divisor_override=7", "2, divisor_override=4"),
    ),
    *_each("F.avg_pool3d(x[None], 2HERE)", "", ", divisor_override=5", ", 1"),
    *_each("F.avg_pool1d(x[0], HERE)", "2", "4", "2, 1", "2, 2, 1, False, False"),
    *_each("F.max_pool2d(x, HERE)", "2", "4", "2, 1", "3, 2, 1", "3, 2, 1, ceil_mode=True"),
    *_each("F.adaptive_avg_pool2d(x, HERE)", "1", "2", "4", "(2, 4)"),
    *_each("F.adaptive_max_pool2d(x, HERE)", "1", "2"),
    *_each(f"s.index_add(HERE, {_INDEX}, s)", 0, 1),
    *_each(f"s.index_copy(HERE, {_INDEX}, s * 2)", 0, 1),
    *_each(f"s.index_fill(HERE, {_INDEX}, 3)", 0, 1),
    *_each(f"s.index_select(HERE, {_INDEX})", 0, 1),
    *_each(f"s.index_put(({_INDEX},), s, accumulate=HERE)", True, False),
    *_each("s.scatter(HERE, torch.zeros(2, 2, dtype=int, device=device), s * 2)", 0, 1),
    *_each("s.scatter_add(HERE, torch.zeros(2, 2, dtype=int, device=device), s)", 0, 1),
    *_each(
        "s.scatter_reduce(0, torch.zeros(2, 2, dtype=int, device=device), s, 'HERE')",
        *("sum", "prod", "amax", "amin"),
    ),
    *_each("s.gather(HERE, torch.zeros(2, 2, dtype=int, device=device))", 0, 1),
    *_each("F.softmax(x, HERE)", 0, 1, "1, dtype=torch.float64"),
    *_each("F.log_softmax(x, HERE)", 0, 1),
    *_each("x.var(HERE)", "0", "1", "0, correction=0", "0, correction=2", "0, keepdim=True"),
    *_each("x.std(HERE)", "0", "0, correction=0"),
    *_each("x.sum(HERE)", "0", "1", "0, True", "0, dtype=torch.float64", "(0, 1)"),
    *_each("x.mean(HERE)", "0", "1", "0, True"),
    *_each("x.prod(HERE)", "0", "1", "0, True"),
    *_each("x.amax(HERE)", "0", "1", "0, True"),
    *_each("x.argmax(HERE)", "0", "1", "0, True"),
    *_each("x.any(HERE)", "0", "1"),
    *_each("x.logsumexp(HERE)", "0", "1", "0, True"),
    *_each("x.cumsum(HERE)", "0", "1", "0, dtype=torch.float64"),
    *_each("x.cumprod(HERE)", "0", "1"),
    *_each("x.norm(HERE)", "1", "2", "3", "2, 0", "2, 1"),
    *_each("x.flip(HERE)", "0", "1", "(0, 1)"),
    *_each("x.roll(HERE)", "1, 2", "2, 2", "1, 3"),
    *_each("x.topk(HERE)", "2", "3", "2, 2", "2, largest=False"),
    *_each("x.sort(HERE)", "1", "2", "1, True"),
    *_each("x.kthvalue(HERE)", "1", "2", "1, 2", "1, keepdim=True"),
    *_each("x.permute(HERE)", "0, 1, 3, 2", "1, 0, 2, 3"),
    *_each("x.narrow(HERE)", "2, 0, 2", "2, 1, 2", "2, 0, 3"),
    *_each("x[..., HERE]", "::2", "1::2", "0", "1", "-1:"),
    *_each("x.diagonal(HERE)", "0, 2, 3", "1, 2, 3", "-1, 2, 3"),
    *_each("x.tril(HERE)", "0", "1", "-1"),
    *_each("x.triu(HERE)", "0", "1"),
    *_each("x.expand(HERE, -1, -1, -1, -1)", "2", "3"),
    *_each("x.repeat(HERE)", "2, 1, 1, 1", "1, 2, 1, 1"),
    *_each("torch.cat((x, x), HERE)", 0, 1),
    *_each("torch.stack((x, x), HERE)", 0, 1),
    *_each("x.as_strided((2, 2), HERE)", "(2, 1)", "(1, 2)", "(2, 1), 1"),
    *_each("F.pad(x, (1, 0), value=HERE)", "0.0", "2.0"),
    *_each("F.pad(x, (1, 0, 1, 0), 'HERE')", "reflect", "replicate"),
    *_each("F.pad(x, (HERE))", "0, 1", "1, 1", "0, 0, 1, 0"),
    *_each(
        "F.interpolate(x, HERE)",
        *("(8, 8)", "(4, 8)", "(8, 8), mode='bilinear'"),
        "(8, 8), mode='bilinear', align_corners=True",
    ),
    *_each(
        "F.conv2d(x, w, HERE)",
        *("None", "None, 2", "None, 1, 1", "None, 1, 1, 2", "None, (1, 2)", "None, 1, (0, 1)"),
    ),
    "F.conv2d(x, w[:, :8], None, groups=2)",
    *_each("F.conv_transpose2d(x, w, HERE)", "None", "None, 2", "None, 2, 1, 1", "None, 2, 1, 0"),
    *_each("F.layer_norm(x, HERE)", "(4,)", "(4, 4)", "(4,), eps=0.5"),
    *_each("F.group_norm(x, HERE)", "2", "4", "2, eps=0.5"),
    *_each("F.instance_norm(xHERE)", "", ", eps=0.5"),
    *_each("batch_norm(x, HERE)", "True, 0.1", "True, 0.2", "False, 0.1", "True, 0.1, 0.5"),
    *_each("F.dropout(x, HERE)", "0.5", "0.25", "0.5, False"),
    *_each("x.clamp(HERE)", "0, 1", "0", "None, 1"),
    *_each("torch.div(x, HERE)", "2", "2, rounding_mode='floor'", "2, rounding_mode='trunc'"),
    *_each("x.pow(HERE)", "2", "3", "0.5"),
    *_each("x * HERE", "0", "1", "2", "3", "True", "1.0", "float('nan')", "x"),
    *_each("x.add(x, alpha=HERE)", 1, 2, 3),
    *_each("x.sub(x, alpha=HERE)", 1, 2),
    *_each("torch.rsub(x, x, alpha=HERE)", 1, 2),
    *_each("torch.addcmul(x, x, x, value=HERE)", 1, 2),
    *_each("torch.addcdiv(x, x, x, value=HERE)", 1, 2),
    *_each("torch.baddbmm(x[0], x[0], x[0], HERE)", "beta=1", "beta=2", "alpha=2"),
    *_each("torch.lerp(x, x, HERE)", "0.5", "0.25"),
    *_each("torch.nan_to_num(x, HERE)", "0", "1", "0, 1", "0, 1, 2"),
    *_each("torch.cdist(s, s, HERE)", "1", "2", "3"),
    *_each("torch.pdist(s, HERE)", "1", "2"),
    *_each("torch.einsum('HERE', s, s)", "ij,jk->ik", "ij,kj->ik", "ij,ij->j"),
    *_each("torch.arange(HERE, device=device) * x[0, 0, 0, 0]", 4, 5, "1, 4", "0, 4, 2"),
    *_each("torch.full((HERE,), 2.0, device=device) * x[0, 0, 0, 0]", 4, 5),
    *_each("torch.eye(HERE, device=device) * x[0, 0, 0, 0]", 4, 5),
    *_each("torch.linspace(0, HERE, device=device) * x[0, 0, 0, 0]", "1, 4", "1, 5", "2, 4"),
    *_each("F.one_hot(x[0, 0, 0].long().clamp(0, 1), HERE)", 2, 3),
    *_each("F.embedding(x[0, 0].long().clamp(0, 1), sHERE)", "", ", padding_idx=0"),
    *_each(
        "F.nll_loss(s.log_softmax(1), torch.zeros(2, dtype=int, device=device)HERE)",
        *("", ", reduction='sum'", ", reduction='none'", ", ignore_index=0", ", s[0]"),
    ),
    *_each(
        "F.cross_entropy(s, torch.zeros(2, dtype=int, device=device)HERE)",
        *(", label_smoothing=0.1", ", label_smoothing=0.2"),
    ),
    *_each("F.mse_loss(x, x * 2, reduction='HERE')", "mean", "sum", "none"),
    *_each("F.smooth_l1_loss(x, x * 2HERE)", "", ", beta=0.5", ", reduction='sum'"),
    *_each("F.binary_cross_entropy(s.sigmoid(), s.sigmoid()HERE)", "", ", reduction='sum'"),
    *_each("F.binary_cross_entropy_with_logits(s, sHERE)", "", ", pos_weight=s"),
    *_each("F.kl_div(x, xHERE)", "", ", log_target=True", ", reduction='sum'"),
    *_each("x.to(torch.HERE)", "float64", "bfloat16", "float16", "int32", "bool"),
    *_each("x.to(torch.int32).bitwise_HERE(1)", "and", "or", "xor"),
    *_each("torch.isclose(x, x * 2, rtol=HERE)", "0.1", "0.2"),
    *_each("x.masked_fill(x > 0, HERE)", "2", "3"),
    *_each("torch.where(x > 0, x, HERE)", "0.0", "1.0", "2.0"),
    *_each("x.random_(HERE)", "2", "3", "1, 3"),
    *_each("x.uniform_(HERE)", "0, 1", "0, 2"),
    *_each("x.normal_(HERE)", "0, 1", "1, 1"),
    *_each("x.bernoulli_(HERE)", "0.5", "0.25"),
    *_each("torch.randperm(HERE, device=device)", 4, 5),
    "x.exponential_(1)",
    *_each("torch.linalg.HERE(s)", "svd", "slogdet"),
    *_each(
        "torch.triangular_solve(s, s, HERE)", "True", "False", "True, True", "True, False, True"
    ),
    *_each("custom_call(HERE)", "'one'", "'other'"),
    *_each("xm.all_reduce('HERE', x)", "sum", "max"),
    *_each("xm.all_reduce('sum', x, scale=HERE)", "0.5", "0.25"),
    *_each("xm.all_gather(x, HERE)", "0", "1"),
    *_each("xm.reduce_scatter('sum', x, HERE, 0, 1)", "1.0", "0.5"),
    "xm.collective_permute(x, [[0, 0]])",
    "xm.optimization_barrier_([x]) or x",
)

WAYS = named(
    "y = OPERATION",
    "with torch.no_grad(): y = OPERATION",
    "with torch.autocast('xla', dtype=torch.bfloat16): y = OPERATION",
    "with torch.autocast('xla', dtype=torch.bfloat16): y = (OPERATION, s @ s)",
    "x = x.clone(); y = OPERATION",
    "x = x * 2; y = OPERATION",
    "y = OPERATION; y = (y, F.celu(s, 1.0))",
    "y = OPERATION; y = (y, F.celu(s, 2.0))",
    "y = OPERATION; y = (y, F.pixel_shuffle(x, 4))",
    "y = OPERATION; y = (y, F.pixel_shuffle(x, 2))",
    "y = OPERATION; y = (y, F.avg_pool2d(x, 2, divisor_override=3))",
    "y = trained(lambda x: OPERATION)",
)

INPUTS = named(
    "torch.ones(2, 16, 4, 4)",
    "torch.full((2, 16, 4, 4), 2.0)",
    "torch.ones(4, 16, 4, 4)",
    "torch.ones(2, 16, 4, 4).to(memory_format=torch.channels_last)",
)

_FAST = " --xla_cpu_enable_fast_math=true"
_SHORT = " --xla_cpu_enable_fast_min_max=true"
_FLAGS = "os.environ['XLA_FLAGS'] += "

SETTINGS = {
    "": "",
    "fast": f"{_FLAGS}'{_FAST}'",
    "fast later": f"torch_xla.device(); {_FLAGS}'{_FAST}'",
    "short and fast": f"{_FLAGS}'{_SHORT}{_FAST}'",
    "fast and short": f"{_FLAGS}'{_FAST}{_SHORT}'",
    "dump": f"{_FLAGS}' --xla_dump_to=one'",
    "generator": "os.environ['XLA_RNG_BIT_GENERATOR'] = 'philox'",
    "generator later": "torch_xla.device(); os.environ['XLA_RNG_BIT_GENERATOR'] = 'philox'",
    "bfloat16": "os.environ['XLA_USE_BF16'] = '1'",
    "devices": "os.environ['CPU_NUM_DEVICES'] = '2'",
    "StableHLO": "os.environ['XLA_STABLEHLO_COMPILE'] = '1'",
    "precision": "torch_xla._XLAC._xla_set_mat_mul_precision('highest')",
    "no aliasing": "os.environ['XLA_ENABLE_PARAM_ALIASING'] = '0'",
    "threads": "os.environ['OMP_NUM_THREADS'] = '3'",
    "seed": "torch.manual_seed(3)",
    "default type": "torch.set_default_dtype(torch.float64)",
    "deterministic": "torch.use_deterministic_algorithms(True)",
    "of no compiler": "os.environ['MINE'] = '1'",
}

_SAME_SETTINGS = {
    "short and fast": "fast and short",
    **dict.fromkeys(("dump", "threads", "seed", "of no compiler", "deterministic"), ""),
}

AXES: dict[str, dict[str, str]] = {
    "operation": OPERATIONS,
    "other": OPERATIONS,
    "way": WAYS,
    "input": INPUTS,
    "setting": SETTINGS,
}


def meaning(chosen: dict[str, str]) -> object:
    """Return the choices that affect the key. Different choices may still lower to one module."""
    found = dict(chosen)
    found["setting"] = _SAME_SETTINGS.get(found["setting"], found["setting"])
    if found["input"] == "torch.full((2, 16, 4, 4), 2.0)":
        found["input"] = "torch.ones(2, 16, 4, 4)"
    return found


_HELPERS = """
def batch_norm(x, training, momentum, eps=1e-5):
    mean, variance = (torch.ones(x.shape[1], device=x.device) for _ in range(2))
    return F.batch_norm(x, mean, variance, None, None, training, momentum, eps), mean, variance


def custom_call(config):
    return torch_xla._XLAC._xla_custom_call(
        [s], "target", [[4]], [torch.float32], False, config, 0, {}
    )


def trained(function):
    weight = x.detach().clone().requires_grad_()
    y = function(weight)
    results = [each for each in (y if isinstance(y, (tuple, list)) else [y])]
    (results[0].float().sum() + weight.sum()).backward()
    return [*results, weight.grad]


def tensors(y):
    return [each for one in y for each in tensors(one)] if isinstance(y, (tuple, list)) else [y]
"""

_REST = """
import hashlib
import os
import re

import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm

SETTING
device = torch_xla.device()
x = (INPUT).to(device)
s, w = torch.ones(2, 2).to(device), torch.ones(16, 16, 2, 2).to(device)
first = OTHER
WAY
results = tensors((first, y))
counters = torch_xla._XLAC._xla_counter_names()
assert not [each for each in counters if each.startswith("aten::")], "it ran on the host"
lowered = torch_xla._XLAC._get_xla_tensors_hlo(results)
lowered = re.sub(r", metadata=\\{[^}]*\\}", "", lowered)
tell(compiled=hashlib.sha256(lowered.encode()).hexdigest() + " " + SETTING_NAME)
torch_xla.sync()
"""


def text(parts: Mapping[str, str], layout: random.Random) -> str:
    names = {code: _SAME_SETTINGS.get(name, name) for name, code in SETTINGS.items()}
    way = parts["way"].replace("OPERATION", parts["operation"])
    rest = _REST.replace("SETTING_NAME", repr(names[parts["setting"]]))
    rest = rest.replace("SETTING", parts["setting"]).replace("INPUT", parts["input"])
    return laid_out([_HELPERS], rest.replace("OTHER", parts["other"]).replace("WAY", way), layout)


def prepare() -> Callable[[CodeType, dict[str, Any]], Answer]:
    """Return a function that runs a program and returns its key, or the reason for none."""
    ask = asked_in_child(pairs)

    def ask_and_be_told(program: CodeType, own: dict[str, Any]) -> Answer:
        key, unshared, compiled = ask(program, own)
        assert compiled, "the program looked up another graph before it reported its own"
        return key, unshared, compiled

    return ask_and_be_told
