"""SyncFreeOptimizer: what the optimizers share.

An optimizer gives a pure formula for the new values of parameters and state (`_update`). Here those
are computed for all parameters at once (one recorded operation on torch_xla, multi-tensor kernels
elsewhere), and taken or left on the device: with `bad = found_inf != 0`,

    value <- where(bad, value, new value)        for parameters, every state tensor, and the step

A selection, never a product with a mask: NaN * 0 is NaN.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from graphstash.training.device import assign, materialize, settle, upload
from graphstash.training.operation import Operation, shapes_of
from graphstash.training.optimizers.cohort import Cohort, Place, begin, cohorts_of
from graphstash.training.optimizers.update import Layout, Options
from graphstash.training.scalars import DeviceScalars

__all__ = ["SyncFreeOptimizer"]


class SyncFreeOptimizer(Optimizer):
    """Base of the sync-free optimizers; see the module's docstring.

    State and parameter groups have torch's names, so state dictionaries can be exchanged with the
    optimizer of the same name in `torch.optim`, both ways. Use `torch.optim.lr_scheduler` as usual:
    a changed value is uploaded before the next step, and no graph changes.

    On plain torch these are for real floating-point parameters with dense gradients, like the
    multi-tensor forms of `torch.optim`.
    """

    _step_supports_amp_scaling = True  # how torch.amp.GradScaler knows not to read found_inf itself
    _operation: ClassVar[Operation]

    def __init__(self, params: Any, defaults: dict[str, Any], *, fused: bool | None) -> None:
        # torch's own optimizers look these up in a state dictionary that they are given.
        torchs = {"foreach": None, "capturable": False, "differentiable": False, "fused": fused}
        super().__init__(params, defaults | torchs)
        self._scalars = DeviceScalars()
        self._begin_early(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, as in torch.optim."""
        super().add_param_group(param_group)
        if hasattr(self, "_scalars"):  # else the first ones, on the way into torch's __init__
            self._begin_early(self.param_groups[-1:])

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Goes on after unpickling; torch calls it when it loads a state dictionary, too."""
        self.__dict__.setdefault("_scalars", DeviceScalars())
        super().__setstate__(state)

    # What a formula says of itself.

    def _scheduled(self, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
        """The values of a group that may change from step to step, in the formula's order."""
        raise NotImplementedError

    def _options(self, group: Mapping[str, Any]) -> Options:
        """The values of a group that are part of the graph."""
        raise NotImplementedError

    def _slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of the state tensors that every parameter of the group has beside `step`."""
        raise NotImplementedError

    def _update_fused(
        self,
        group: Mapping[str, Any],
        cohort: Cohort,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
    ) -> bool:
        """Updates with torch's own kernel; False where there is none for these options."""
        del group, cohort, found_inf, grad_scale
        return False

    # The step.

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        found_inf: Tensor | None = None,
        grad_scale: Tensor | None = None,
    ) -> Any:
        """Updates the parameters, unless `found_inf` says that the gradients cannot be used.

        Args:
            closure: computes the loss once more, as in torch.optim.
            found_inf: tensor with one element on the parameters' device; 0: update, anything else:
                leave parameters, state and step count as they are, to the bit. None: update. Which
                of the two it is on torch_xla is part of the graph, its value is not.
            grad_scale: [], on the parameters' device: divide the gradients by it first. None: they
                are not scaled.

        Returns:
            The closure's result, or None.

        Raises:
            TypeError: found_inf is no tensor.
            ValueError: found_inf has more than one element.
            RuntimeError: a gradient is sparse or a parameter complex.
        """
        loss = None
        if closure is not None:
            with torch.set_grad_enabled(True):
                loss = closure()
        if found_inf is None:  # torch.amp.GradScaler says it by attributes
            found_inf = getattr(self, "found_inf", None)
            grad_scale = getattr(self, "grad_scale", None)
        if found_inf is not None:
            found_inf = _checked(found_inf)
        newborn: list[Tensor] = []
        cohorts = [
            (index, group, cohort)
            for index, group in enumerate(self.param_groups)
            for cohort in cohorts_of(group["params"], self.state, self._slots(group), newborn)
        ]
        materialize(newborn)
        for index, group, cohort in cohorts:
            self._update_cohort(index, group, cohort, found_inf, grad_scale)
        return loss

    def refresh(self) -> None:
        """Uploads what the host has changed since the last step (learning rate, momentum, ...).

        `step` does so by itself. Who runs a step without calling it, as a traced step does, calls
        this before. The tensors stay the same objects.
        """
        for index, group in enumerate(self.param_groups):
            self._scalars.refresh(index, self._scheduled(group))

    def device_tensors(self) -> Iterator[Tensor]:
        """Everything on the device that a step reads or changes, besides the parameters."""
        seen = set()
        for state in self.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and id(value) not in seen:
                    seen.add(id(value))
                    yield value
        yield from self._scalars

    def _update_cohort(
        self,
        index: int,
        group: Mapping[str, Any],
        cohort: Cohort,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
    ) -> None:
        first = cohort.parameters[0]
        wide = torch.float64 if first.dtype == torch.float64 else torch.float32
        scalars = self._scalars.get(index, self._scheduled(group), first.device, wide)
        found_inf = _scalar_on(found_inf, first.device)
        grad_scale = _scalar_on(grad_scale, first.device)
        if (
            group["fused"] is not False
            and cohort.suits_fused_kernels()
            and self._update_fused(group, cohort, found_inf, grad_scale)
        ):
            return
        layout = Layout(
            options=self._options(group),
            select=found_inf is not None,
            unscale=grad_scale is not None,
            scalar_count=len(scalars),
            slot_count=len(cohort.slots),
            parameters=shapes_of(cohort.parameters),
        )
        targets = [cohort.step, *cohort.parameters]
        for slot in cohort.slots:
            targets += slot
        extra = [tensor for tensor in (found_inf, grad_scale) if tensor is not None]
        inputs = [*scalars, *cohort.gradients, *targets, *extra]
        assign(targets, self._operation(inputs, layout))

    def _begin_early(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Puts parameters and new state on torch_xla at rest before the first step.

        torch_xla orders what a graph gives by the age of its tensors. State that is younger than
        the first loss and the first gradients would make the first step's graph another one than
        the second's, and double what a cold start compiles.
        """
        resting: list[Tensor] = []
        for group in groups:
            steps: dict[Place, Tensor] = {}
            for parameter in group["params"]:
                if parameter.device.type != "xla":
                    continue
                resting.append(parameter)
                ours = parameter.is_floating_point() and parameter.requires_grad
                if ours and not self.state.get(parameter):
                    begin(parameter, self.state, self._slots(group), steps, resting)
        materialize(resting)

    # State dictionaries.

    def state_dict(self) -> dict[str, Any]:
        """As torch's: each parameter that was updated has a step of its own, on the host.

        Reads the device.
        """
        state_dict = super().state_dict()
        on_host: dict[int, float] = {}
        states = {}
        for key, state in state_dict["state"].items():
            step = state.get("step")
            if step is None:  # not of our making
                states[key] = state
                continue
            if id(step) not in on_host:
                on_host[id(step)] = float(step)
            if on_host[id(step)] > 0:
                states[key] = state | {"step": torch.tensor(on_host[id(step)])}
        return state_dict | {"state": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state dictionary of this class or of torch's class of the same name."""
        super().load_state_dict(state_dict)
        adopted: list[Tensor] = []
        counts: list[Tensor] = []
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            if isinstance(group["lr"], Tensor):
                group["lr"] = group["lr"].item()
            steps: dict[tuple[Place, float], Tensor] = {}
            for parameter in group["params"]:
                if state := self.state.get(parameter):
                    adopted += self._adopt(group, parameter, state, steps)
            counts += steps.values()
        materialize(adopted)
        settle(counts)  # the youngest, as in state that begins
        self._begin_early(self.param_groups)

    def _adopt(
        self,
        group: Mapping[str, Any],
        parameter: Tensor,
        state: dict[str, Any],
        steps: dict[tuple[Place, float], Tensor],
    ) -> list[Tensor]:
        """Makes loaded state ours: no memory shared with where it came from, equal steps shared."""
        count = float(state.get("step", self._step_of(state)))
        place = ((parameter.device, parameter.dtype), count)
        if place not in steps:
            steps[place] = upload([torch.tensor(count)], parameter.device)[0]
        state["step"] = steps[place]
        names = self._slots(group)
        for name in names:
            value = state.get(name)
            state[name] = (
                torch.zeros_like(parameter, memory_format=torch.preserve_format)
                if value is None
                else _own_copy(value)
            )
        return [state[name] for name in names]

    def _step_of(self, state: Mapping[str, Any]) -> float:
        """The step count that state without one stands for."""
        del state
        return 0.0


def _checked(found_inf: Tensor) -> Tensor:
    if not isinstance(found_inf, Tensor):
        raise TypeError(
            f"found_inf is {found_inf!r}; it must be a tensor on the parameters' device, so that "
            "nobody waits for its value"
        )
    if found_inf.numel() != 1:
        raise ValueError(
            f"found_inf has shape {list(found_inf.shape)}; it must be a single number: 0 when "
            "the gradients are finite"
        )
    return found_inf if found_inf.dtype == torch.float32 else (found_inf != 0).float()


def _own_copy(value: Tensor) -> Tensor:
    if value.device.type == "xla":  # a clone would be a graph to compile
        return upload([value.cpu()], value.device)[0]
    return value.clone(memory_format=torch.preserve_format)


def _scalar_on(scalar: Tensor | None, device: torch.device) -> Tensor | None:
    if scalar is None or (
        scalar.device == device and scalar.dim() == 0 and scalar.dtype == torch.float32
    ):
        return scalar
    return scalar.to(device, torch.float32).reshape(())
