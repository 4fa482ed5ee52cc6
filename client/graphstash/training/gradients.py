"""Clipping: keeps gradients small without looking at them from the host.

Torch's own `clip_grad_norm_` and `clip_grad_value_`, which read nothing either, and on torch_xla
the same as one recorded operation.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import utils

from graphstash.training.device import assign
from graphstash.training.operation import Operation, Shapes, shapes_of

__all__ = ["clip_grad_norm_", "clip_grad_value_"]


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scales all gradients down together if their global 2-norm is above `max_norm`.

    With a loss scale, call it after `unscale_`. A gradient that is not finite makes the norm and
    with it every gradient so; such a step does not count anyway.

    Args:
        parameters: those without a gradient are passed over.
        max_norm: > 0; on torch_xla a constant of the graph.

    Returns:
        The norm before clipping, [], on the device; 0 without gradients.

    Raises:
        ValueError: max_norm is not above 0.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; it must be above 0")
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients or gradients[0].device.type != "xla":
        total: Tensor = utils.clip_grad_norm_(parameters, max_norm)
        return total
    norm, *clipped = _clip_norm(gradients, (max_norm, shapes_of(gradients)))
    assign(gradients, clipped)
    return norm


@torch.no_grad()
def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Limits every element of every gradient to [-clip_value, clip_value]; NaN stays NaN.

    Args:
        parameters: those without a gradient are passed over.
        clip_value: > 0; on torch_xla a constant of the graph.

    Raises:
        ValueError: clip_value is not above 0.
    """
    if not clip_value > 0:
        raise ValueError(f"clip_value is {clip_value}; it must be above 0")
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients and gradients[0].device.type == "xla":
        assign(gradients, _clip_value(gradients, (clip_value, shapes_of(gradients))))
    else:
        utils.clip_grad_value_(parameters, clip_value)


_Key = tuple[float, Shapes]


def _scaled_to_norm(gradients: list[Tensor], key: _Key) -> list[Tensor]:
    max_norm, _ = key
    norm = torch.linalg.vector_norm(torch.stack([g.norm().float() for g in gradients]))
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # 1e-6: as torch.nn.utils has it
    return [norm, *(g * factor for g in gradients)]


def _limited(gradients: list[Tensor], key: _Key) -> list[Tensor]:
    clip_value, _ = key
    return [g.clamp(-clip_value, clip_value) for g in gradients]


_clip_norm = Operation("clip_norm", _scaled_to_norm)
_clip_value = Operation("clip_value", _limited)
