"""Adam and AdamW with 8-bit moments.

Each element of a moment is stored as one byte (`exp_avg_codes`), an index into a table of 256
numbers from -1 or 0 to 1. 256 consecutive elements share a float32 factor (`exp_avg_scale`). Two
moments take 2.03 bytes per element, instead of 8 in float32. A step handles one parameter after the
other: it dequantizes the moments, computes Adam in float32 or wider, and quantizes the new moments.
A parameter keeps unquantized moments if its number of elements is below 4096 or not a multiple of
256.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022, arXiv 2110.02861. Table,
rounding and sizes are those of `torchao.optim.Adam8bit` and `AdamW8bit`. The results are nearly
equal to theirs: at most one element in a thousand is rounded the other way (tested). Their state
dictionaries load here, as do those of Adam and AdamW.
"""

from collections.abc import Collection
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from graphstash.errors import ConfigError
from graphstash.training.device import TracedOp, upload
from graphstash.training.optimizers.adam import Adam, AdamW, adam_formula
from graphstash.training.optimizers.base import Kernel
from graphstash.training.optimizers.cohort import Cohort
from graphstash.training.optimizers.formula import Options, Split, selecting
from graphstash.training.optimizers.options import Group

__all__ = ["Adam8bit", "AdamW8bit"]

_BLOCK: Final = 256
_MIN_ELEMENTS: Final = 4096
_PARTS: Final = ("codes", "scale")
_SIGNED: Final = (True, False)
"""Whether exp_avg and exp_avg_sq can be negative."""


def _formula(old: Split, step: Tensor, options: Options) -> tuple[list[Tensor], list[list[Tensor]]]:
    is_quantized = old.slots[0][0].dtype == torch.uint8
    parameters: list[Tensor] = []
    slots: list[list[Tensor]] = [[] for _ in old.slots]
    for parameter, gradient, *state in zip(old.parameters, old.gradients, *old.slots, strict=True):
        if is_quantized:
            pairs = zip(state[::2], state[1::2], _SIGNED, strict=True)
            moments = [_dequantize(codes, scale, signed=signed) for codes, scale, signed in pairs]
        else:
            moments = [_at_least_float32(each) for each in state]
        alone = old._replace(
            parameters=[_at_least_float32(parameter)],
            gradients=[_at_least_float32(gradient)],
            slots=[[moment] for moment in moments],
        )
        new, after = adam_formula(alone, step, options)
        parameters += new
        moments = [moment for (moment,) in after]
        if is_quantized:
            both = zip(moments, _SIGNED, strict=True)
            moments = [part for moment, signed in both for part in _quantize(moment, signed=signed)]
        for slot, moment in zip(slots, moments, strict=True):
            slot.append(moment)
    return parameters, slots


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _dequantize(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    read: Tensor = _torchao().dequant_with_qmap(codes, _table(codes.device, signed=signed), scale)
    return read


def _quantize(moment: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes, in the moment's shape, and the scale of each block."""
    within, scale = _torchao().scale_tensor(moment.float().contiguous(), _BLOCK)
    table = _table(moment.device, signed=signed)
    return _torchao().quantize_8bit_with_qmap(within, table), scale


@cache
def _table(device: torch.device, *, signed: bool) -> Tensor:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # torchao computes the table in the default type
    try:
        table = torch.tensor(_torchao().create_dynamic_map(signed))
    finally:
        torch.set_default_dtype(default)
    return upload([table], device)[0]


@cache
def _torchao() -> Any:
    import torch._inductor.config as inductor

    # The import of torchao 0.12 sets this pass, for 8-bit and 4-bit linear layers. torch's cache of
    # compiled graphs has no key for the pass, so torch would cache no graph in this process.
    passes = inductor.post_grad_custom_post_pass
    try:
        from torchao.optim import quant_utils
    except ImportError as error:
        raise ConfigError(
            f"moments of eight bits need torchao, which cannot be imported ({error}): "
            "pip install 'graphstash[torchao] @ git+<repository>', with the torchao that was made "
            f"for torch {torch.__version__} (0.12.0 is for torch 2.7)"
        ) from error
    finally:
        inductor.post_grad_custom_post_pass = passes
    return quant_utils


def _is_quantized(parameter: Tensor) -> bool:
    return parameter.numel() >= _MIN_ELEMENTS and parameter.numel() % _BLOCK == 0


class Adam8bit(Adam):
    """`Adam` with 8-bit moments; see the module's docstring.

    Needs the extra `torchao`. Takes the arguments of `Adam`, without amsgrad. Has no fused kernel.

    Raises:
        ConfigError: torchao cannot be imported.
        ValueError: an argument is out of its range, amsgrad is set, or a parameter is sharded.
    """

    _operation = TracedOp("adam8bit", selecting(_formula))
    _has_own_types = True
    _refuses_shards = (
        "keeps moments in blocks of whole parameters, and a parameter is sharded: use Adam or AdamW"
    )

    def _check(self, group: Group) -> None:
        _torchao()
        super()._check(group)
        if group["amsgrad"]:
            raise ValueError("amsgrad is not for moments of eight bits: use Adam or AdamW with it")

    def _slots_of(self, group: Group, parameter: Tensor) -> tuple[str, ...]:
        names = self._slots(group)
        if not _is_quantized(parameter):
            return names
        return tuple(f"{name}_{part}" for name in names for part in _PARTS)

    def _beginning(self, group: Group, parameter: Tensor, name: str) -> Tensor:
        if name.endswith("_codes"):
            return parameter.new_zeros(parameter.shape, dtype=torch.uint8)
        if name.endswith("_scale"):
            return parameter.new_zeros(parameter.numel() // _BLOCK, dtype=torch.float32)
        return super()._beginning(group, parameter, name)

    def _fused_kernel(self, group: Group, cohort: Cohort) -> Kernel | None:
        del group, cohort
        return None

    def _has_moments(self, group: Group, parameter: Tensor, saved: Collection[str]) -> bool:
        # The moments of torchao and unquantized moments have Adam's names.
        return {*self._slots(group)} <= {*saved} or super()._has_moments(group, parameter, saved)

    def _shapes_of(self, group: Group, like: Tensor) -> dict[str, torch.Size]:
        return super()._shapes_of(group, like) | dict.fromkeys(self._slots(group), like.shape)

    def _adopt(
        self, group: Group, parameter: Tensor, state: dict[str, Any], *more: Any
    ) -> list[Tensor]:
        is_quantized = _is_quantized(parameter)
        for name, signed in zip(self._slots(group), _SIGNED, strict=True):
            moment: Any = state.get(name)  # torchao's, or unquantized
            if hasattr(moment, "codes") and not (is_quantized and moment.block_size == _BLOCK):
                moment = state[name] = moment.dequantize()
            if is_quantized and state.pop(name, None) is not None:
                parts = (
                    (moment.codes, moment.scale)
                    if hasattr(moment, "codes")
                    else _quantize(moment, signed=signed)
                )
                state |= {f"{name}_{n}": part for n, part in zip(_PARTS, parts, strict=True)}
        return super()._adopt(group, parameter, state, *more)


class AdamW8bit(Adam8bit, AdamW):
    """`AdamW` with 8-bit moments; see the module's docstring.

    Needs the extra `torchao`. Takes the arguments of `AdamW`, and raises as `Adam8bit` does.
    """
