"""Guards: refuse other optimizers that update fused parameters, and other modules that use them.

Only torch's global hooks for all optimizers and modules report these uses. They keep no object of
the training alive.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from graphstash.training.fusion.parameters import FusionError, named

__all__ = ["Guards"]

_COLLECTED: Final[list[RemovableHandle]] = []
"""Hooks of garbage-collected guards, without effect. The next guards remove them: the collector may
run while torch iterates over its hooks, and a removal would then fail that optimizer's step."""


class Guards:
    """Raises FusionError before another optimizer or a changed module uses a fused parameter.

    `before_step` is called in each of the optimizer's steps, before its own hooks. Held weakly.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        names: dict[Tensor, str],
        before_step: Callable[[], None],
    ) -> None:
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet(model.modules())
        self._optimizer = weakref.ref(optimizer)
        self._names = names
        self._before_step = weakref.WeakMethod(before_step)
        me = weakref.WeakMethod
        step, module, parameter = me(self._step), me(self._module), me(self._parameter)
        self._handles = [
            register_optimizer_step_pre_hook(lambda *given: _call(step, given)),
            register_module_module_registration_hook(lambda *given: _call(module, given)),
            register_module_parameter_registration_hook(lambda *given: _call(parameter, given)),
        ]
        while _COLLECTED:
            _COLLECTED.pop().remove()
        weakref.finalize(self, _COLLECTED.extend, self._handles)

    def remove(self) -> None:
        """Remove the guards' hooks from torch."""
        for handle in self._handles:
            handle.remove()

    def _step(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if optimizer is self._optimizer():
            _call(self._before_step, ())
            return
        shared = self._fused(p for group in optimizer.param_groups for p in group["params"])
        if shared:
            raise FusionError(
                f"{named(shared, self._names)}: another optimizer ({type(optimizer).__name__}) "
                "updates what is fused, and would miss gradients; give each parameter to one "
                "optimizer, or train without fusion"
            )

    def _module(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is None or parent not in self._modules:
            return
        for module in child.modules():
            if module not in self._modules:
                for own, value in module.named_parameters(recurse=False):
                    self._refuse(f"{name}.{own}", value)
                self._modules.add(module)

    def _parameter(self, parent: nn.Module, name: str, value: nn.Parameter | None) -> None:
        is_new = parent in self._modules and parent._parameters.get(name) is not value
        if is_new and value is not None:
            self._refuse(name, value)

    def _refuse(self, name: str, value: Tensor) -> None:
        if self._fused([value]):
            raise FusionError(
                f"{name} would be {named([value], self._names)}, which is fused where the model "
                "had it when fuse() was called; call close(), change the model, and call fuse() "
                "again"
            )

    def _fused(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        return [parameter for parameter in parameters if parameter in self._names]


def _call(method: "weakref.WeakMethod[Any]", given: tuple[Any, ...]) -> None:
    if (found := method()) is not None:
        found(*given)
