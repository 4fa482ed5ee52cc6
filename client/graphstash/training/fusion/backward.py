"""BackwardFusion: update each unit of parameters in backward, once its gradients are complete.

A parameter's gradient is complete when autograd has added the contributions of all its uses. After
that, backward must not read the parameter. The first step watches for such reads. If the parameter
is in a DDP bucket, the update follows the reduction of the bucket. Between the update and `step()`,
every use of the parameter or its gradient raises FusionError. If another object holds the
parameter's memory, uses of it cannot be detected, and `step()` makes the update.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from graphstash.training.fusion.ambient import Ambient, ambient
from graphstash.training.fusion.base import Fusion, ModuleHook
from graphstash.training.fusion.buckets import Buckets
from graphstash.training.fusion.order import StreamOrder
from graphstash.training.fusion.parameters import FusionError, named
from graphstash.training.fusion.partial_step import Options, in_units, options_of, small_of
from graphstash.training.fusion.uses import (
    StandIn,
    WaitingState,
    is_in_mode,
    is_named,
    stand_in_for,
)
from graphstash.training.sharding import is_fully_sharded, is_sharded, local

__all__ = ["BackwardFusion"]

_FIRST_STEP: Final = -1
"""Entry of `_backwards` for the updates of the first step, which no backward makes."""

_USED: Final = (
    "is read or written between backward() and step() (a decay by hand, a norm that is logged, a "
    "hook of an activation in backward)"
)

_OF_A_GENERATOR: Final = (
    "the loss of a GAN's generator, which needs discriminator.requires_grad_(False) in its step"
)


@dataclass(slots=True)
class _Unit:
    parameters: list[Tensor]
    missing: set[Tensor] = field(default_factory=set)

    def begin(self) -> None:
        self.missing = set(self.parameters)


@dataclass(slots=True)
class _Watched:
    came: set[Tensor] = field(default_factory=set)
    gradients: dict[Tensor, tuple[Tensor, int, Tensor]] = field(default_factory=dict)
    """Each parameter's gradient after the last backward, the gradient's version, and its norm. The
    norm detects torch's unscaling kernel, which changes the gradient but not its version."""
    twice: list[Tensor] = field(default_factory=list)
    read_late: dict[Tensor, None] = field(default_factory=dict)
    used: dict[Tensor, None] = field(default_factory=dict)
    """Parameters that were read or written between backward() and step()."""
    reduces: bool = False
    """Whether DDP has not yet reduced the gradients of the current backward."""

    def note(self, parameter: Tensor) -> None:
        if (gradient := parameter.grad) is not None:
            self.gradients[parameter] = (gradient, gradient._version, _norm(gradient))


