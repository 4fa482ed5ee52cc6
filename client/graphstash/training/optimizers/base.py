"""SyncFreeOptimizer: what the optimizers share.

An optimizer has a pure formula for the new values of parameters and state. It is computed for all
parameters at once (one recorded operation on torch_xla, multi-tensor kernels elsewhere), and the
device decides whether its result counts: with `bad = found_inf != 0`,

    value <- where(bad, value, new value)        for parameters, every state tensor, and the step

This is a selection and not a product with a mask, because NaN * 0 is NaN.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor
from torch.optim import Optimizer

from graphstash.training.device import (
    Shapes,
    TracedOp,
    assign,
    materialize,
    settle,
    shapes_of,
    upload,
)
from graphstash.training.optimizers.cohort import (
    MASTER,
    Cohort,
    Place,
    begin,
    beginning,
    cohorts_of,
    computes_the_same,
)
from graphstash.training.sharding import Sums, distributed_like

__all__ = [
    "Options",
    "Split",
    "SyncFreeOptimizer",
    "TorchOptions",
    "at_least",
    "betas_below_one",
    "selecting",
]

Options = tuple[Any, ...]
"""What of an optimizer's settings is part of the graph."""


class Layout(NamedTuple):
    """What the shape of an update depends on."""

    options: Options
    select: bool
    unscale: bool
    scalar_count: int
    slot_count: int
    parameters: Shapes
    shards: Sums
    master: bool


class Split(NamedTuple):
    """The inputs of an update; every list beside `scalars` has one tensor per parameter."""

    scalars: list[Tensor]  # each []
    gradients: list[Tensor]
    step: Tensor  # [], the number of steps before this one
    parameters: list[Tensor]
    slots: list[list[Tensor]]
    found_inf: Tensor | None  # []
    shards: Sums


Formula = Callable[[Split, Tensor, Options], tuple[list[Tensor], list[list[Tensor]]]]
"""`formula(old, step, options)` gives new parameters and slots; step is 1 in the first update."""


def selecting(formula: Formula) -> Callable[[list[Tensor], Layout], list[Tensor]]:
    """Makes a formula into a function of one list that leaves everything alone on a bad step.

    The list has the inputs in the order of `Split`, and the loss scale by which the gradients are
    still to be divided as its last element, if there is one. The result is step, parameters, slots.
    """

    def update(inputs: list[Tensor], layout: Layout) -> list[Tensor]:
        old = _split(inputs, layout)
        good = old.found_inf == 0 if old.found_inf is not None else None
        step = old.step + (1.0 if good is None else good.to(old.step.dtype))
        if layout.master:
            *slots, master = old.slots
            wide = old._replace(parameters=master, slots=slots)
            parameters, slots = formula(wide, step, layout.options)
            slots = [*slots, parameters]
        else:
            parameters, slots = formula(old, step, layout.options)
        before = old.parameters + [tensor for slot in old.slots for tensor in slot]
        after = parameters + [tensor for slot in slots for tensor in slot]
        if good is not None:
            after = [torch.where(good, new, kept) for new, kept in zip(after, before, strict=True)]
        # A number in a wider type than a parameter's makes a parameter of shape [] wider, too.
        after = [new.to(kept.dtype) for new, kept in zip(after, before, strict=True)]
        return [step, *after]

    return update


def _split(inputs: list[Tensor], layout: Layout) -> Split:
    count = len(layout.parameters)
    scalars, rest = inputs[: layout.scalar_count], inputs[layout.scalar_count :]
    gradients, rest = rest[:count], rest[count:]
    step, tensors = rest[0], rest[1:]
    lists = [tensors[n * count : (n + 1) * count] for n in range(1 + layout.slot_count)]
    extra = tensors[(1 + layout.slot_count) * count :]
    found_inf = extra[0] if layout.select else None
    if layout.master:
        gradients = [gradient.float() for gradient in gradients]
    if layout.unscale:
        gradients = list(torch._foreach_mul(gradients, extra[-1].reciprocal()))
    return Split(scalars, gradients, step, lists[0], lists[1:], found_inf, layout.shards)


