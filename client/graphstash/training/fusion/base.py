"""Fusion: what backward and forward fusion share.

Neither replaces `optimizer.step`, which schedules, scalers and trainers know and wrap: they use the
hooks that torch has. A hook before the step leaves to it only the gradients that it is to use.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from graphstash.training.fusion.partial_step import PartialStep
from graphstash.training.optimizers.base import SyncFreeOptimizer

__all__ = ["Fusion", "FusionError", "ModuleHook", "named"]

_SHOWN: Final = 3

# Each treats every parameter by itself: its step for some of them is its step for all of them, one
# after the other.
_OF_TORCH: Final = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
        *("RMSprop", "Rprop", "SGD"),
    )
    if hasattr(torch.optim, name)
)

_FUSED: MutableMapping[Tensor, "weakref.ref[Fusion]"] = WeakTensorKeyDictionary()  # type: ignore[no-untyped-call] # torch


class FusionError(RuntimeError):
    """Fused updates would not be, or are no longer, those of the optimizer alone."""


class ModuleHook:
    """A hook of a module. What is copied or pickled with the module does nothing."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, module: nn.Module, *_: object) -> None:
        """Called by torch with the module, and what the kind of hook gets beside it."""
        self._function(module)

    def __deepcopy__(self, memo: Any) -> "_NoHook":
        del memo
        return _NoHook()

    def __reduce__(self) -> tuple[type["_NoHook"], tuple[()]]:
        return _NoHook, ()


class _NoHook:
    def __call__(self, *_: object) -> None:
        """The copy of a fused module is not fused."""


class Fusion(ABC):
    """Updates of one optimizer, fused with one model; a context manager.

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
        self.partial_step = PartialStep(optimizer)
        self._handles: list[Any] = []
        self._is_closed = False
        _refuse_general(model, optimizer, self.parameters)
        self._refuse()
        self._attach_common()
        self._attach()
        _FUSED.update(dict.fromkeys(self.parameters, weakref.ref(self)))

    @abstractmethod
    def flush(self) -> None:
        """Makes the updates that wait for the next forward, if there are any.

        Raises:
            FusionError: a backward has failed after some parameters were updated.
        """

    def close(self) -> None:
        """Makes the updates that wait, and ends the fusion; the optimizer works as before."""
        if self._is_closed:
            return
        try:
            self.flush()
        finally:
            self._is_closed = True
            for handle in self._handles:
                handle.remove()
            for parameter in self.parameters:
                _FUSED.pop(parameter, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _refuse(self) -> None:
        """Raises FusionError where this kind of fusion is not exact."""

    @abstractmethod
    def _attach(self) -> None:
        """Registers the hooks of this kind."""

    @abstractmethod
    def before_step(self, options: dict[str, Any]) -> None:
        """Leaves to the step only what it is to do; `options` are its arguments by name."""

    @abstractmethod
    def after_step(self) -> None:
        """The optimizer has done what was left to it."""

    def keep(self, handle: Any) -> None:
        """Removes a hook at the end."""
        self._handles.append(handle)

    def _attach_common(self) -> None:
        optimizer = self.optimizer

        def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            names = ("self", "closure", "found_inf", "grad_scale")
            given = dict(zip(names, args, strict=False)) | kwargs
            if given.get("closure") is not None:
                raise FusionError(
                    "a closure computes gradients inside step(), where they cannot be fused; call "
                    "backward() before step()"
                )
            if given.get("found_inf") is None:  # torch.amp.GradScaler says it by attributes
                given["found_inf"] = getattr(optimizer, "found_inf", None)
                given["grad_scale"] = getattr(optimizer, "grad_scale", None)
            self._require_same_parameters()
            self.before_step(given)

        self.keep(optimizer.register_step_pre_hook(before))
        self.keep(optimizer.register_step_post_hook(lambda *_: self.after_step()))
        self.keep(optimizer.register_state_dict_pre_hook(lambda _: self.flush()))
        self.keep(optimizer.register_load_state_dict_pre_hook(lambda *_: self._before_load()))
        self.keep(optimizer.register_load_state_dict_post_hook(lambda _: self._loaded()))
        for module in self.model.modules():
            flush = ModuleHook(lambda _: self.flush())
            self.keep(module.register_state_dict_pre_hook(flush))  # type: ignore[no-untyped-call] # torch
            load = ModuleHook(lambda _: self._before_load())
            self.keep(module.register_load_state_dict_pre_hook(load))  # type: ignore[no-untyped-call] # torch

    def _before_load(self) -> None:
        """Old updates must not come on top of what is loaded."""
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


def named(parameters: Iterable[Tensor], names: dict[Tensor, str]) -> str:
    """Some parameters for people: the first names, and how many there are more."""
    found = [names.get(parameter, "a parameter outside of the model") for parameter in parameters]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _refuse_general(model: nn.Module, optimizer: Optimizer, parameters: list[Tensor]) -> None:
    if not (isinstance(optimizer, SyncFreeOptimizer) or type(optimizer) in _OF_TORCH):
        raise FusionError(
            f"{type(optimizer).__name__} is not known to treat each parameter by itself; use an "
            "optimizer of graphstash.training or of torch.optim, or train without fusion"
        )
    for parameter in parameters:
        if parameter.device.type not in {"cpu", "cuda"}:
            raise FusionError(
                f"parameters are on {parameter.device}, where the compiler fuses the update by "
                "itself: make the whole step one graph (on torch_xla it is; elsewhere "
                "training.traced_step) instead of fuse()"
            )
        if isinstance(parameter, DTensor):
            raise FusionError(
                "parameters are sharded (DTensor), and FSDP reads and writes them in hooks of its "
                "own; use the optimizer without fuse()"
            )
        known = _FUSED.get(parameter)
        if known is not None and (other := known()) is not None:
            whose = "this optimizer" if other.optimizer is optimizer else "another optimizer"
            raise FusionError(
                f"{named([parameter], other.names)} is already fused with {whose}; call close() "
                "on that fusion first"
            )
    if set(model.parameters()).isdisjoint(parameters):
        raise FusionError(
            "the optimizer has no parameter of the model; give fuse() the model that it trains"
        )