class BackwardFusion(Fusion):
    """Fusion of updates with backward; see `fuse`."""

    when = "backward"

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._units: list[_Unit] = []
        self._unit_of: dict[Tensor, _Unit] = {}
        self._updated: set[Tensor] = set()
        self._backwards: set[int] = set()
        """Graph task ids of backwards that have updated parameters and still run or have failed."""
        self._options: Options | None = None
        """The optimizer's options in the updates since the last step."""
        self._ambient: Ambient | None = None
        self._watched: _Watched | None = _Watched()
        self._gradient_hooks: list[Any] = []
        self._armed: list[Tensor] = []
        self._stand_ins: dict[Tensor, StandIn] = {}
        """By parameter: the stand-in that replaces its freed gradient."""
        self._is_stepping = False
        self._reduced: set[Tensor] = set()
        self._came: set[Tensor] = set()
        """Parameters in DDP's buckets that autograd has given a gradient since the last step."""
        self._bucket_units: list[list[Tensor]] = []
        self._freed: dict[Tensor, StorageWeakRef | None] = {}
        """By parameter whose gradient was freed since the last step, in order: the gradient's
        memory, which other code must not hold when backward ends."""
        self._step_token = object()
        """Token that each step replaces. An update of a bucket with an older token does nothing."""
        self._left: dict[Tensor, tuple[Tensor, int]] = {}
        """By parameter that only the step updates: its gradient after backward, and the version."""
        self._updating = threading.Lock()
        """Serializes updates, because the buckets' updates run in other threads."""
        self._order = StreamOrder()
        without = "train without fusion"
        self._remedy = f'use when="forward", or {without}'
        if any(map(is_fully_sharded, model.modules())):
            self._remedy = without
        super().__init__(model, optimizer)

    def flush(self) -> None:
        """Raise FusionError if a backward failed after it had updated some parameters."""
        if self._backwards:
            raise FusionError(
                f"a backward failed after {self._share_updated()} "
                "parameters were updated: what the model has now was never trained; load the last "
                "checkpoint into a new model and optimizer"
            )

    def _before_close(self) -> None:
        """Clean up. Raise FusionError if some parameters are updated, but the step is missing."""
        try:
            self.flush()
            if self._updated:
                raise FusionError(
                    f"the last backward has updated {self._share_updated()} parameters, and no "
                    "step() came after it: what the model has now was never trained; make the step "
                    f"before close(), or load the last checkpoint, and {self._remedy}"
                )
        finally:
            self._release_state()
            self._disarm()
            self._remove_stand_ins()

    def _before_save(self) -> None:
        """Refuse to save between backward and step, when only some parameters are updated."""
        self.flush()
        if self._updated:
            raise FusionError(
                f"{self._share_updated()} parameters are updated already, the others by step(); "
                "save after step()"
            )

    def _share_updated(self) -> str:
        return f"{len(self._updated)} of {len(self.parameters)}"

    def _before_load(self) -> None:
        """Forget the updates of a failed backward: the load replaces their results."""
        if self._backwards:
            self._end_step()

    def _attach(self) -> None:
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        for module in self.model.modules():
            if isinstance(module, DistributedDataParallel):
                buckets = Buckets(module, self._updater_of, self._has_gradient)
                self.keep(buckets)
                self._reduced |= set(buckets.parameters) & set(trained)
        order = {parameter: number for number, parameter in enumerate(self.names)}
        last_first = sorted(trained, key=lambda each: -order.get(each, -1))
        alone = [each for each in last_first if each not in self._reduced]
        small = small_of(alone)
        for parameters in in_units(each for each in alone if each not in small):
            unit = _Unit(parameters)
            unit.begin()
            self._units.append(unit)
            self._unit_of.update(dict.fromkeys(parameters, unit))
        self._set_units()
        self._watch = _Watch(self)
        self._follow_gradients(trained)

    def _follow_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Watch the gradients of these parameters only. The hooks run after all earlier hooks."""
        for handle in self._gradient_hooks:
            handle.remove()
        # The garbage collector does not traverse hooks of tensors, so a strong reference would keep
        # the fusion alive forever. The optimizer's hooks keep the fusion alive.
        this = weakref.ref(self)

        def gradient_is_whole(parameter: Tensor) -> None:
            if (fusion := this()) is not None:
                fusion._gradient_is_whole(parameter)

        for parameter in parameters:
            handle = parameter.register_post_accumulate_grad_hook(gradient_is_whole)
            self._gradient_hooks.append(handle)
            self.keep(handle)

    def before_step(self, options: dict[str, Any]) -> None:
        """Check gradients and options. The step then applies only the remaining gradients."""
        self._release_state()
        self.flush()
        self.last_gradients.clear()
        if options.get("found_inf") is not None:
            raise FusionError(
                "a loss scale decides from all gradients whether the step counts, but parameters "
                "are updated before all are there; train in bf16 without a loss scale, or "
                + self._remedy
            )
        self._refuse_module_hooks()
        self._require_left_gradients()
        self._disarm()
        self._remove_stand_ins()  # the step would use the stand-ins
        self._is_stepping = True
        if self._watched is not None:
            self._end_watching(self._watched)
        elif self._options is not None and _differ(self._options, options_of(self.optimizer)):
            raise FusionError(
                "the optimizer's options (lr, ...) were changed between backward() and step(), but "
                'parameters are updated in backward(); change them before, or use when="forward"'
            )
        elif self._updated and is_in_mode():
            raise FusionError(
                "a TorchDispatchMode or TorchFunctionMode is active in step(), but parameters were "
                f"updated in backward(); activate it in both, or {self._remedy}"
            )
        elif self._options is not None and self._ambient != (now := ambient()):
            raise FusionError(
                "a setting of torch was changed between backward() and step() (default dtype, "
                "matmul precision, number of threads, flushing of denormals, default device: "
                f"{self._ambient} before, {now} now), but parameters are updated in backward(); "
                f"change it before, or {self._remedy}"
            )
        fused = self._unit_of.keys() | self._reduced
        if any(each.grad is not None for each in fused - self._updated):
            self.partial_step.state_has_changed()

    def _require_left_gradients(self) -> None:
        """Refuse to step if gradients were set, removed or changed since backward."""
        added: list[Tensor] = []
        removed: list[Tensor] = []
        for parameter in self._freed:
            if (gradient := parameter.grad) is not self._stand_ins.get(parameter):
                (removed if gradient is None else added).append(parameter)
        for parameter, stand_in in self._stand_ins.items():
            if parameter.grad is stand_in and parameter not in self._freed:
                self.refuse_old_gradient(parameter)
        if removed:
            raise FusionError(
                f"{len(removed)} gradients ({named(removed, self.names)}) were removed between "
                "backward() and step() (zero_grad()), when their parameters were updated already; "
                f"{self._remedy}"
            )
        if added:  # the step would update their parameters a second time
            raise FusionError(
                f"{len(added)} gradients ({named(added, self.names)}) were set between backward() "
                f"and step(), when their parameters were updated already; {self._remedy}"
            )
        changed = [
            parameter
            for parameter, (gradient, version) in self._left.items()
            if parameter.grad is not gradient or gradient._version != version
        ]
        self._left.clear()
        if changed:
            raise FusionError(
                f"{len(changed)} gradients ({named(changed, self.names)}) were changed between "
                f"backward() and step() (clipping), when {self._share_updated()} parameters were "
                f"updated already; {self._remedy}"
            )

    def _refuse_module_hooks(self) -> None:
        for name, module in self.model.named_modules():
            if module._backward_hooks or module._backward_pre_hooks:
                raise FusionError(
                    f"{name or 'the model'} has a backward hook (register_full_backward_hook), "
                    f"which may read parameters that are updated already; {self._remedy}"
                )

    def after_step(self) -> None:
        """Put stand-ins in place of freed gradients, and prepare for the next backward."""
        self._is_stepping = False
        self.order_state()
        for parameter in self._freed:
            if parameter.grad is None:
                self._stand_in(parameter)
        self._end_step()

    def _end_step(self) -> None:
        with self._updating:
            self._step_token = object()
            self._order.forget()
        self._release_state()
        self._disarm()
        self._updated.clear()
        self._freed.clear()
        self._came.clear()
        self._left.clear()
        self._backwards.clear()
        self._options = None
        self._with_state = None
        for unit in self._units:
            unit.begin()

    def _gradient_is_whole(self, parameter: Tensor) -> None:
        if self._watched is not None:
            self._note(parameter, self._watched)
            return
        if parameter not in self._unit_of and parameter not in self._reduced:
            self._leave([parameter])
            return
        if self.last_gradients and self.has_old_gradient(parameter):
            self.refuse_old_gradient(parameter)
        if parameter in self._updated or parameter in self._came:
            self._refuse_second(parameter)
        if parameter in self._reduced:
            self._came.add(parameter)
            return
        unit = self._unit_of[parameter]
        unit.missing.discard(parameter)
        if unit.missing:
            return
        self._update(unit, self._begin_update())

    def _refuse_second(self, parameter: Tensor) -> NoReturn:
        if self._backwards - {torch._C._current_graph_task_id()}:
            self.flush()  # a failed backward is the reason for the second gradient
        raise FusionError(
            f"the gradient of {named([parameter], self.names)} came twice between two steps "
            "(accumulation, a second loss, a checkpoint with use_reentrant=True, no step(), or "
            f"{_OF_A_GENERATOR}), but the parameter is updated when it comes first; {self._remedy}"
        )

    def _update(self, unit: _Unit, options: Options) -> None:
        if not self._is_stepping and (
            is_in_mode()
            or any(
                self.is_held(each) or (not self.by_fsdp and is_named(each))
                for each in unit.parameters
            )
        ):
            self._leave(unit.parameters)  # other code could use it before `step()`
            return
        with self._updating:
            with self._true_state():
                self._order.follow(unit.parameters[0].device)
                self.before_new_state(unit.parameters)
                self.partial_step(unit.parameters, options)
            self._updated.update(unit.parameters)
            self._guard_state()
        for each in unit.parameters:
            if each.grad is not None:
                self._free(each, None if self._is_stepping else _memory_of(each.grad))
            self._arm(each)

    @contextmanager
    def _true_state(self) -> Iterator[None]:
        """Give the optimizer its own state while the fusion updates parameters."""
        guard = self.optimizer.state
        if isinstance(guard, WaitingState):
            self.optimizer.state = guard.state
        try:
            yield
        finally:
            self.optimizer.state = guard

    def _guard_state(self) -> None:
        """Refuse uses of the optimizer's state until the step, which has read it by then.

        The caller holds `_updating`: another update uses the state.
        """
        state = self.optimizer.state
        if not self._is_stepping and not isinstance(state, WaitingState):
            self.optimizer.state = WaitingState(state, self._refuse_state)

    def _release_state(self) -> None:
        if isinstance(guard := self.optimizer.state, WaitingState):
            self.optimizer.state = guard.state

    def _refuse_state(self) -> None:
        if torch._C._current_graph_task_id() == -1:
            self.flush()
        raise FusionError(
            "the optimizer's state is read or written between backward() and step(), when "
            f"{self._share_updated()} parameters are updated already; {self._remedy}"
        )

    def _leave(self, parameters: Iterable[Tensor]) -> None:
        """Leave the update to `step()`, and let it refuse if the gradients change until then."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._left[parameter] = parameter.grad, parameter.grad._version

    def _free(self, parameter: Tensor, memory: StorageWeakRef | None = None) -> None:
        parameter.grad = None
        self._freed[parameter] = memory
        if not self._is_stepping:
            self._stand_in(parameter)

    def _stand_in(self, parameter: Tensor) -> None:
        stand_in = self._stand_ins.get(parameter)
        if stand_in is None or stand_in.dtype != parameter.dtype:
            refuse = _refusal(weakref.ref(self), weakref.ref(parameter))
            stand_in = self._stand_ins[parameter] = stand_in_for(parameter, refuse)
        parameter.grad = stand_in

    def _remove_stand_ins(self) -> None:
        for parameter, stand_in in self._stand_ins.items():
            if parameter.grad is stand_in:
                parameter.grad = None

    def refuse_stand_in(self, parameter: Tensor, operation: str) -> None:
        """Refuse an operation on a freed gradient, except a conversion after the step."""
        self._require_same_parameters()
        if parameter not in self._updated:
            if operation == "_to_copy":
                return  # `module.to()` after step()
            self.refuse_old_gradient(parameter, operation)
        if torch._C._current_graph_task_id() != -1 and operation in {"add", "add_"}:
            self._refuse_second(parameter)  # autograd adds a second gradient
        raise FusionError(
            f"the gradient of {named([parameter], self.names)} is used between backward() and "
            f"step() (clipping, a norm that is logged; {operation}), when the parameter is updated "
            f"already and the gradient is freed; {self._remedy}"
        )

    def _arm(self, parameter: Tensor) -> None:
        if self._is_stepping:
            return
        state = self.state_of(parameter) if self._watched is None else []
        for tensor in (parameter, *state):
            self.tripwire.arm(tensor)
            self._armed.append(tensor)

    def _disarm(self) -> None:
        for parameter in self._armed:
            self.tripwire.disarm(parameter)
        self._armed.clear()

    def before_use(self, tensor: Tensor) -> None:
        """Refuse the use. In the first step, record it."""
        parameter = tensor
        if self._watched is not None:
            self.tripwire.disarm(parameter)
            self._watched.used[parameter] = None
            return
        if parameter not in self.names and parameter not in self._updated:
            self._refuse_state()
        if torch._C._current_graph_task_id() == -1:
            self.flush()
        raise FusionError(
            f"{named([parameter], self.names)} {_USED}, when it is updated already; {self._remedy}"
        )

    def _begin_update(self) -> Options:
        if self._options is None:
            self._options, self._ambient = options_of(self.optimizer), ambient()
        task = torch._C._current_graph_task_id()
        if task not in self._backwards:
            self._backwards.add(task)
            _at_the_end(lambda: self._end_backward(task))
        return self._options

    def _end_backward(self, task: int) -> None:
        kept = [each for each, memory in self._freed.items() if memory and not memory.expired()]
        if kept:
            raise FusionError(
                f"{len(kept)} gradients ({named(kept, self.names)}) are kept by other code (a "
                "view, `.data`, an array of NumPy), which could change them before step(), when "
                f"their parameters are updated already; {self._remedy}"
            )
        self._backwards.discard(task)
        for parameter in self._updated & self._reduced:
            self._free(parameter)  # DDP has just written the mean into .grad
        if self._updated:
            with self._updating:
                self._guard_state()

    # The buckets of DDP.

    def _has_gradient(self, parameter: Tensor) -> bool:
        return parameter in self._came

    def _updater_of(self, bucket: GradBucket) -> Callable[[Sequence[Tensor | None]], None] | None:
        if self._watched is not None:
            return None
        options, token, parameters = self._begin_update(), self._step_token, bucket.parameters()
        is_left = is_in_mode()  # by this rank; an updater also changes what all ranks reduce

        def update(gradients: Sequence[Tensor | None]) -> None:
            pairs = zip(parameters, gradients, strict=True)
            ours = {each: gradient for each, gradient in pairs if each in self._reduced}
            with self._updating, self._true_state():
                if self._step_token is token and not is_left:
                    self._update_bucket(ours, options)

        return update

    def _update_bucket(self, gradients: Mapping[Tensor, Tensor | None], options: Options) -> None:
        """Update all parameters of a bucket together.

        Parameters without a gradient take part: they may share a step count with the others.
        """
        unit = self._bucket_unit(list(gradients))
        if any(self.is_held(each, None) for each in unit):
            return  # other code could use a parameter before `step()`, which updates the bucket
        previous = [each.grad for each in unit]
        try:
            for each, gradient in gradients.items():
                each.grad = gradient
            self._order.follow(unit[0].device)
            self.before_new_state(unit)
            self.partial_step(unit, options)
        finally:
            for each, gradient in zip(unit, previous, strict=True):
                each.grad = gradient
        for each in unit:
            if gradients[each] is not None:
                self._updated.add(each)
                self._arm(each)

    def _bucket_unit(self, parameters: list[Tensor]) -> list[Tensor]:
        """Return the unit of exactly these parameters; add it if DDP has rebuilt its buckets."""
        for unit in self._bucket_units:
            if len(unit) == len(parameters) and all(map(is_, unit, parameters)):
                return unit
        apart = [unit for unit in self._bucket_units if set(unit).isdisjoint(parameters)]
        self._bucket_units = [*apart, parameters]
        self._set_units()
        return parameters

    def _set_units(self) -> None:
        self.partial_step.set_units(
            [*(unit.parameters for unit in self._units), *self._bucket_units]
        )

    # The first step.

    def _note(self, parameter: Tensor, watched: _Watched) -> None:
        if parameter in watched.came:
            watched.twice.append(parameter)
        watched.came.add(parameter)
        self._arm(parameter)
        if parameter not in self._reduced:
            watched.note(parameter)
        elif not watched.reduces:
            watched.reduces = True
            _at_the_end(lambda: self._note_reduced(watched))

    def _note_reduced(self, watched: _Watched) -> None:
        watched.reduces = False
        for parameter in self._reduced:
            watched.note(parameter)

    def _end_watching(self, watched: _Watched) -> None:
        if not watched.gradients:
            return  # a step without a backward
        if watched.twice:
            raise FusionError(
                f"{len(watched.twice)} gradients ({named(watched.twice, self.names)}) came twice "
                "before the first step (accumulation, a second loss, a checkpoint with "
                f"use_reentrant=True, or {_OF_A_GENERATOR}), but parameters are updated when "
                f"they come first; {self._remedy}"
            )
        changed = [
            parameter
            for parameter, (gradient, version, norm) in watched.gradients.items()
            if parameter.grad is not gradient
            or gradient._version != version
            or not torch.allclose(_norm(gradient), norm, rtol=0.0, atol=0.0, equal_nan=True)
        ]
        if changed:
            raise FusionError(
                f"{len(changed)} gradients ({named(changed, self.names)}) were changed between "
                "backward() and step() (clipping, unscaling, or an average over processes by "
                "a DistributedDataParallel that fuse() was not given), but parameters are updated "
                f"before; {self._remedy}"
            )
        if watched.read_late:
            raise FusionError(
                f"backward() reads {named(watched.read_late, self.names)} again after its gradient "
                "is whole (in a checkpoint), and would read the updated one; "
                f"{self._remedy}"
            )
        if watched.used:
            raise FusionError(
                f"{named(list(watched.used)[:1], self.names)} {_USED}, but parameters are updated "
                f"before; {self._remedy}"
            )
        self._watch.end()
        # Sharded parameters that only the step updates get no hook: FSDP accumulates their
        # gradients outside of autograd.
        self._follow_gradients(
            each
            for each in self.parameters
            if each in self._unit_of
            or each in self._reduced
            or (each.requires_grad and not is_sharded(each))
        )
        for module in self._watch.outermost:
            hook = ModuleHook(self._before_forward)
            self.keep(module.register_forward_pre_hook(hook, prepend=True))
        self._watched = None
        watched.gradients.clear()
        self._make_first_step()
        self.remember_gradients()

    def _make_first_step(self) -> None:
        """Update unit by unit: free a unit's gradients before the next unit's state is created."""
        options = options_of(self.optimizer)
        self._backwards.add(_FIRST_STEP)
        for unit in self._units:
            if not any(map(is_sharded, unit.parameters)):  # FSDP accumulates these itself
                self._update(unit, options)
        self._backwards.discard(_FIRST_STEP)

    def _before_forward(self, _: nn.Module) -> None:
        if torch.compiler.is_compiling() or not self._updated:
            return
        if torch._C._current_graph_task_id() == -1:  # otherwise a checkpoint recomputes
            self.flush()
            raise FusionError(
                "the model is called between backward() and step() (accumulation, evaluation), "
                f"when {self._share_updated()} parameters are updated already; call it after "
                f"step(), or {self._remedy}"
            )

    def note_read(self, parameters: Sequence[Tensor]) -> None:
        """Record those parameters that backward reads after their gradients are complete."""
        watched = self._watched
        if watched is not None:
            late = (each for each in parameters if each in watched.came)
            watched.read_late.update(dict.fromkeys(late))