class TorchOptions(TypedDict, total=False):
    """Keyword arguments that every optimizer takes, most of them those of torch.optim.

    Attributes:
        master_weights: keep bfloat16 or float16 parameters and their moments in float32 as well, so
            that changes that are too small for them add up. In torch.optim's state dictionaries
            there is no such thing.
        fused: False: never use torch's fused kernels on plain torch, where they are exact and fast.
        foreach: accepted and without effect: all parameters are updated at once.
        capturable: accepted and without effect: a step can always be captured.
        differentiable: only False: a step cannot be differentiated.
        amp_scaling: whether torch.amp.GradScaler and Lightning leave the division by the loss scale
            and the decision to skip to `step`; True by default. False: they do it themselves and
            read the device. Lightning clips gradients only then.
    """

    master_weights: bool
    fused: bool | None
    foreach: bool | None
    capturable: bool
    differentiable: bool
    amp_scaling: bool


_IN_GROUPS: Final = frozenset(
    (
        *("params", "param_names", "name"),
        *("initial_lr", "base_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"),
    )
)
"""What a group may hold beside options: its parameters, and what schedules of torch keep there."""


def at_least(group: Mapping[str, Any], least: float, *names: str) -> None:
    """Refuses options of a group that are NaN or below `least`.

    Raises:
        ValueError: says which.
    """
    for name in names:
        value = group[name]
        if not isinstance(value, Tensor) and not value >= least:
            raise ValueError(f"{name} must be at least {least} (got {value})")


def betas_below_one(group: Mapping[str, Any]) -> None:
    """Refuses decays of running means that are NaN, negative, or 1 and above.

    Raises:
        ValueError: says which.
    """
    for number, beta in enumerate(group["betas"]):
        if not 0 <= beta < 1:
            raise ValueError(f"betas[{number}] must be at least 0 and below 1 (got {beta})")


