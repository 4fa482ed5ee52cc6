"""Options of optimizers: what every optimizer takes, and checks of values."""

from collections.abc import Mapping
from typing import Any, Final, TypedDict

from torch import Tensor

__all__ = ["Group", "TorchOptions", "at_least", "is_sequence", "options_in", "require_count"]

Group = Mapping[str, Any]
"""A parameter group: options, and usually `params`."""


class TorchOptions(TypedDict, total=False):
    """Keyword arguments of every optimizer. Most are torch.optim's.

    Attributes:
        master_weights: Store a float32 copy of bfloat16 or float16 parameters, and their moments in
            float32, so that small changes add up. A step replaces the values of the parameter by
            those of the copy. To change a parameter yourself, also change its copy, which is
            `optimizer.state[parameter]["master"]`. Default: False.
        fused: False: never use torch's fused kernels. None or True: use a fused kernel on plain
            torch if it gives the formula's results. Default: None.
        foreach: Has no effect, but must not be True if `fused` is.
        capturable: Has no effect.
        differentiable: Must be False.
        amp_scaling: True: `step` divides by the loss scale and skips bad steps, without reading the
            device. False: torch.amp.GradScaler or Lightning does both and reads the device.
            Lightning can clip gradients only with False. Default: True.
    """

    master_weights: bool
    fused: bool | None
    foreach: bool | None
    capturable: bool
    differentiable: bool
    amp_scaling: bool


_NO_OPTIONS: Final = frozenset({"self", "params", "options", "__class__"})


def options_in(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options among the `locals()` of a constructor."""
    return {name: each for name, each in arguments.items() if name not in _NO_OPTIONS}


def at_least(group: Group, least: float, *names: str) -> None:
    """Raise ValueError if an option is NaN or below `least`. Tensors are not read."""
    for name in names:
        value = group[name]
        if not isinstance(value, Tensor) and not value >= least:
            raise ValueError(f"{name} must be at least {least} (got {value})")


def require_count(group: Group, count: int, name: str) -> None:
    """Raise ValueError if an option is not a tuple or list of `count` elements."""
    value = group[name]
    if not is_sequence(value) or len(value) != count:
        raise ValueError(f"{name} must be {count} numbers (got {value})")


def is_sequence(value: object) -> bool:
    """Return whether an option consists of several numbers."""
    return isinstance(value, tuple | list)
