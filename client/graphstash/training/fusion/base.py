"""Fusion: the common part of backward and forward fusion.

Schedules, scalers and trainers detect and wrap `optimizer.step`, so neither kind replaces it. Hooks
around the step hide the gradients that fusion applies.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import nullcontext, suppress
from typing import Any, Final, NoReturn, Self

import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from graphstash.training.fusion.guards import Guards
from graphstash.training.fusion.parameters import FusionError, Memory, named
from graphstash.training.fusion.partial_step import PartialStep, undecorated
from graphstash.training.fusion.uses import Tripwire, WaitingState, is_held, is_shard_held
from graphstash.training.optimizers.base import SyncFreeOptimizer
from graphstash.training.sharding import is_flat_parallel, is_fully_sharded, is_sharded, local

__all__ = ["Fusion", "ModuleHook", "require_unfused"]

# Each of these updates every parameter independently. Stepping subsets of the parameters one after
# another gives the same result as one step of all.
_OF_TORCH: Final = frozenset(
    (
        *(optim.ASGD, optim.Adadelta, optim.Adafactor, optim.Adagrad, optim.Adam, optim.AdamW),
        *(optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
    )
)

_OPTIMIZERS: Final = "graphstash.training.optimizers."

_ALLOWED: Final = frozenset(("__init__", "__module__", "__doc__", "__qualname__", "__repr__"))
"""Attributes that a subclass of an optimizer may define."""

_FUSED: MutableMapping[Tensor, "weakref.ref[Fusion]"] = WeakTensorKeyDictionary()


class ModuleHook:
    """A hook of a module. In a copied or pickled module, it has no effect.

    Args:
        function: called with the module.
        before_copy: called before the hook is copied or pickled; may raise.
    """

    def __init__(self, function: Any, before_copy: Callable[[], None] | None = None) -> None:
        self._function = function
        self._before_copy = before_copy

    def __call__(self, module: nn.Module, *_: object) -> None:
        """Call the function with the module. Ignore torch's other arguments."""
        self._function(module)

    @property
    def __name__(self) -> str:
        """Refuse torch.jit.script, which compiles hooks."""
        raise _HookWithoutNameError(
            "torch.jit.script cannot compile the hooks of a fused module; call close() of the "
            "fusion before, and fuse() again after it"
        )

    def __reduce__(self) -> tuple[type["_NoHook"], tuple[()]]:
        if self._before_copy is not None:
            self._before_copy()
        return _NoHook, ()


class _HookWithoutNameError(FusionError, AttributeError):
    """torch.jit.script reads the name of each hook. Other code may ask whether there is one."""


class _NoHook:
    def __call__(self, *_: object) -> None:
        """Do nothing."""


