"""ForwardFusion: each parameter is updated when a module that reads it is about to run.

`step()` takes the gradients away and remembers the options of that moment; the updates are made by
the next forward, and whatever is left when that forward ends is made then. Which module reads a
parameter first is seen in the first forward: it need not be the one that has it.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphstash.training.fusion.base import Fusion, FusionError, ModuleHook
from graphstash.training.fusion.partial_step import Options, in_units, options_of

__all__ = ["ForwardFusion"]


class ForwardFusion(Fusion):
    """See `fuse`."""

    when = "forward"

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._running: list[nn.Module] = []
        """Those of the model's modules whose forward runs, the innermost last."""
        self._readers: _Readers | None = None
        self._units: dict[nn.Module, list[list[Tensor]]] | None = None
        """What to update before a module runs, in units; None until a forward was watched."""
        self._all_units: list[list[Tensor]] = []
        self._waiting: dict[Tensor, Tensor] = {}
        """By parameter: the gradient of the last step."""
        self._options: Options = ()
        self._found_inf: Tensor | None = None
        self._grad_scale: Tensor | None = None
        super().__init__(model, optimizer)

    def flush(self) -> None:
        """Makes the updates that wait for the next forward."""
        self._update(self._all_units)

    def _refuse(self) -> None:
        if any(isinstance(module, nn.DataParallel) for module in self.model.modules()):
            raise FusionError(
                "DataParallel runs copies of the modules; use DistributedDataParallel, or train "
                "without fusion"
            )
        for name, module in self.model.named_modules():
            if _is_compiled(module):
                raise FusionError(
                    f"{name or 'the model'} is compiled by torch.compile, which may run a module "
                    'without the hook that updates it; use when="backward", or '
                    "training.traced_step, which compiles the update with the rest"
                )

    def _attach(self) -> None:
        for module in self.model.modules():
            self.keep(
                module.register_forward_pre_hook(ModuleHook(self._before_forward), prepend=True)
            )
            self.keep(
                module.register_forward_hook(ModuleHook(self._after_forward), always_call=True)
            )

    def before_step(self, options: dict[str, Any]) -> None:
        """Takes the gradients, with the options of this moment."""
        self.flush()  # of a step that no forward came after
        if self._units is None or self._running:
            return
        self.partial_step.watch_layouts()
        self._options = options_of(self.optimizer)
        # The loss scale changes its tensors in place.
        self._found_inf = _copy(options.get("found_inf"))
        self._grad_scale = _copy(options.get("grad_scale"))
        for parameter in (each for unit in self._all_units for each in unit):
            if parameter.grad is not None:
                self._waiting[parameter] = parameter.grad
                parameter.grad = None

    def after_step(self) -> None:
        """Of a step that was made at once, all parameters share a count."""
        if not self._waiting:
            self.partial_step.state_has_changed()

    def _before_forward(self, module: nn.Module) -> None:
        self._require_eager()
        is_outermost = not self._running
        self._running.append(module)
        if is_outermost:
            self._begin_forward(module)
        if self._waiting and self._units is not None:
            self._update(self._units.get(module, ()))

    def _begin_forward(self, module: nn.Module) -> None:
        if module is not self.model or not (module.training and torch.is_grad_enabled()):
            # What is watched is the forward in training: another one may read a module's parameters
            # without calling it.
            self.flush()
        elif self._units is None and torch._C._current_graph_task_id() == -1:
            self._readers = _Readers(self.parameters, self._running)
            self._readers.__enter__()  # type: ignore[no-untyped-call] # torch

    def _after_forward(self, module: nn.Module) -> None:
        if not self._running or self._running[-1] is not module:
            return  # it began before fuse() was called
        self._running.pop()
        if self._running:
            return
        if self._readers is not None:
            readers, self._readers = self._readers, None
            readers.__exit__(None, None, None)  # type: ignore[no-untyped-call] # torch
            self._set_units(readers.of)
        self.flush()

    def _set_units(self, reader_of: dict[Tensor, nn.Module]) -> None:
        """A parameter is updated before the first of: who has it, and who was seen to read it."""
        users: dict[Tensor, dict[nn.Module, None]] = {
            each: {} for each in self.parameters if each in self.names
        }
        for module in self.model.modules():
            for own in module.parameters(recurse=False):
                if own in users:
                    users[own][module] = None
        for read, reader in reader_of.items():
            if read in users:
                users[read][reader] = None
        in_order = [*(each for each in reader_of if each in users), *users]  # as forward reads them
        self._all_units = in_units(list(dict.fromkeys(in_order)))
        self._units = {}
        for unit in self._all_units:
            for module in dict.fromkeys(module for each in unit for module in users[each]):
                self._units.setdefault(module, []).append(unit)
        self.partial_step.set_units(self._all_units)

    def _require_eager(self) -> None:
        if self._waiting and torch._C._functorch.maybe_current_level() is not None:
            raise FusionError(
                "a transform of torch.func runs the model while updates wait for its next forward; "
                "call flush() of the fusion before"
            )

    def _update(self, units: Iterable[list[Tensor]]) -> None:
        due = [unit for unit in units if any(each in self._waiting for each in unit)]
        members = [each for unit in due for each in unit]
        if not members:
            return
        later = [each.grad for each in members]  # of a backward that came after the step
        for each in members:
            each.grad = self._waiting.pop(each, None)
        try:
            self.partial_step(
                members, self._options, found_inf=self._found_inf, grad_scale=self._grad_scale
            )
        finally:
            for each, gradient in zip(members, later, strict=True):
                each.grad = gradient


class _Readers(TorchDispatchMode):
    """Sees which module reads a parameter first.

    Attributes:
        of: by parameter: the innermost module of those that were running.
    """

    def __init__(self, parameters: Iterable[Tensor], running: list[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch
        self.of: dict[Tensor, nn.Module] = {}
        self._running = running
        self._by_memory: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            place = parameter.untyped_storage().data_ptr()
            self._by_memory.setdefault(place, []).append(parameter)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                for parameter in self._by_memory.get(leaf.untyped_storage().data_ptr(), ()):
                    self.of.setdefault(parameter, self._running[-1])
        return func(*args, **(kwargs or {}))


def _is_compiled(module: nn.Module) -> bool:
    frames = sys.modules.get("torch._dynamo.eval_frame")  # nothing is compiled before its import
    wrapper = () if frames is None else frames.OptimizedModule
    return isinstance(module, wrapper) or module._compiled_call_impl is not None


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
