"""BackwardFusion: each unit of parameters is updated in backward, when its gradients are whole.

A gradient is whole when autograd has added to it what all uses of the parameter contribute, which
it does once per backward. The parameter must not be read after that: what the first step's backward
reads is watched.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from graphstash.training.fusion.base import Fusion, FusionError, ModuleHook, named
from graphstash.training.fusion.partial_step import Options, in_units, options_of

__all__ = ["BackwardFusion"]

_REMEDY: Final = 'use when="forward", or train without fusion'


@dataclass(slots=True)
class _Unit:
    parameters: list[Tensor]
    missing: set[Tensor] = field(default_factory=set)

    def begin(self) -> None:
        self.missing = set(self.parameters)


@dataclass(slots=True)
class _Watched:
    """What happened until the first step."""

    gradients: dict[Tensor, tuple[Tensor, int]] = field(default_factory=dict)
    """By parameter: its gradient after the last backward, and the version of it."""
    twice: list[Tensor] = field(default_factory=list)
    read_late: dict[Tensor, None] = field(default_factory=dict)


class BackwardFusion(Fusion):
    """See `fuse`."""

    when = "backward"

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._units: list[_Unit] = []
        self._unit_of: dict[Tensor, _Unit] = {}
        self._updated: set[Tensor] = set()
        self._backwards: set[int] = set()
        """Those that have updated parameters and are not over."""
        self._options: Options | None = None
        """With which parameters were updated since the last step."""
        self._watched: _Watched | None = _Watched()
        super().__init__(model, optimizer)

    def flush(self) -> None:
        """Refuses to go on with what a failed backward has updated in part."""
        if self._backwards:
            raise FusionError(
                f"a backward failed after {len(self._updated)} of {len(self.parameters)} "
                "parameters were updated: what the model has now was never trained; load the last "
                "checkpoint into a new model and optimizer"
            )

    def _before_load(self) -> None:
        """What is loaded replaces what was updated in part."""
        if self._backwards:
            self._end_step()

    def _refuse(self) -> None:
        if any(isinstance(m, DataParallel | DistributedDataParallel) for m in self.model.modules()):
            raise FusionError(
                "with DistributedDataParallel a gradient is whole before it is the mean over all "
                f"processes; {_REMEDY}"
            )

    def _attach(self) -> None:
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        order = {parameter: number for number, parameter in enumerate(self.names)}
        last_first = sorted(trained, key=lambda each: -order.get(each, -1))
        for parameters in in_units(last_first):
            unit = _Unit(parameters)
            unit.begin()
            self._units.append(unit)
            self._unit_of.update(dict.fromkeys(parameters, unit))
        self.partial_step.set_units(unit.parameters for unit in self._units)
        self._watch = _Watch(self)
        # The garbage collector does not see the hooks of tensors; the optimizer's keep the fusion.
        whole = weakref.WeakMethod(self._gradient_is_whole)

        def gradient_is_whole(parameter: Tensor) -> None:
            if (method := whole()) is not None:
                method(parameter)

        for parameter in trained:
            self.keep(parameter.register_post_accumulate_grad_hook(gradient_is_whole))  # type: ignore[no-untyped-call] # torch

    def before_step(self, options: dict[str, Any]) -> None:
        """Leaves the gradients that no unit was updated with."""
        self.flush()
        if options.get("found_inf") is not None:
            raise FusionError(
                "a loss scale decides from all gradients whether the step counts, but parameters "
                "are updated before all are there; train in bf16 without a loss scale, or "
                + _REMEDY
            )
        if self._watched is not None:
            self._end_watching(self._watched)
        elif self._options is not None and _differ(self._options, options_of(self.optimizer)):
            raise FusionError(
                "the optimizer's options (lr, ...) were changed between backward() and step(), but "
                'parameters are updated in backward(); change them before, or use when="forward"'
            )

    def after_step(self) -> None:
        """Everything is updated; the next backward begins anew."""
        if len(self._updated) < len(self._unit_of):
            self.partial_step.state_has_changed()
        self._end_step()

    def _end_step(self) -> None:
        self._updated.clear()
        self._backwards.clear()
        self._options = None
        for unit in self._units:
            unit.begin()

    def _gradient_is_whole(self, parameter: Tensor) -> None:
        """The hook of each parameter, in backward."""
        if self._watched is not None:
            self._note(parameter, self._watched)
            return
        unit = self._unit_of[parameter]
        if parameter in self._updated:
            raise FusionError(
                f"the gradient of {named([parameter], self.names)} came twice between two steps "
                "(accumulation, a second loss, a checkpoint with use_reentrant=True, no step()), "
                f"but the parameter is updated when it comes first; {_REMEDY}"
            )
        unit.missing.discard(parameter)
        if unit.missing:
            return
        if self._options is None:
            self._options = options_of(self.optimizer)
        self._remember_backward()
        self.partial_step(unit.parameters, self._options)
        for each in unit.parameters:
            each.grad = None
        self._updated.update(unit.parameters)

    def _remember_backward(self) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self._backwards:
            self._backwards.add(task)
            # Called when this backward has succeeded, and not when it fails.
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._backwards.discard(task))

    # The first step.

    def _note(self, parameter: Tensor, watched: _Watched) -> None:
        gradient = parameter.grad
        if parameter in watched.gradients:
            watched.twice.append(parameter)
        if gradient is not None:
            watched.gradients[parameter] = (gradient, gradient._version)

    def _end_watching(self, watched: _Watched) -> None:
        if not watched.gradients:
            return  # a step without a backward
        if watched.twice:
            raise FusionError(
                f"{len(watched.twice)} gradients ({named(watched.twice, self.names)}) came twice "
                "before the first step (accumulation, a second loss, or a checkpoint with "
                "use_reentrant=True), but parameters are updated when they come first; "
                f"{_REMEDY}"
            )
        changed = [
            parameter
            for parameter, (gradient, version) in watched.gradients.items()
            if parameter.grad is not gradient or gradient._version != version
        ]
        if changed:
            raise FusionError(
                f"{len(changed)} gradients ({named(changed, self.names)}) were changed between "
                "backward() and step() (clipping, unscaling, or an average over processes), but "
                f"parameters are updated before; {_REMEDY}"
            )
        if watched.read_late:
            raise FusionError(
                f"backward() reads {named(watched.read_late, self.names)} again after its gradient "
                "is whole (a use that is detached, or by .data), and would read the updated one; "
                f"{_REMEDY}"
            )
        self.partial_step.watch_layouts()
        self._watch.end()
        self._watched = None

    def note_read(self, parameters: Sequence[Tensor]) -> None:
        """Backward reads what holds these parameters."""
        watched = self._watched
        if watched is not None:
            late = (each for each in parameters if each in watched.gradients)
            watched.read_late.update(dict.fromkeys(late))


class _Watch:
    """Tells a fusion which parameters' memory backward reads, and when."""

    def __init__(self, fusion: BackwardFusion) -> None:
        self._fusion = fusion
        self._by_memory: dict[int, list[Tensor]] = {}
        for parameter in fusion.parameters:
            place = parameter.untyped_storage().data_ptr()
            self._by_memory.setdefault(place, []).append(parameter)
        self._open: list[Any] = []
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
        if torch._C._current_graph_task_id() != -1:  # a checkpoint computes it again
            self._fusion.note_read(list(module.parameters(recurse=False)))
            return
        context = None
        if not self._open:  # the outermost module
            context = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            context.__enter__()
        self._open.append(context)

    def _end(self, _: nn.Module) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        if self._open and (context := self._open.pop()) is not None:
            context.__exit__()

    def _pack(self, tensor: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        if tensor.layout is not torch.strided or type(tensor) not in (Tensor, nn.Parameter):
            return tensor, ()
        return tensor, self._by_memory.get(tensor.untyped_storage().data_ptr(), ())

    def _unpack(self, packed: tuple[Tensor, Sequence[Tensor]]) -> Tensor:
        tensor, parameters = packed
        if parameters:
            self._fusion.note_read(parameters)
        return tensor


def _differ(before: Options, now: Options) -> bool:
    return any(
        then.keys() != new.keys() or any(not _same(then[name], new[name]) for name in then)
        for then, new in zip(before, now, strict=True)
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and bool((a == b).all())
    return bool(a == b)