class Fusion(ABC):
    """The fusion of one optimizer's updates with one model; a context manager.

    Attributes:
        when: "backward" or "forward".
    """

    when: str

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.names: dict[Tensor, str] = {
            parameter: name for name, parameter in model.named_parameters()
        }
        self.parameters = list(_parameters_of(optimizer))
        self._sizes_of_groups = _sizes_of_groups(optimizer)
        self.partial_step = PartialStep(optimizer)
        self.tripwire = Tripwire(self.before_use, size_is_use=self.when == "forward")
        self.by_fsdp = any(map(is_fully_sharded, model.modules()))
        self._handles: list[Any] = []
        self.last_gradients: dict[Tensor, TensorWeakRef] = {}
        """Weak references to the gradients of the first step, until the second step."""
        self._with_state: set[Tensor] | None = None
        """Parameters that had state before the updates of a step, if the step creates more."""
        self._is_closed = False
        _refuse_general(model, optimizer)
        _refuse_parameters(optimizer, self.names, self.parameters)
        self._refuse()
        self._attach_common()
        self._attach()
        _FUSED.update(dict.fromkeys(self.parameters, weakref.ref(self)))

    @abstractmethod
    def flush(self) -> None:
        """Make the updates that wait for the next forward, if there are any.

        Raises:
            FusionError: a backward or an update failed after some parameters were updated.
        """

    def close(self) -> None:
        """Make the waiting updates and end the fusion. The optimizer then works as before `fuse`.

        Raises:
            FusionError: a backward has updated parameters, and no step followed. The fusion ends
                anyway.
        """
        if self._is_closed:
            return
        try:
            self._before_close()
        finally:
            self._is_closed = True
            for handle in self._handles:
                handle.remove()
            for parameter in self.parameters:
                _FUSED.pop(parameter, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(FusionError) if kind is not None else nullcontext():  # keep the first error
            self.close()

    def _refuse(self) -> None:  # noqa: B027 - backward fusion refuses nothing more
        """Raise FusionError if this kind of fusion would not be exact."""

    @abstractmethod
    def _attach(self) -> None:
        """Register the hooks of this kind of fusion."""

    @abstractmethod
    def before_step(self, options: dict[str, Any]) -> None:
        """Hide the gradients that fusion applies. `options` are the step's arguments by name."""

    @abstractmethod
    def after_step(self) -> None:
        """Finish after the optimizer's own step."""

    @abstractmethod
    def before_use(self, tensor: Tensor) -> None:
        """Run before other code uses an armed tensor. Disarm the tensor, or raise FusionError."""

    def keep(self, handle: Any) -> None:
        """Let `close` remove a hook."""
        self._handles.append(handle)

    def remember_gradients(self) -> None:
        """Remember the first step's gradients, so that the second step can refuse them."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                self.last_gradients[parameter] = TensorWeakRef(parameter.grad)

    def has_old_gradient(self, parameter: Tensor) -> bool:
        """Return whether the parameter still has its gradient of the first step, and forget it."""
        last = self.last_gradients.pop(parameter, None)
        return last is not None and parameter.grad is not None and last() is parameter.grad

    def refuse_old_gradient(self, parameter: Tensor, operation: str = "") -> NoReturn:
        """Raise FusionError: the parameter still has the gradient of the last step.
        `operation` uses the gradient, as copies of the parameter and FakeTensorMode do.
        """
        what = f"has freed it, but {operation} uses it" if operation else "would free it"
        raise FusionError(
            f"the gradient of {named([parameter], self.names)} is still that of the last step, "
            f"and fusion {what}; call zero_grad() in each step, without set_to_none=False"
        )

    def state(self) -> Any:
        """Return the optimizer's own state, without the mapping that takes its place."""
        state = self.optimizer.state
        return state.state if isinstance(state, WaitingState) else state

    def state_of(self, parameter: Tensor) -> list[Tensor]:
        """Return the tensors of a parameter's state."""
        values = self.state().get(parameter, {}).values()
        return [value for value in values if isinstance(value, Tensor)]

    def is_held(self, parameter: Tensor, references: int | None = 1) -> bool:
        """Return whether other objects share the memory of a parameter or its state, or could use
        them unnoticed. `references` is as in `uses.is_held`.
        """
        state = self.state_of(parameter)
        if not all(map(self.tripwire.can_arm, (parameter, *state))):
            return True
        if is_sharded(parameter):
            return is_shard_held(parameter, by_fsdp=self.by_fsdp) or any(
                is_shard_held(each, by_fsdp=False) if is_sharded(each) else is_held(each)
                for each in state
            )
        return is_held(parameter, references) or any(map(is_held, state))

    def before_new_state(self, parameters: Iterable[Tensor]) -> None:
        """Remember which parameters have state, if an update of these may create more."""
        if self._with_state is None:
            state = self.state()
            if any(each.grad is not None and each not in state for each in parameters):
                self._with_state = set(state)

    def order_state(self) -> None:
        """Put the states that a step has created into the order of the step alone."""
        known, self._with_state = self._with_state, None
        if known is not None:
            state = self.state()
            for parameter in self.parameters:
                if parameter in state and parameter not in known:
                    state[parameter] = state.pop(parameter)

    def _attach_common(self) -> None:
        optimizer = self.optimizer

        def before(
            _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            names = ("closure", "found_inf", "grad_scale")
            arguments = dict(zip(names, args[1:], strict=False)) | kwargs
            if (closure := arguments.get("closure")) is not None:
                # Lightning computes gradients in the closure. Call it before the fusion acts, and
                # only once.
                with torch.set_grad_enabled(True):
                    loss = closure()
                arguments["closure"] = lambda: loss
            options = arguments
            if arguments.get("found_inf") is None:  # torch.amp.GradScaler sets attributes
                options = arguments | {name: getattr(optimizer, name, None) for name in names[1:]}
            self._require_same_parameters()
            self.before_step(options)
            return args[:1], arguments

        self._before = optimizer.register_step_pre_hook(before)
        self._after = optimizer.register_step_post_hook(lambda *_: self.after_step())
        self.keep(self._before)
        self.keep(self._after)
        self.keep(optimizer.register_state_dict_pre_hook(lambda _: self._before_save()))
        self.keep(optimizer.register_load_state_dict_pre_hook(lambda *_: self._before_load()))
        self.keep(optimizer.register_load_state_dict_post_hook(lambda _: self._loaded()))
        for module in self.model.modules():
            save = ModuleHook(lambda _: self._before_save(), self._before_copy)
            self.keep(module.register_state_dict_pre_hook(save))
            load = ModuleHook(lambda _: self._before_load_of_module())
            self.keep(module.register_load_state_dict_pre_hook(load))

        fused = {each: self.names.get(each, "a parameter") for each in self.parameters}
        self.keep(Guards(self.model, optimizer, fused, self._order_hooks))

    def _order_hooks(self) -> None:
        """Run the fusion's hooks directly before and after the step, inside all hooks of the user.

        A user's hook may clip gradients before the step, or call zero_grad() after it.
        """
        optimizer: Any = self.optimizer
        optimizer._optimizer_step_pre_hooks.move_to_end(self._before.id)
        optimizer._optimizer_step_post_hooks.move_to_end(self._after.id, last=False)

    def _before_close(self) -> None:
        self.flush()

    def _before_save(self) -> None:
        """Make waiting updates, so that the saved values are the same as without fusion."""
        self.flush()

    def _before_load_of_module(self) -> None:
        _refuse_swaps()
        self._before_load()

    def _before_copy(self) -> None:
        """Run at the start of a copy or pickle, which may already contain parameters."""
        self._before_save()

    def _before_load(self) -> None:
        self.flush()

    def _loaded(self) -> None:
        self.partial_step.state_has_changed()

    def _require_same_parameters(self) -> None:
        now = list(_parameters_of(self.optimizer))
        if len(now) != len(self.parameters) or any(
            a is not b for a, b in zip(now, self.parameters, strict=True)
        ):
            raise FusionError(
                "the optimizer has other parameters than when fuse() was called; call close(), "
                "change them, and call fuse() again"
            )
        if _sizes_of_groups(self.optimizer) != self._sizes_of_groups:
            raise FusionError(
                "the optimizer's groups have other parameters than when fuse() was called; call "
                "close(), change them, and call fuse() again"
            )


def require_unfused(parameters: Iterable[Tensor]) -> None:
    """Raise FusionError if a parameter is fused: a traced step does not run the fusion's hooks."""
    for parameter in parameters:
        if (known := _FUSED.get(parameter)) is not None and (fusion := known()) is not None:
            raise FusionError(
                f"{named([parameter], fusion.names)} is fused by hooks of the model, which a "
                "traced step does not run; call close() of the fusion before"
            )


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _sizes_of_groups(optimizer: Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _refuse_general(model: nn.Module, optimizer: Optimizer) -> None:
    if not (isinstance(optimizer, SyncFreeOptimizer) or type(optimizer) in _OF_TORCH):
        raise FusionError(
            f"{type(optimizer).__name__} is not known to treat each parameter by itself; use an "
            "optimizer of graphstash.training or of torch.optim, or train without fusion"
        )
    if isinstance(optimizer, SyncFreeOptimizer) and (own := _overridden(type(optimizer))):
        raise FusionError(
            f"{type(optimizer).__name__} overrides {', '.join(own)}, which fusion would call for a "
            "few parameters at a time; use a hook of the step, or train without fusion"
        )
    for module in model.modules():
        if isinstance(module, DataParallel):
            raise FusionError(
                "DataParallel runs copies of the modules; use DistributedDataParallel, or train "
                "without fusion"
            )
        if isinstance(module, DistributedDataParallel) and module.mixed_precision is not None:
            raise FusionError(
                "DistributedDataParallel(mixed_precision=) trains copies of the parameters; use "
                "torch.autocast instead, or train without fusion"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise FusionError(
                "a ScriptModule (torch.jit.script, torch.jit.trace) runs without hooks; use "
                "torch.compile, or train without fusion"
            )
        if not is_flat_parallel(module):
            continue
        raise FusionError(
            "FullyShardedDataParallel trains copies of what the optimizer has; use fully_shard() "
            'and when="backward", or train without fusion'
        )


def _overridden(kind: type[SyncFreeOptimizer]) -> list[str]:
    """Return the methods of this package's optimizer that a user's subclass replaces."""
    base = next(each for each in kind.__mro__ if each.__module__.startswith(_OPTIMIZERS))
    above = kind.__mro__[: kind.__mro__.index(base)]
    names = sorted({name for each in above for name in vars(each) if name not in _ALLOWED})
    return [
        name
        for name in names
        if callable(known := getattr(base, name, None))
        and undecorated(getattr(kind, name)) != undecorated(known)
    ]


def _refuse_swaps() -> None:
    if torch.__future__.get_swap_module_params_on_conversion():
        raise FusionError(
            "torch.__future__.set_swap_module_params_on_conversion(True) gives parameters other "
            "tensors in load_state_dict() and conversions, and torch refuses that for fused ones; "
            "call close() of the fusion before, or train without fusion"
        )


def _refuse_parameters(
    optimizer: Optimizer, names: dict[Tensor, str], parameters: list[Tensor]
) -> None:
    _refuse_swaps()
    for parameter in parameters:
        if is_lazy(parameter) or parameter.is_meta:
            where = "of a lazy module" if is_lazy(parameter) else "on meta"
            raise FusionError(
                f"{named([parameter], names)} is {where} and has no values yet: call fuse() when "
                "the model has them, with an optimizer of the parameters that it has then"
            )
        if parameter.device.type not in {"cpu", "cuda"}:
            raise FusionError(
                f"fuse() does not apply to parameters on {parameter.device}: a compiler fuses the "
                "update if it gets the whole step as one graph, as from torch_xla; on other "
                "devices, use training.traced_step"
            )
        if is_sharded(parameter) and parameter.device_mesh.device_type != parameter.device.type:  # type: ignore[attr-defined] # a DTensor
            raise FusionError(
                "CPUOffloadPolicy copies gradients while backward goes on, and updates would not "
                "wait; shard without it, or train without fusion"
            )
        known = _FUSED.get(parameter)
        if known is not None and (other := known()) is not None:
            whose = "this optimizer" if other.optimizer is optimizer else "another optimizer"
            raise FusionError(
                f"{named([parameter], other.names)} is already fused with {whose}; call close() "
                "on that fusion first"
            )
    memory = Memory(parameters)
    for parameter in parameters:
        if len(sharing := memory.shared_with(local(parameter))) > 1:
            raise FusionError(
                f"{named(sharing, names)} share memory, and the order of their updates would be "
                "another one; make them one parameter, or train without fusion"
            )
    if names.keys().isdisjoint(parameters):
        raise FusionError(
            "the optimizer has no parameter of the model; give fuse() the model that it trains"
        )