class SyncFreeOptimizer(Optimizer):
    """Base of the sync-free optimizers; see the module's docstring.

    State and parameter groups have torch's names, so state dictionaries can be exchanged with the
    optimizer of the same name in `torch.optim`, both ways. Use `torch.optim.lr_scheduler` as usual:
    a changed value is uploaded before the next step, and no graph changes.

    On plain torch these are for real floating-point parameters with dense gradients, like the
    multi-tensor forms of `torch.optim`.
    """

    _operation: ClassVar[TracedOp]

    def __init__(
        self, params: Any, defaults: dict[str, Any], **options: Unpack[TorchOptions]
    ) -> None:
        known: TorchOptions = {
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": None,
            "amp_scaling": True,
            "master_weights": False,
        }
        name = type(self).__name__
        if unknown := options.keys() - known.keys():
            raise TypeError(f"{name} has no option {', '.join(sorted(unknown))}")
        known |= options
        if known["differentiable"]:
            raise ValueError(f"{name} cannot be differentiable; use torch.optim for that")
        if known["foreach"] and known["fused"]:
            raise ValueError("fused and foreach cannot both be True")
        # torch's own optimizers look these up in a state dictionary that they are given.
        super().__init__(params, defaults | known)
        self._scalars = DeviceScalars()
        self._checked_kernels: dict[Hashable, bool] = {}
        self._begin_early(self.param_groups)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """How torch.amp.GradScaler knows not to read found_inf itself."""
        return bool(self.defaults.get("amp_scaling", True))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, as in torch.optim.

        Raises:
            ValueError: an option of the group is unknown, out of its range, or not for such
                parameters.
        """
        if unknown := param_group.keys() - self.defaults.keys() - _IN_GROUPS:
            raise ValueError(
                f"{type(self).__name__} has no option {', '.join(sorted(unknown))} (groups have "
                f"params, {', '.join(self.defaults)}); set values of your own in param_groups later"
            )
        self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            self._check_parameters(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise
        if hasattr(self, "_scalars"):  # else the first ones, on the way into torch's __init__
            self._begin_early(self.param_groups[-1:])

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a pickled optimizer; torch also calls it when it loads a state dictionary."""
        self.__dict__.setdefault("_scalars", DeviceScalars())
        self.__dict__.setdefault("_checked_kernels", {})
        super().__setstate__(state)

    def _check_parameters(self, group: Mapping[str, Any]) -> None:
        """Raises ValueError where a group's options are not for parameters such as its own."""
        dtypes = {parameter.dtype for parameter in group["params"]}
        if group["master_weights"] and not dtypes <= {torch.bfloat16, torch.float16}:
            raise ValueError(
                "master_weights is for bfloat16 and float16 parameters; put others into a group "
                f"with master_weights=False (got {', '.join(map(str, dtypes))})"
            )

    # What a formula says of itself.

    def _check(self, group: Mapping[str, Any]) -> None:
        """Raises ValueError where a value of a group is out of its range."""
        raise NotImplementedError

    def _scheduled(self, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
        """The values of a group that may change from step to step, in the formula's order."""
        raise NotImplementedError

    def _options(self, group: Mapping[str, Any]) -> Options:
        """The values of a group that are part of the graph."""
        raise NotImplementedError

    def _slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of the state tensors that every parameter of the group has beside `step`."""
        raise NotImplementedError

    def _fused_kernel(
        self, group: Mapping[str, Any], cohort: Cohort
    ) -> Callable[..., object] | None:
        """Torch's own kernel with its arguments; None if there is none for these options."""
        del group, cohort
        return None

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
            closure: computes the loss again, as in torch.optim.
            found_inf: tensor with one element on the parameters' device; 0: update, anything else:
                leave parameters, state and step count as they are, to the bit. None: update. Which
                of the two it is on torch_xla is part of the graph, its value is not.
            grad_scale: [], on the parameters' device: divide the gradients by it first. None: they
                are not scaled.

        Returns:
            The closure's result, or None.

        Raises:
            TypeError: found_inf is not a tensor.
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
            for cohort in cohorts_of(group["params"], self.state, self._names(group), newborn)
        ]
        materialize(newborn)
        for index, group, cohort in cohorts:
            cohort.found_inf = _scalar_on(found_inf, cohort.device)
            cohort.grad_scale = _scalar_on(grad_scale, cohort.device)
            self._update_cohort(index, group, cohort)
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

    def _names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return (*self._slots(group), *((MASTER,) if group["master_weights"] else ()))

    def _update_cohort(self, index: int, group: Mapping[str, Any], cohort: Cohort) -> None:
        scalars = self._scalars.get(index, self._scheduled(group), cohort.device, cohort.wide)
        if (
            group["fused"] is not False
            and cohort.suits_fused_kernels()
            and (kernel := self._fused_kernel(group, cohort)) is not None
            and self._is_kernel_exact(group, cohort)
        ):
            self._update_fused(kernel, cohort)
        else:
            self._update_by_formula(group, cohort, scalars)

    @staticmethod
    def _update_fused(kernel: Callable[..., object], cohort: Cohort) -> None:
        found_inf = cohort.found_inf
        cohort.step += 1.0 if found_inf is None else (found_inf == 0).to(cohort.step.dtype)
        bad = None if found_inf is None else (found_inf != 0).float()
        kernel(grad_scale=cohort.grad_scale, found_inf=bad)

    def _update_by_formula(
        self, group: Mapping[str, Any], cohort: Cohort, scalars: Sequence[Tensor]
    ) -> None:
        layout = Layout(
            options=self._options(group),
            select=cohort.found_inf is not None,
            unscale=cohort.grad_scale is not None,
            scalar_count=len(scalars),
            slot_count=len(cohort.slots),
            parameters=shapes_of(cohort.parameters),
            shards=cohort.sums,
            master=group["master_weights"],
        )
        targets = [cohort.step, *cohort.parameters]
        for slot in cohort.slots:
            targets += slot
        extra = [t for t in (cohort.found_inf, cohort.grad_scale) if t is not None]
        inputs = [*scalars, *cohort.gradients, *targets, *extra]
        assign(targets, self._operation(inputs, layout))

    def _is_kernel_exact(self, group: Mapping[str, Any], cohort: Cohort) -> bool:
        """Whether torch's kernel was shown to compute the formula; tried once for each case."""
        case = (
            *(cohort.device, cohort.parameters[0].dtype, len(cohort.slots)),
            *(cohort.found_inf is not None, cohort.grad_scale is not None),
            *self._options(group),
            *(isinstance(value, Tensor) or value != 0 for value in self._scheduled(group).values()),
        )
        if case not in self._checked_kernels:
            tried = {**group, "lr": 0.5}  # large enough to show in half precision
            scalars = [
                torch.tensor(float(value), dtype=cohort.wide, device=cohort.device)
                for value in self._scheduled(tried).values()
            ]

            def formula(scratch: Cohort) -> None:
                self._update_by_formula(tried, scratch, scalars)

            def kernel(scratch: Cohort) -> None:
                if (its := self._fused_kernel(tried, scratch)) is not None:
                    self._update_fused(its, scratch)

            self._checked_kernels[case] = computes_the_same(kernel, formula, cohort)
        return self._checked_kernels[case]

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
                    begin(parameter, self.state, self._names(group), steps, resting)
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
        """Loads a state dictionary of this class or of torch's class of the same name.

        Options that it lacks stay as they are.

        Raises:
            ValueError: it is that of other groups; nothing was changed.
        """
        kept = [dict(group) for group in self.param_groups]
        for group, saved_group in zip(kept, state_dict["param_groups"], strict=False):
            self._check_loaded(group, saved_group)
        super().load_state_dict(state_dict)
        adopted: list[Tensor] = []
        counts: list[Tensor] = []
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        given = iter([state_dict["state"].get(number, {}) for number in saved])
        for group, before_it in zip(self.param_groups, kept, strict=True):
            for name in self.defaults:
                group.setdefault(name, before_it[name])
            if isinstance(group["lr"], Tensor):
                group["lr"] = group["lr"].item()
            steps: dict[tuple[Place, float], Tensor] = {}
            for parameter, before in zip(group["params"], given, strict=False):
                if state := self.state.get(parameter):
                    if group["master_weights"]:  # torch has rounded them to the parameter's type
                        wide = [name for name in self._names(group) if name in before]
                        state |= {name: before[name].to(parameter.device) for name in wide}
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
        names = self._names(group)
        for name in names:
            value = state.get(name)
            state[name] = (
                beginning(parameter, name, wide=group["master_weights"])
                if value is None
                else distributed_like(_own_copy(value), parameter)
            )
        return [state[name] for name in names]

    def _check_loaded(self, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Raises ValueError where a saved group cannot be loaded into one of this optimizer."""

    def _step_of(self, state: Mapping[str, Any]) -> float:
        """The step count that state without one stands for."""
        del state
        return 0.0


def _checked(found_inf: Tensor) -> Tensor:
    if not isinstance(found_inf, Tensor):
        raise TypeError(f"found_inf must be a tensor on the parameters' device (got {found_inf!r})")
    if found_inf.numel() != 1:
        raise ValueError(
            f"found_inf must be a single number, 0 when the gradients are finite (got shape "
            f"{list(found_inf.shape)})"
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


@dataclass(slots=True)
class _Scalar:
    value: float
    tensor: Tensor  # []


class DeviceScalars:
    """Named numbers of an optimizer's groups, on the devices of its parameters.

    As a Python number in a graph, a learning rate is a constant of it, or an upload by every
    parameter that uses it. Here each number is a tensor of its own that is uploaded when the host
    has changed it.
    """

    def __init__(self) -> None:
        self._scalars: dict[tuple[int, torch.device, torch.dtype], dict[str, _Scalar]] = {}

    def get(
        self,
        group: int,
        values: Mapping[str, float | Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """The tensors of `values`, uploaded where they are new or have changed.

        A group always has the same names; their values are numbers, or tensors on the host.

        Raises:
            ValueError: a value is a tensor on a device.
        """
        place = (group, device, dtype)
        if place not in self._scalars:
            numbers = [_number(value) for value in values.values()]
            tensors = upload([torch.tensor(number, dtype=dtype) for number in numbers], device)
            scalars = map(_Scalar, numbers, tensors)
            self._scalars[place] = dict(zip(values, scalars, strict=True))
        return self._update(self._scalars[place], values)

    def refresh(self, group: int, values: Mapping[str, float | Tensor]) -> None:
        """Uploads those of a group's numbers that have changed since they were last got."""
        for (of_group, _, _), scalars in self._scalars.items():
            if of_group == group:
                self._update(scalars, values)

    def __iter__(self) -> Iterator[Tensor]:
        for scalars in self._scalars.values():
            for scalar in scalars.values():
                yield scalar.tensor

    def _update(
        self, scalars: Mapping[str, _Scalar], values: Mapping[str, float | Tensor]
    ) -> list[Tensor]:
        changed = []
        for name, value in values.items():
            number = _number(value)
            if scalars[name].value != number:
                scalars[name].value = number
                changed.append(scalars[name])
        if changed:
            old = [scalar.tensor for scalar in changed]
            new = [torch.tensor(scalar.value, dtype=old[0].dtype) for scalar in changed]
            with torch.no_grad():
                assign(old, upload(new, old[0].device))
        return [scalar.tensor for scalar in scalars.values()]


def _number(value: float | Tensor) -> float:
    if not isinstance(value, Tensor):
        return value
    if value.device.type != "cpu":
        raise ValueError(
            f"an option such as the learning rate is a tensor on {value.device}, where the host "
            "cannot see it change; give a number, which is uploaded whenever it changes"
        )
    return value.item()
