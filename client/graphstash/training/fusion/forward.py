"""ForwardFusion: update each parameter when a module that reads it is about to run.

`step()` stores the gradients and its current options. The next forward makes the updates, at the
latest when it ends. The first training forward records which module reads each parameter first,
because that need not be its owner. If other code uses a parameter or its gradient earlier, a
tripwire makes the update first. `step()` itself updates a unit if a parameter in it shares memory
with another tensor.
"""

import sys
import weakref
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from operator import is_not
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef

from graphstash.training.fusion.ambient import ambient, restored
from graphstash.training.fusion.base import Fusion, ModuleHook
from graphstash.training.fusion.parameters import FusionError, Memory, has_memory, named
from graphstash.training.fusion.partial_step import Options, in_units, options_of, small_of
from graphstash.training.fusion.uses import (
    WaitingState,
    is_held,
    is_in_mode,
    is_shard_held,
    references_of_ddp,
)
from graphstash.training.sharding import is_fully_sharded, is_sharded, local

__all__ = ["ForwardFusion"]

_REFERENCES_TO_GRADIENT: Final = 2
"""A gradient without other holders has two references: its Python object, and its parameter."""


class ForwardFusion(Fusion):
    """Fusion of updates with the next forward; see `fuse`."""

    when = "forward"

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._running: list[nn.Module] = []
        """Modules of the model whose forward is running, the innermost last."""
        self._readers: _Readers | None = None
        self._units: dict[nn.Module, list[list[Tensor]]] | None = None
        """Units to update before a module runs; None until a forward was recorded."""
        self._all_units: list[list[Tensor]] = []
        self._hooks: dict[nn.Module, list[Any]] = {}
        self._waiting: dict[Tensor, Tensor] = {}
        """By parameter: the gradient that the last step has not applied."""
        self._armed: dict[Tensor, list[Tensor]] = {}
        """By armed parameter or gradient: the unit to update before it is used."""
        self._versions: dict[Tensor, int] = {}
        """By waiting parameter or gradient: its `_version` at `step()`."""
        self._states: dict[Tensor, list[Tensor]] = {}
        """By waiting parameter: the tensors of its state at `step()`."""
        self._state: WaitingState | None = None
        """Replaces the optimizer's state while updates wait."""
        self._options: Options = ()
        self._ambient = ambient()
        """The settings of torch at the last step."""
        self._found_inf: Tensor | None = None
        self._grad_scale: Tensor | None = None
        self._has_new_gradients = False
        """Whether a backward has run since the first step."""
        self._kept: dict[Tensor, TensorWeakRef] = {}
        """By parameter: the first step's gradient, if a backward has accumulated into it. The next
        step refuses it; until then, Accelerate may call zero_grad()."""
        self._is_first_step = True
        self._is_interrupted = False
        self._reduced = {
            each
            for module in model.modules()
            if isinstance(module, DistributedDataParallel)
            for each in module.parameters()
        }
        """Parameters to which DistributedDataParallel has references."""
        super().__init__(model, optimizer)

    def flush(self) -> None:
        """Make the updates that wait for the next forward."""
        self._update(self._all_units)
        if not self._is_interrupted:
            self._release_state()
            self.order_state()

    def _before_copy(self) -> None:
        self._require_whole()
        if self._waiting:
            raise FusionError(
                "updates wait for the model's next forward, and a copy would be without them: call "
                "flush() of the fusion before the model is copied or pickled"
            )

    def _before_load(self) -> None:
        """Drop an update that failed halfway; the loaded values replace it."""
        if self._is_interrupted:
            self._waiting.clear()
            self._disarm(list(self._armed))
            self._is_interrupted = False
            self._release_state()
        self.flush()

    def _refuse(self) -> None:
        if any(map(is_fully_sharded, self.model.modules())):
            raise FusionError(
                "fully_shard() may gather parameters before their module is about to run; use "
                'when="backward", or train without fusion'
            )
        for name, module in self.model.named_modules():
            if _is_compiled(module):
                _refuse_compiled(name or "the model")

    def _attach(self) -> None:
        for module in self.model.modules():
            before, after = ModuleHook(self._before_forward), ModuleHook(self._after_forward)
            self._hooks[module] = [
                module.register_forward_pre_hook(before, prepend=True),
                module.register_forward_hook(after, always_call=True),
            ]
            for handle in self._hooks[module]:
                self.keep(handle)

    def before_step(self, options: dict[str, Any]) -> None:
        """Take the gradients from the step and store the current options."""
        self.flush()  # in case no forward ran since the last step
        if self._units is None or self._running:
            return
        for parameter, kept in self._kept.items():
            if parameter.grad is not None and parameter.grad is kept():
                self.refuse_old_gradient(parameter)
        self._kept.clear()
        if not self._has_new_gradients:  # a second step without a backward
            for parameter in list(self.last_gradients):
                if self.has_old_gradient(parameter):
                    self.refuse_old_gradient(parameter)
        self.last_gradients.clear()
        if self._is_first_step:  # not fused, to find out whether the loop keeps gradients
            self._is_first_step = False
            self.remember_gradients()
            self._watch_new_gradients()
            return
        self._options, self._ambient = options_of(self.optimizer), ambient()
        # The loss scaler changes these tensors in place.
        self._found_inf = _copy(options.get("found_inf"))
        self._grad_scale = _copy(options.get("grad_scale"))
        self._take_gradients()

    def _take_gradients(self) -> None:
        if is_in_mode():
            return  # the mode must see the updates, and may be gone in the next forward
        of_ddp = references_of_ddp(self._reduced)
        self.before_new_state(self.parameters)
        for unit in self._all_units:
            if any(self._is_shared(each, of_ddp if each in self._reduced else 1) for each in unit):
                continue  # the step updates the unit
            for parameter in unit:
                if parameter.grad is not None:
                    self._waiting[parameter] = parameter.grad
                    parameter.grad = None

    def _is_shared(self, parameter: Tensor, references: int) -> bool:
        """Return whether other objects share the memory of an unsharded parameter, its gradient or
        its state.
        """
        if self.is_held(parameter, references):
            return True
        gradient = parameter.grad
        if gradient is None:
            return False
        if not self.tripwire.can_arm(gradient):
            return True
        if is_sharded(gradient):
            return is_shard_held(gradient, by_fsdp=False)
        return is_held(gradient, _REFERENCES_TO_GRADIENT)

    def _watch_new_gradients(self) -> None:
        of = weakref.ref(self)
        handles: list[Any] = []

        def gradient_is_whole(parameter: Tensor) -> None:
            if (fusion := of()) is not None and fusion.last_gradients:
                fusion._has_new_gradients = True
                if parameter.grad is not None and fusion.has_old_gradient(parameter):
                    fusion._kept[parameter] = TensorWeakRef(parameter.grad)
                return
            for handle in handles:
                handle.remove()

        for parameter in self.last_gradients:
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(gradient_is_whole))
                self.keep(handles[-1])

    def after_step(self) -> None:
        """Return the gradients to the loop, and arm the waiting parameters."""
        if any(each.grad is not None for unit in self._all_units for each in unit):
            self.partial_step.state_has_changed()  # the step may have changed a common step count
        if self._waiting:
            self.partial_step.set_counts_apart()
        for unit in self._all_units:
            for parameter in unit:
                if (gradient := self._waiting.get(parameter)) is not None:
                    if parameter.grad is None:
                        parameter.grad = gradient
                    self._arm(parameter, gradient, unit)
        if self._waiting:
            self._state = WaitingState(self.optimizer.state, self.flush)
            self.optimizer.state = self._state

    def _release_state(self) -> None:
        """Restore the optimizer's state, unless the loop has replaced it."""
        if self._state is not None and self.optimizer.state is self._state:
            self.optimizer.state = self._state.state
        self._state = None

    def _arm(self, parameter: Tensor, gradient: Tensor, unit: list[Tensor]) -> None:
        """Make any other use of the parameter, its gradient or its state update the unit first."""
        self._states[parameter] = self.state_of(parameter)
        for tensor in (parameter, gradient):
            self._versions[tensor] = tensor._version
        for tensor in (parameter, gradient, *self._states[parameter]):
            self.tripwire.arm(tensor)
            self._armed[tensor] = unit

    def _disarm(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self.tripwire.disarm(tensor)
            self._armed.pop(tensor, None)

    def before_use(self, tensor: Tensor) -> None:
        """Make the update that the tensor waits for."""
        self._require_eager()
        if (unit := self._armed.get(tensor)) is not None:
            self._update([unit])
        self.tripwire.disarm(tensor)

    def _before_forward(self, module: nn.Module) -> None:
        if torch.compiler.is_compiling():  # compiled after fuse(), as Trainer and Accelerate do
            torch._dynamo.disable(_refuse_compiled)("the model")
        self._require_eager()
        is_outermost = not self._running
        if is_outermost:
            self._require_whole()
        self._running.append(module)
        if is_outermost:
            self._begin_forward(module)
        if self._waiting and self._units is not None:
            self._update(self._units.get(module, ()))

    def _begin_forward(self, module: nn.Module) -> None:
        if module is not self.model or not (module.training and torch.is_grad_enabled()):
            # Only the model's forward in training is recorded. Other forwards may read a module's
            # parameters without calling the module.
            self.flush()
        elif (
            self._units is None
            and torch._C._current_graph_task_id() == -1
            and torch._C._functorch.maybe_current_level() is None  # its tensors have no memory
        ):
            self._readers = _Readers(self.parameters, self._running)
            self._readers.__enter__()  # type: ignore[no-untyped-call] # torch

    def _after_forward(self, module: nn.Module) -> None:
        if not self._running or self._running[-1] is not module:
            return  # this forward began before fuse()
        self._running.pop()
        if self._running:
            return
        if self._readers is not None:
            readers, self._readers = self._readers, None
            readers.__exit__(None, None, None)  # type: ignore[no-untyped-call] # torch
            self._set_units(readers.of)
        if not self._is_interrupted:  # otherwise an update in this forward has raised
            self.flush()

    def _set_units(self, reader_of: dict[Tensor, nn.Module]) -> None:
        """Assign each unit to the modules that own its parameters or read them first."""
        small = small_of(self.parameters)
        users: dict[Tensor, dict[nn.Module, None]] = {
            each: {} for each in self.parameters if each in self.names and each not in small
        }
        for module in self.model.modules():
            for own in module.parameters(recurse=False):
                if own in users:
                    users[own][module] = None
        for read, reader in reader_of.items():
            if read in users:
                users[read][reader] = None
        in_order = [*(each for each in reader_of if each in users), *users]  # in order of first use
        self._all_units = in_units(list(dict.fromkeys(in_order)))
        self._units = {}
        for unit in self._all_units:
            for module in dict.fromkeys(module for each in unit for module in users[each]):
                self._units.setdefault(module, []).append(unit)
        self.partial_step.set_units(self._all_units)
        self._remove_hooks(users.keys())

    def _remove_hooks(self, fused: AbstractSet[Tensor]) -> None:
        """Remove hooks from modules that neither contain nor first read fused parameters."""
        for module, handles in self._hooks.items():
            if module not in (self._units or ()) and fused.isdisjoint(module.parameters()):
                for handle in handles:
                    handle.remove()
        self._hooks.clear()

    def _require_whole(self) -> None:
        if self._is_interrupted:
            raise FusionError(
                "an update failed in the middle: what the model has now was never trained; load "
                "the last checkpoint into a new model and optimizer"
            )

    def _require_eager(self) -> None:
        if self._waiting and torch._C._functorch.maybe_current_level() is not None:
            raise FusionError(
                "a transform of torch.func runs the model while updates wait for its next forward; "
                "call flush() of the fusion before"
            )

    def _update(self, units: Iterable[list[Tensor]]) -> None:
        self._require_whole()
        if not self._waiting:
            return
        for unit in units:
            if any(each in self._waiting for each in unit):
                self._update_unit(unit)

    def _update_unit(self, unit: list[Tensor]) -> None:
        later = [each.grad for each in unit]  # from a backward after the step
        self._is_interrupted = True
        gradients = [self._waiting.pop(each, None) for each in unit]
        states = {each: self._states.pop(each, []) for each in unit}
        self._disarm(
            [
                *(*unit, *(each for each in gradients if each is not None)),
                *(tensor for state in states.values() for tensor in state),
            ]
        )
        self._require_unchanged(unit, gradients)
        for each, gradient in zip(unit, gradients, strict=True):
            each.grad = gradient
        now = self.optimizer.state
        if self._state is not None:
            self.optimizer.state = self._state.state
        try:
            self._require_same_state(states)
            with restored(self._ambient):
                self.partial_step(
                    unit, self._options, found_inf=self._found_inf, grad_scale=self._grad_scale
                )
            self._is_interrupted = False
        finally:
            self.optimizer.state = now
            if now is not self._state:  # the loop has replaced it since step()
                self.partial_step.state_has_changed()
            for each, gradient in zip(unit, later, strict=True):
                each.grad = gradient

    def _require_same_state(self, states: dict[Tensor, list[Tensor]]) -> None:
        replaced = []
        for each, state in states.items():
            now = self.state_of(each) if state else state
            if len(now) != len(state) or any(map(is_not, now, state)):
                replaced.append(each)
        if replaced:
            raise FusionError(
                f"the optimizer's state of {named(replaced, self.names)} was replaced after step() "
                "in a dictionary that other code keeps, when its update had not been made: get the "
                "dictionary from optimizer.state each time or call flush() of the fusion before, "
                "and load the last checkpoint into a new model and optimizer"
            )

    def _require_unchanged(self, unit: list[Tensor], gradients: list[Tensor | None]) -> None:
        changed, added, taken = [], [], []
        for each, gradient in zip(unit, gradients, strict=True):
            # DDP may have taken references since the step.
            if not is_sharded(each) and is_held(each, None if each in self._reduced else 1):
                taken.append(each)
            if self._versions.pop(each, each._version) != each._version:
                changed.append(each)
            if gradient is None:
                continue
            if self._versions.pop(gradient, gradient._version) != gradient._version:
                added.append(each)
        if added:
            raise FusionError(
                f"the gradient of {named(added, self.names)} was changed after step(), when its "
                "update had not been made (a backward of an earlier forward, or code that torch "
                "does not announce): call zero_grad() or flush() of the fusion before, and load "
                "the last checkpoint into a new model and optimizer"
            )
        if taken:
            raise FusionError(
                f"the memory of {named(taken, self.names)} was taken after step() by code that "
                "torch does not announce (to_dlpack, torch.jit, an autograd.Function), when its "
                "update had not been made: call flush() of the fusion before, and load the last "
                "checkpoint into a new model and optimizer"
            )
        if changed:
            raise FusionError(
                f"{named(changed, self.names)} was written after step() by code that torch does "
                "not announce, when its update had not been made: call flush() of the fusion "
                "before, and load the last checkpoint into a new model and optimizer"
            )


class _Readers(TorchDispatchMode):
    """Records the module that reads each parameter first.

    Attributes:
        of: by parameter: the innermost module that was running.
    """

    def __init__(self, parameters: Iterable[Tensor], running: list[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch
        self.of: dict[Tensor, nn.Module] = {}
        self._running = running
        self._memory = Memory(parameters)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and has_memory(here := local(leaf)):
                for parameter in self._memory.shared_with(here):
                    self.of.setdefault(parameter, self._running[-1])
        return func(*args, **(kwargs or {}))


def _is_compiled(module: nn.Module) -> bool:
    frames = sys.modules.get("torch._dynamo.eval_frame")  # not imported: nothing is compiled
    wrapper = () if frames is None else frames.OptimizedModule
    return isinstance(module, wrapper) or module._compiled_call_impl is not None


def _refuse_compiled(name: str) -> None:
    raise FusionError(
        f"{name} is compiled by torch.compile, which may run a module without the hook that "
        'updates it; use when="backward", or training.traced_step, which compiles the update with '
        "the rest"
    )


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
