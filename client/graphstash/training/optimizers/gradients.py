"""Gradients between backward and update: loss scaling and clipping, without reading the device.

`LossScale` keeps small half-precision gradients from vanishing: a scaled loss gives scaled
gradients. If a gradient overflows, the step is skipped and the scale shrinks. After enough good
steps in a row, the scale grows. The device decides:

    found_inf   1 if any gradient is infinite or NaN
    scale       <- scale * backoff_factor                          if found_inf
                   scale * growth_factor                           after growth_interval good steps
                   scale                                           otherwise

Dynamic loss scaling as in Micikevicius et al., "Mixed Precision Training", 2018, arXiv 1710.03740,
with the rule and the names of `torch.amp.GradScaler`. GradScaler reads found_inf on the host before
each step, unless the optimizer takes found_inf.

Clipping uses torch's `clip_grad_norm_` and torch's clamp kernels, which do not read the device
either, and on torch_xla a traced operation that computes the same.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from graphstash.training.device import Shapes, TracedOp, assign, shapes_of, upload
from graphstash.training.optimizers.base import SyncFreeOptimizer
from graphstash.training.sharding import Sums, full, is_flattened, local

__all__ = ["LossScale", "clip_grad_norm_", "clip_grad_value_"]


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients by the same factor, so that their global 2-norm is at most `max_norm`.

    With a loss scale, call it after `unscale_`. If a gradient is infinite or NaN, the norm is too,
    and the gradients become 0 or NaN. A loss scale skips such a step. On torch_xla, `max_norm` is a
    constant of the graph.

    Returns:
        Norm before clipping, of shape [], on the device. Without gradients: 0, on the host.

    Raises:
        ValueError: max_norm is not above 0, or FullyShardedDataParallel holds the parameters.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0 (got {max_norm})")
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if any(map(is_flattened, parameters)):
        raise ValueError(
            "FullyShardedDataParallel holds the parameters, and this process sees only its shards "
            "of their gradients; call clip_grad_norm_() of the wrapped model, or shard with "
            "fully_shard()"
        )
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients or gradients[0].device.type != "xla":
        # Importing torch_xla replaces the function of this name in torch.nn.utils for every device,
        # with one whose results have other bits.
        return full(clip_grad.clip_grad_norm_(parameters, max_norm))
    norm, *clipped = _clip_norm(gradients, (max_norm, shapes_of(gradients)))
    assign(gradients, clipped)
    return norm


@torch.no_grad()
def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Limit every element of every gradient to [-clip_value, clip_value]; NaN stays NaN.

    `clip_value` must be above 0. On torch_xla, it is a constant of the graph.
    """
    if not clip_value > 0:
        raise ValueError(f"clip_value must be above 0 (got {clip_value})")
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients and gradients[0].device.type == "xla":
        assign(gradients, _clip_value(gradients, (clip_value, shapes_of(gradients))))
    elif gradients:
        torch._foreach_clamp_min_(gradients, -clip_value)
        torch._foreach_clamp_max_(gradients, clip_value)


_Key = tuple[float, Shapes]


def _scaled_to_norm(gradients: list[Tensor], key: _Key) -> list[Tensor]:
    max_norm, _ = key
    norm = torch.linalg.vector_norm(torch.stack([g.norm().float() for g in gradients]))
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # 1e-6 as in torch.nn.utils
    return [norm, *(g * factor for g in gradients)]


def _limited(gradients: list[Tensor], key: _Key) -> list[Tensor]:
    clip_value, _ = key
    return [g.clamp(-clip_value, clip_value) for g in gradients]


_clip_norm = TracedOp("clip_norm", _scaled_to_norm)
_clip_value = TracedOp("clip_value", _limited)