class _Watch:
    """Calls `note_read` of a fusion when a checkpoint computes a module again in backward."""

    def __init__(self, fusion: BackwardFusion) -> None:
        self._fusion = fusion
        self._depth = 0
        self.outermost = weakref.WeakSet([fusion.model])
        """The model, and all modules that were not called by another module."""
        self._handles = []
        for module in fusion.model.modules():
            before = module.register_forward_pre_hook(ModuleHook(self._begin), prepend=True)
            after = module.register_forward_hook(ModuleHook(self._end), always_call=True)
            self._handles += [before, after]
        for handle in self._handles:
            fusion.keep(handle)

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module) -> None:
        if torch._C._current_graph_task_id() != -1:
            self._fusion.note_read(list(module.parameters(recurse=False)))
            return
        if not self._depth:
            self.outermost.add(module)
        self._depth += 1

    def _end(self, _: nn.Module) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._depth = max(self._depth - 1, 0)


def _refusal(
    fusion: "weakref.ref[BackwardFusion]", parameter: "weakref.ref[Tensor]"
) -> Callable[[str], None]:
    def refuse(operation: str) -> None:
        live_fusion, live_parameter = fusion(), parameter()
        if live_fusion is not None and live_parameter is not None:
            live_fusion.refuse_stand_in(live_parameter, operation)

    return refuse


def _memory_of(gradient: Tensor) -> StorageWeakRef | None:
    is_plain = gradient.layout is torch.strided and not is_sharded(gradient)
    return StorageWeakRef(gradient.untyped_storage()) if is_plain else None


def _at_the_end(function: Callable[[], None]) -> None:
    """Call the function when this backward has succeeded, after DDP's and FSDP's own callbacks."""
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(function))


@torch.no_grad()
def _norm(gradient: Tensor) -> Tensor:
    dense = local(gradient).to_dense()
    dtype = torch.complex128 if dense.is_complex() else torch.float64
    norm: Tensor = torch.linalg.vector_norm(dense, dtype=dtype)
    return norm


def _differ(before: Options, now: Options) -> bool:
    return any(
        then.keys() != new.keys() or any(not _same(then[name], new[name]) for name in then)
        for then, new in zip(before, now, strict=True)
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and bool((a == b).all())
    return bool(a == b)