class LossScale:
    """A loss scale with the main methods of `torch.amp.GradScaler`. Steps never read the device.

        scale.scale(loss).backward()
        scale.unscale_(optimizer)            # only to clip or inspect gradients
        scale.step(optimizer)                # a sync-free optimizer
        scale.update()

    Args:
        initial: First scale, > 0.
        growth_factor: Factor when the scale grows, > 1.
        backoff_factor: Factor when the scale shrinks, in (0, 1).
        growth_interval: Good steps in a row before the scale grows, >= 1.
        enabled: If False, scale nothing and skip no step.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        initial: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if not 0 < initial < math.inf:
            raise ValueError(f"initial must be above 0 and finite (got {initial})")
        if not growth_factor > 1:
            raise ValueError(f"growth_factor must be above 1 (got {growth_factor})")
        if not 0 < backoff_factor < 1:
            raise ValueError(f"backoff_factor must be between 0 and 1 (got {backoff_factor})")
        if growth_interval < 1:
            raise ValueError(f"growth_interval must be at least 1 (got {growth_interval})")
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self._is_enabled = enabled
        self._start = (float(initial), 0)
        self._scale: Tensor | None = None  # [], float32
        self._good_steps: Tensor | None = None  # [], int32: in a row; 0 again when the scale grows
        self._found_inf: dict[int, Tensor] = {}  # by optimizer, between unscale_ and update
        self._stepped: set[int] = set()  # optimizers, between step and update

    def is_enabled(self) -> bool:
        """Whether losses and gradients are scaled."""
        return self._is_enabled

    def to(self, device: torch.device | str) -> "LossScale":
        """Create the scale on a device, unless it has one. `scale` uses the loss's device."""
        if self._scale is None or self._good_steps is None:
            self._scale, self._good_steps = upload(self._first_values(), torch.device(device))
        return self

    @property
    def value(self) -> Tensor:
        """The scale, [], float32, on the device. Raises RuntimeError before it is on a device."""
        if self._scale is None:
            raise RuntimeError(
                "the loss scale is on no device yet; call scale(loss) or to(device) first"
            )
        return self._scale

    @overload
    def scale(self, loss: Tensor) -> Tensor: ...
    @overload
    def scale(self, loss: Iterable[Any]) -> Any: ...
    def scale(self, loss: Tensor | Iterable[Any]) -> Any:
        """Return the loss times the scale, in float32 or wider; backward gives scaled gradients.

        For a list or tuple, which may be nested, return a list or tuple of scaled losses. For other
        iterables, return an iterator.
        """
        if not self._is_enabled:
            return loss
        if isinstance(loss, list | tuple):
            return type(loss)(map(self.scale, loss))
        if not isinstance(loss, Tensor):
            if isinstance(loss, Iterable):
                return map(self.scale, loss)
            raise TypeError(f"a loss scale scales tensors and lists of them (got {loss!r})")
        self.to(loss.device)
        wide = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
        return wide * self.value

    def unscale_(self, optimizer: Optimizer) -> Tensor:
        """Divide the optimizer's gradients by the scale. Return found_inf and raise as `step` does.

        Gradients must not be float16, in which they would vanish.
        """
        if not self._is_enabled:
            return torch.zeros((), dtype=torch.float32)
        if id(optimizer) in self._found_inf:
            raise RuntimeError(
                "unscale_() was called after unscale_() or step(); call update() after each step"
            )
        gradients, shards = _gradients(optimizer)
        with torch.no_grad():
            if self.value.device.type == "xla":
                found_inf, *unscaled = _unscale([*gradients, self.value], shapes_of(gradients))
                assign(gradients, unscaled)
            else:
                found_inf = shards.maximum(_check_here(gradients, self.value.reciprocal()))
        self._found_inf[id(optimizer)] = found_inf
        return found_inf

    def step(self, optimizer: Optimizer) -> Tensor:
        """Unscale unless `unscale_` did, and step unless a gradient is infinite or NaN.

        Args:
            optimizer: An optimizer of this package, or another whose `step` takes `found_inf`.

        Returns:
            found_inf: [], float32, on the device: 1 if a gradient is infinite or NaN, else 0. A
                disabled loss scale returns 0 on the host.

        Raises:
            RuntimeError: the optimizer was stepped since the last update, it has no gradients, or
                the scale is not on a device yet.
            ValueError: gradients are float16, or FullyShardedDataParallel holds the parameters.
        """
        if not self._is_enabled:
            optimizer.step()
            return torch.zeros((), dtype=torch.float32)
        if id(optimizer) in self._stepped:
            raise RuntimeError("step() was called twice for one optimizer; call update() after it")
        found_inf = self._found_inf.get(id(optimizer))
        if found_inf is not None or not isinstance(optimizer, SyncFreeOptimizer):
            if found_inf is None:
                found_inf = self.unscale_(optimizer)
            optimizer.step(found_inf=found_inf)  # type: ignore[call-overload] # not in torch's stub
        else:
            # The optimizer also divides by the scale, which saves one pass over the gradients.
            found_inf = self._check(optimizer)
            optimizer.step(found_inf=found_inf, grad_scale=self.value)
            self._found_inf[id(optimizer)] = found_inf
        self._stepped.add(id(optimizer))
        return found_inf

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adjust the scale after every optimizer has stepped.

        `new_scale` is the next scale instead of the rule's, > 0 and finite. The count of good steps
        continues. A tensor must have one element, whose value is not checked. The host reads it
        only if it is on another device than the scale.

        Raises:
            RuntimeError: nothing was unscaled since the last update, and there is no new scale; or
                the scale is not on a device yet.
            ValueError: the new scale is a number out of its range, or not a single element.
        """
        if not self._is_enabled:
            return
        if new_scale is not None:
            self._replace(new_scale)
            self.refresh()
            return
        if not self._found_inf or self._good_steps is None:
            raise RuntimeError("update() without a step; call unscale_() or step() first")
        found_inf, *others = self._found_inf.values()
        with torch.no_grad():
            for other in others:
                found_inf = torch.maximum(found_inf, other)
            rule = (self.growth_factor, self.backoff_factor, self.growth_interval)
            if self.value.device.type == "xla":
                old = [self.value, self._good_steps]
                assign(old, _adjust([*old, found_inf], rule))
            else:
                torch._amp_update_scale_(self.value, self._good_steps, found_inf, *rule)
        self.refresh()

    def _replace(self, new_scale: float | Tensor) -> None:
        if not isinstance(new_scale, Tensor):
            if not 0 < new_scale < math.inf:
                raise ValueError(f"new_scale must be above 0 and finite (got {new_scale})")
            new_scale = torch.tensor(float(new_scale), dtype=torch.float32)
        if new_scale.numel() != 1:
            raise ValueError(f"new_scale must be a single number (got {list(new_scale.shape)})")
        new_scale = new_scale.detach().float().reshape(())
        if new_scale.device != self.value.device:
            (new_scale,) = upload([new_scale.cpu()], self.value.device)
        with torch.no_grad():
            assign([self.value], [new_scale])

    def _check(self, optimizer: Optimizer) -> Tensor:
        gradients, shards = _gradients(optimizer)
        with torch.no_grad():
            if self.value.device.type == "xla":
                return _find_inf(gradients, shapes_of(gradients))[0]
            return shards.maximum(_check_here(gradients, torch.ones_like(self.value)))

    def get_scale(self) -> float:
        """Return the scale as a number, or 1 if disabled. Reads the device."""
        if not self._is_enabled:
            return 1.0
        return self._start[0] if self._scale is None else float(self._scale)

    def device_tensors(self) -> Iterator[Tensor]:
        """Yield the device tensors that a step reads and changes."""
        return (tensor for tensor in (self._scale, self._good_steps) if tensor is not None)

    def refresh(self) -> None:
        """Discard the results of a step. Call it if the step was interrupted before `update`."""
        self._found_inf.clear()
        self._stepped.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as `torch.amp.GradScaler` does; empty if disabled. Reads the device."""
        if not self._is_enabled:
            return {}
        good_steps = self._start[1] if self._good_steps is None else int(self._good_steps)
        return {
            "scale": self.get_scale(),
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": good_steps,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dictionary of this class or of `torch.amp.GradScaler`. Raise RuntimeError
        for the state of a disabled loss scale.
        """
        if not self._is_enabled:
            return
        if not state_dict:
            raise RuntimeError("the state is that of a loss scale that was not enabled")
        self.growth_factor = state_dict["growth_factor"]
        self.backoff_factor = state_dict["backoff_factor"]
        self.growth_interval = state_dict["growth_interval"]
        self._start = (float(state_dict["scale"]), int(state_dict["_growth_tracker"]))
        if self._scale is None or self._good_steps is None:
            return
        # A traced step refers to these tensors, so they must stay the same objects.
        with torch.no_grad():
            assign(
                [self._scale, self._good_steps], upload(self._first_values(), self._scale.device)
            )

    def _first_values(self) -> list[Tensor]:
        scale, good_steps = self._start
        return [
            torch.tensor(scale, dtype=torch.float32),
            torch.tensor(good_steps, dtype=torch.int32),
        ]


def _gradients(optimizer: Optimizer) -> tuple[list[Tensor], Sums]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(map(is_flattened, parameters)):
        raise ValueError(
            "FullyShardedDataParallel holds the parameters, and each process would decide by its "
            "own shards whether a step counts; shard with fully_shard(), or train in bf16 without "
            "a loss scale"
        )
    whole = [parameter.grad for parameter in parameters if parameter.grad is not None]
    gradients = [local(gradient) for gradient in whole]
    if not gradients:
        raise RuntimeError("the optimizer has no gradients; call backward() on the scaled loss")
    if any(gradient.dtype == torch.float16 for gradient in gradients):
        raise ValueError(
            "gradients are float16; keep the parameters in float32 and let torch.autocast compute "
            "in float16"
        )
    return gradients, Sums(whole)


def _check_here(gradients: list[Tensor], factor: Tensor) -> Tensor:
    """Multiply gradients by `factor` in place. Return 1 if one was not finite, else 0."""
    if torch.compiler.is_compiling():  # torch.compile does not support the kernel
        found_inf = _any_nonfinite(gradients, None)[0]
        torch._foreach_mul_(gradients, factor)
        return found_inf
    found_inf = torch.zeros((), dtype=torch.float32, device=factor.device)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for group in by_dtype.values():
        torch._amp_foreach_non_finite_check_and_unscale_(group, found_inf, factor)
    return found_inf


def _any_nonfinite(gradients: list[Tensor], key: object) -> list[Tensor]:
    del key
    return [torch.stack([~torch.isfinite(g).all() for g in gradients]).any().float()]


def _checked_and_unscaled(inputs: list[Tensor], key: object) -> list[Tensor]:
    *gradients, scale = inputs
    inverse = scale.reciprocal()
    return [*_any_nonfinite(gradients, key), *(g * inverse for g in gradients)]


def _adjusted(inputs: list[Tensor], key: tuple[float, float, int]) -> list[Tensor]:
    """Apply the rule as torch's kernel does: the scale never grows to infinity."""
    growth_factor, backoff_factor, growth_interval = key
    scale, good_steps, found_inf = inputs
    bad = found_inf != 0
    enough = good_steps + 1 >= growth_interval
    grown = scale * growth_factor
    grown = torch.where(enough & torch.isfinite(grown), grown, scale)
    return [
        torch.where(bad, scale * backoff_factor, grown),
        torch.where(bad | enough, 0, good_steps + 1),
    ]


_adjust = TracedOp("adjust_scale", _adjusted)
_find_inf = TracedOp("find_inf", _any_nonfinite)
_unscale = TracedOp("unscale", _checked_and_unscaled)
