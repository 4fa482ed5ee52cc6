"""SyncFreeOptimizer: the base class of all optimizers of this package.

An optimizer defines a pure formula for the new values of parameters and state. One call of
the formula computes the values of many parameters: as one recorded operation on torch_xla, and with
torch's multi-tensor kernels elsewhere. The device decides whether the result counts. With
`bad = found_inf != 0`,

    value <- where(bad, value, new value)        for parameters, every state tensor, and the step

Multiplying by a mask would keep NaN, because NaN * 0 is NaN.
"""

import inspect
import math
import weakref
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any, ClassVar, Final, Unpack

import torch
from torch import Tensor, optim
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from graphstash.errors import ConfigError
from graphstash.training.device import (
    TracedOp,
    assign,
    materialize,
    settle,
    shapes_of,
    upload,
)
from graphstash.training.memory import overlapping
from graphstash.training.optimizers.cohort import (
    MASTER,
    Cohort,
    NewState,
    Place,
    begin,
    cohorts_of,
    computes_the_same,
    place_of,
    set_counts_apart,
)
from graphstash.training.optimizers.formula import Layout, Options
from graphstash.training.optimizers.options import (
    Group,
    TorchOptions,
    at_least,
    is_sequence,
    require_count,
)
from graphstash.training.optimizers.scalars import DeviceScalars, number_of
from graphstash.training.sharding import is_sharded, sharded_like

__all__ = ["Kernel", "SyncFreeOptimizer"]

Kernel = Callable[..., object]
"""A fused kernel of torch that still needs only found_inf and grad_scale."""


_COUNTED: Final[MutableMapping[Tensor, tuple["weakref.ref[SyncFreeOptimizer]", TensorWeakRef]]] = (
    WeakTensorKeyDictionary()
)
"""By count of steps in a state dictionary: the optimizer that made it, and the parameter."""


_IN_GROUPS: Final = frozenset(
    (
        *("params", "param_names", "name"),
        *("initial_lr", "base_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"),
    )
)
"""Keys that a group may have besides options: parameters, names, and values that schedulers add."""


def _refresh(state_dict: dict[str, Any]) -> None:
    """Bring a state dictionary that was not copied up to date, as one of torch.optim always is.

    It contains the optimizer's own moments, which change with each step. Its counts of steps are
    copies, and would not fit them.
    """
    present: dict[int, dict[Any, Any]] = {}
    for state in state_dict["state"].values():
        count = state.get("step") if isinstance(state, dict) else None
        if not isinstance(count, Tensor) or (made := _COUNTED.get(count)) is None:
            continue
        if (owner := made[0]()) is None or (parameter := made[1]()) is None:
            continue
        if count._version:
            continue  # torch.distributed.checkpoint has loaded a state into the dictionary
        now = owner.state.get(parameter, {})
        shares = any(isinstance(v, Tensor) and v is now.get(name) for name, v in state.items())
        if shares and float(now["step"]) != float(count):
            if id(owner) not in present:
                present[id(owner)] = owner.state_dict()["state"]
            state.update(present[id(owner)][_numbers(owner.param_groups)[parameter]])


def _numbers(groups: list[dict[str, Any]]) -> dict[Tensor, int]:
    """Return the numbers that parameters have in a state dictionary."""
    parameters = (parameter for group in groups for parameter in group["params"])
    return {parameter: number for number, parameter in enumerate(dict.fromkeys(parameters))}


class SyncFreeOptimizer(Optimizer):
    """Base of the sync-free optimizers; see the module's docstring.

    An optimizer and the class of the same name in `torch.optim` can load each other's state
    dictionaries. `torch.optim.lr_scheduler` works: the next step uploads changed values, and no
    graph changes.

    Parameters that have always been updated together share the tensor of their `step`. To change
    the count of one of them, put a new tensor into its state: a write in place changes all.

    Parameters must be real floating-point tensors with dense gradients.
    """

    works_on_host: ClassVar[bool] = False
    """Whether a step also does work on the host, outside its graph."""
    _operation: ClassVar[TracedOp]
    _has_own_types: ClassVar[bool] = False
    """Whether state tensors may have another dtype than their parameter."""

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
        # torch.optim requires all of its options in the groups of a loaded state dictionary.
        super().__init__(params, defaults | known)
        self._scalars = DeviceScalars()
        self._checked_kernels: dict[Hashable, bool] = {}
        self._checked_addresses: dict[int, list[int]] = {}
        """By ID of a step tensor: the addresses of its parameters, which do not overlap."""
        self._members: list[list[int]] = []
        """IDs of the parameters of each group at the last step."""
        self._is_refreshed = False
        """Whether a traced step calls `refresh` before it."""
        self._begin_early(self.param_groups)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether torch.amp.GradScaler passes found_inf to the optimizer instead of reading it."""
        return bool(self.defaults.get("amp_scaling", True))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as in torch.optim.

        Raises:
            ValueError: an option is unknown, out of range, or not allowed for these parameters.
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
        if hasattr(self, "_scalars"):  # false while torch's __init__ adds the first groups
            self._begin_early(self.param_groups[-1:])

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled optimizer. torch also calls this in `load_state_dict`."""
        self.__dict__.setdefault("_scalars", DeviceScalars())
        self.__dict__.setdefault("_checked_kernels", {})
        self.__dict__.setdefault("_checked_addresses", {})
        self.__dict__.setdefault("_members", [])
        self.__dict__.setdefault("_is_refreshed", False)
        super().__setstate__(state)

    def _check_parameters(self, group: Group) -> None:
        if self._refuses_shards and any(map(is_sharded, group["params"])):
            raise ValueError(f"{type(self).__name__} {self._refuses_shards}")
        dtypes = {parameter.dtype for parameter in group["params"]}
        if group["master_weights"] and not dtypes <= {torch.bfloat16, torch.float16}:
            raise ValueError(
                "master_weights is for bfloat16 and float16 parameters; put others into a group "
                f"with master_weights=False (got {', '.join(map(str, dtypes))})"
            )

    # Class variables that describe the formula.

    _nonnegative: ClassVar[tuple[str, ...]] = ("lr", "weight_decay", "eps")
    """Options that must be at least 0."""
    _numbers: ClassVar[tuple[str, ...]] = ("lr", "weight_decay", "betas")
    """Options that may change from step to step, in the formula's order. `betas` are last: all
    beta, all 1 - beta, all log(beta)."""
    _constants: ClassVar[tuple[str, ...]] = ("eps",)
    """Options that are constants of the graph, in the formula's order."""
    _moments: ClassVar[tuple[str, ...]]
    """State tensors that every parameter has besides `step`."""
    _refuses_shards: ClassVar[str] = ""
    """Error message for sharded parameters. Empty if the class supports them."""

    def _check(self, group: Group) -> None:
        at_least(group, 0, *self._nonnegative)
        if "betas" in group:
            require_count(group, 2, "betas")
            self._check_betas(*group["betas"])

    def _check_betas(self, *betas: float) -> None:
        for number, beta in enumerate(betas):
            if not 0 <= beta < 1:
                raise ValueError(f"betas[{number}] must be at least 0 and below 1 (got {beta})")

    def _scheduled(self, group: Group) -> dict[str, float | Tensor]:
        """Return the values of `_numbers`, in the formula's order."""
        values = {name: group[name] for name in self._numbers}
        betas = values.pop("betas", ())
        values |= {f"beta{number}": beta for number, beta in enumerate(betas, 1)}
        # In double precision on the host: 1 - beta in float32 would lose digits.
        values |= {f"1 - beta{number}": 1 - beta for number, beta in enumerate(betas, 1)}
        logs = [math.log(beta) if beta else -math.inf for beta in betas]
        return values | {f"log beta{number}": log for number, log in enumerate(logs, 1)}

    def _options(self, group: Group) -> Options:
        return tuple(group[name] for name in self._constants)

    def _slots(self, group: Group) -> tuple[str, ...]:
        """Return the names of a parameter's state tensors, except `step` and `MASTER`."""
        del group
        return self._moments

    def _slots_of(self, group: Group, parameter: Tensor) -> tuple[str, ...]:
        """Override this method if the names depend on the parameter's shape."""
        del parameter
        return self._slots(group)

    def _beginning(self, group: Group, parameter: Tensor, name: str) -> Tensor:
        del name
        dtype = torch.float32 if group["master_weights"] else None
        return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)

    def _fused_kernel(self, group: Group, cohort: Cohort) -> Kernel | None:
        """Return torch's fused kernel with its arguments, or None if it lacks these options."""
        del group, cohort
        return None

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        found_inf: Tensor | None = None,
        grad_scale: Tensor | None = None,
    ) -> Any:
        """Update the parameters, unless `found_inf` marks the gradients as unusable.

        Args:
            closure: Recomputes the loss, as in torch.optim.
            found_inf: Tensor with one element on the parameters' device. None or 0: update. Other
                values: leave parameters, state and step count unchanged, to the bit. On torch_xla,
                None and a tensor give different graphs, different values do not. Adafactor, Shampoo
                and SOAP also leave a parameter and its state unchanged if squares of its gradient
                overflow; such a step still counts.
            grad_scale: [], on the parameters' device: the loss scale by which to divide the
                gradients first. None: the gradients are not scaled.

        Raises:
            TypeError: found_inf is not a tensor.
            ValueError: found_inf has more than one element.
            RuntimeError: a gradient is sparse, a parameter is complex, or parameters overlap.
        """
        loss = None
        if closure is not None:
            with torch.set_grad_enabled(True):
                loss = closure()
        if found_inf is grad_scale is None:  # torch.amp.GradScaler sets both as attributes
            found_inf = getattr(self, "found_inf", None)
            grad_scale = getattr(self, "grad_scale", None)
        if not (torch.compiler.is_compiling() and self._is_refreshed):
            self._part_groups()
        self.update(dict(enumerate(self.param_groups)), found_inf, grad_scale)
        return loss

    def update(
        self,
        groups: Mapping[int, Group],
        found_inf: Tensor | None = None,
        grad_scale: Tensor | None = None,
    ) -> None:
        """Update the parameters in `groups`, by index of the group; see `step`. Call this under
        `no_grad`.
        """
        if found_inf is not None:
            found_inf = _checked(found_inf)
        created: list[Tensor] = []
        cohorts = [
            (index, group, cohort)
            for index, group in groups.items()
            for cohort in cohorts_of(group["params"], self.state, self._new_state(group), created)
        ]
        if created:
            materialize(created)
        for index, group, cohort in cohorts:
            cohort.found_inf = _scalar_on(found_inf, cohort.device)
            cohort.grad_scale = _scalar_on(grad_scale, cohort.device)
            if cohort.has_addresses():
                self._require_own_memory(cohort)
            self._update_cohort(index, group, cohort)

    def refresh(self) -> None:
        """Upload numbers that the host has changed, such as the learning rate, into their tensors.

        `step` does the same. A traced step replays only the graph of `step`, and calls this first.
        """
        self._is_refreshed = True
        self._part_groups()
        for index, group in enumerate(self.param_groups):
            self._scalars.refresh(index, self._scheduled(group))

    # A graph would not notice that a step tensor is another one. `torch.compiler.disable` would
    # import the compiler at once, and that takes two seconds.
    @torch._disable_dynamo  # type: ignore[attr-defined] # only for torch itself
    def _part_groups(self) -> None:
        """Give each group its own step tensors if a parameter has left or changed its group."""
        members = [list(map(id, group["params"])) for group in self.param_groups]
        if members == self._members:
            return
        self._members = members
        inside = {number for numbers in members for number in numbers}
        outside = [parameter for parameter in self.state if id(parameter) not in inside]
        set_counts_apart(self.state, [outside, *(group["params"] for group in self.param_groups)])

    def device_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the state, and the uploaded numbers."""
        states = self.state.values()
        tensors = [x for state in states for x in state.values() if isinstance(x, Tensor)]
        yield from {id(each): each for each in tensors}.values()
        yield from self._scalars

    def _new_state(self, group: Group) -> NewState:
        has_master = group["master_weights"]

        def names(parameter: Tensor) -> tuple[str, ...]:
            return (*self._slots_of(group, parameter), *((MASTER,) if has_master else ()))

        def beginning(parameter: Tensor, name: str) -> Tensor:
            if name == MASTER:
                return parameter.detach().float()
            return self._beginning(group, parameter, name)

        return NewState(names, beginning)

    def _require_own_memory(self, cohort: Cohort) -> None:
        """Raise RuntimeError if parameters overlap, unless the same ones passed at the last step.

        The formula computes all new values from the old ones, so one update would overwrite the
        other. Parameters of different cohorts are updated one after the other.
        """
        addresses = [parameter.data_ptr() for parameter in cohort.parameters]
        if self._checked_addresses.get(id(cohort.step)) == addresses:
            return
        if shared := overlapping(cohort.parameters):
            raise RuntimeError(
                f"parameters of the shapes {[list(each.shape) for each in shared]} share memory, "
                "so one update would overwrite the other; give the modules one and the same "
                "Parameter, or clone() its data"
            )
        self._checked_addresses[id(cohort.step)] = addresses

    def _update_cohort(self, index: int, group: Group, cohort: Cohort) -> None:
        scheduled = self._scheduled(group)
        fitting, others = cohort.by_layout()
        if fitting is not None:
            if (kernel := self._kernel(group, scheduled, fitting)) is not None:
                self._update_fused(kernel, fitting)
            else:
                others = cohort
        if others is not None:
            scalars = self._scalars.get(index, scheduled, cohort.device, cohort.wide)
            for part in others.in_parts():
                self._update_by_formula(group, part, scalars)

    def _kernel(
        self, group: Group, scheduled: Mapping[str, float | Tensor], cohort: Cohort
    ) -> Kernel | None:
        kernel = None if group["fused"] is False else self._fused_kernel(group, cohort)
        exact = kernel is not None and self._is_kernel_exact(group, scheduled, cohort)
        return kernel if exact else None

    @staticmethod
    def _update_fused(kernel: Kernel, cohort: Cohort) -> None:
        found_inf = cohort.found_inf
        cohort.step += 1.0 if found_inf is None else (found_inf == 0).to(cohort.step.dtype)
        bad = None if found_inf is None else (found_inf != 0).float()
        kernel(grad_scale=cohort.grad_scale, found_inf=bad)
        # torch's kernels (2.7 to 2.15) do not increment the version counters of the parameters. A
        # later backward would then use the new values instead of raising an error.
        increment_version(cohort.parameters)

    def _update_by_formula(self, group: Group, cohort: Cohort, scalars: Sequence[Tensor]) -> None:
        layout = Layout(
            options=self._options(group),
            select=cohort.found_inf is not None,
            unscale=cohort.grad_scale is not None,
            maximize=group["maximize"],
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

    def _is_kernel_exact(
        self, group: Group, scheduled: Mapping[str, float | Tensor], cohort: Cohort
    ) -> bool:
        case = (
            *(cohort.device, cohort.parameters[0].dtype, len(cohort.slots)),
            *(cohort.found_inf is not None, cohort.grad_scale is not None),
            *(group["maximize"], *self._options(group)),
            *[number_of(value) != 0 for value in scheduled.values()],
        )
        if case not in self._checked_kernels:
            tried = {**group, "lr": 0.5}  # half precision would round a small change away
            scalars = [
                torch.tensor(float(value), dtype=cohort.wide, device=cohort.device)
                for value in self._scheduled(tried).values()
            ]

            def formula(scratch: Cohort) -> None:
                self._update_by_formula(tried, scratch, scalars)

            def kernel(scratch: Cohort) -> None:
                if (fused := self._fused_kernel(tried, scratch)) is not None:
                    self._update_fused(fused, scratch)

            self._checked_kernels[case] = computes_the_same(kernel, formula, cohort)
        return self._checked_kernels[case]

    def _begin_early(self, groups: Iterable[Group]) -> None:
        """Materialize parameters and new state on torch_xla before the first step.

        torch_xla orders the results of a graph by the age of its tensors. If the state were younger
        than the first loss and gradients, the first two steps would have different graphs, and a
        cold start would compile both.
        """
        unmaterialized: list[Tensor] = []
        for group in groups:
            steps: dict[Place, Tensor] = {}
            for parameter in group["params"]:
                if parameter.device.type != "xla":
                    continue
                unmaterialized.append(parameter)
                is_trained = parameter.is_floating_point() and parameter.requires_grad
                if is_trained and not self.state.get(parameter):
                    begin(parameter, self.state, self._new_state(group), steps, unmaterialized)
        materialize(unmaterialized)

    def state_dict(self) -> dict[str, Any]:
        """Return a state dictionary in torch's format, without the state of parameters at step 0.

        Reads the device once for each `step` tensor, which many parameters share. As in torch, the
        dictionary contains the optimizer's own tensors: copy it to keep or save this state.
        """
        state_dict = super().state_dict()
        on_host: dict[int, float] = {}
        states = {}
        parameters = list(_numbers(self.param_groups))
        for key, state in state_dict["state"].items():
            step = state.get("step")
            if step is None:  # another class created the state
                states[key] = state
                continue
            if id(step) not in on_host:
                on_host[id(step)] = float(step)
            if on_host[id(step)] > 0:
                count = torch.tensor(on_host[id(step)], dtype=torch.float32)
                states[key] = state | {"step": count}
                if isinstance(key, int):
                    _COUNTED[count] = (weakref.ref(self), TensorWeakRef(parameters[key]))
        return state_dict | {"state": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dictionary of this class or of torch's class of the same name.

        Options that the dictionary lacks keep their values.

        Raises:
            ConfigError: saved options or state do not fit this optimizer and its parameters.
                Nothing has changed.
            ValueError: the dictionary has other groups.
        """
        _refresh(state_dict)
        kept = [dict(group) for group in self.param_groups]
        for group, saved_group in zip(kept, state_dict["param_groups"], strict=False):
            states = [state_dict["state"].get(number, {}) for number in saved_group["params"]]
            self._check_loaded(group, saved_group, states)
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
                    if group["master_weights"] or self._has_own_types:
                        # torch has rounded the state to the parameter's dtype
                        names = self._new_state(group).names(parameter)
                        saved_names = [name for name in names if name in before]
                        state |= {n: before[n].to(parameter.device) for n in saved_names}
                    adopted += self._adopt(group, parameter, state, steps)
            counts += steps.values()
        materialize(adopted)
        settle(counts)  # last, because `materialize` recreates the counts of new state last
        self._begin_early(self.param_groups)

    def _adopt(
        self,
        group: Group,
        parameter: Tensor,
        state: dict[str, Any],
        steps: dict[tuple[Place, float], Tensor],
    ) -> list[Tensor]:
        """Copy loaded state, which shares memory with its source. Equal steps share a tensor."""
        new = self._new_state(group)
        names = new.names(parameter)
        step = state.get("step")
        count = self._step_of(state) if step is None else float(step)
        place = (place_of(parameter, names), count)
        if place not in steps:
            number = torch.tensor(count, dtype=torch.float32)
            steps[place] = upload([number], parameter.device)[0]
        state["step"] = steps[place]
        for name in names:
            value = state.get(name)
            state[name] = (
                new.beginning(parameter, name)
                if value is None
                else sharded_like(_own_copy(value), parameter)
            )
        return [state[name] for name in names]

    def _check_loaded(self, group: Group, saved: Group, states: Sequence[Group]) -> None:
        """Raise ConfigError if another optimizer or model saved the group."""
        name = type(self).__name__
        remedy = "load only the model, and begin with new state"
        for option in self.defaults.keys() & saved.keys():
            if is_sequence(saved[option]) is not is_sequence(self.defaults[option]):
                raise ConfigError(
                    f"the state dictionary is not one of {name}: its {option} is {saved[option]}, "
                    f"where that of {name} is like {self.defaults[option]}; {remedy}"
                )
        if any(states) and (makers := self._other_makers(saved)):
            raise ConfigError(
                f"the state dictionary is not one of {name}: its options are those of "
                f"{' or '.join(makers)}; {remedy}"
            )
        options = {**group, **saved}
        for parameter, state in zip(group["params"], states, strict=False):
            self._check_shapes(options, parameter, state)
            has = {key for key, value in state.items() if value is not None and key != "step"}
            count = float(state.get("step") or 0)
            if (has or count > 0) and not self._has_moments(options, parameter, has):
                raise ConfigError(
                    f"the state dictionary is not one of {name}: after {count:.0f} steps a "
                    f"parameter of shape {list(parameter.shape)} has "
                    f"{', '.join(sorted(has)) or 'nothing'}, where {name} has "
                    f"{', '.join(self._slots_of(options, parameter))}; {remedy}"
                )
            if has and state.get("step") is None and self._uses_step(options):
                raise ConfigError(
                    f"the state dictionary is not one of {name}: a parameter of shape "
                    f"{list(parameter.shape)} has {', '.join(sorted(has))} and no step, and the "
                    f"next update depends on the number of steps before; save `step`, or {remedy}"
                )

    def _check_shapes(self, group: Group, parameter: Tensor, state: Group) -> None:
        like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        for name, shape in self._shapes_of(group, like).items():
            value = state.get(name)
            if value is not None and value.shape != shape:
                raise ConfigError(
                    f"the state dictionary is that of another model: for a parameter of shape "
                    f"{list(parameter.shape)}, {name} has the shape {list(value.shape)} instead of "
                    f"{list(shape)}; begin with new state"
                )

    def _shapes_of(self, group: Group, like: Tensor) -> dict[str, torch.Size]:
        """Return the shapes of the state tensors, without `step`, of a parameter like `like`."""
        new = self._new_state(group)
        return {name: new.beginning(like, name).shape for name in new.names(like)}

    def _other_makers(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the names of the optimizers that may have saved a group, or an empty list if this
        class may have. If the group has all options of several optimizers, only the optimizers
        with the most options count. State names prove little: half of all optimizers have an
        `exp_avg`.
        """
        fitting = [
            (len(names), maker) for maker, names in _options_of_makers() if names <= {*saved}
        ]
        largest = max((count for count, _ in fitting), default=0)
        makers = {maker for count, maker in fitting if count == largest}
        if makers & {each.__name__ for each in type(self).__mro__}:
            return []
        if len(self.defaults) >= largest and self.defaults.keys() <= saved.keys():
            return []  # a user's class with the options of a known optimizer
        if _DECOUPLED in saved and {"Adam", "AdamW"} <= makers:
            makers.remove("Adam" if saved[_DECOUPLED] else "AdamW")
        return sorted(makers)

    def _has_moments(self, group: Group, parameter: Tensor, saved: Collection[str]) -> bool:
        # `max_exp_avg_sq` may be missing: amsgrad may have been enabled since.
        return {*self._slots_of(group, parameter)} - {"max_exp_avg_sq"} <= {*saved}

    def _uses_step(self, group: Group) -> bool:
        del group
        return True

    def _step_of(self, state: Mapping[str, Any]) -> float:
        """Return the step count of loaded state without `step`: 1 if it has tensors, else 0."""
        return float(any(value is not None for value in state.values()))


_DECOUPLED: Final = "decoupled_weight_decay"
"""True for AdamW, false for Adam. Its presence proves nothing: torch's NAdam and RAdam have it."""


def _options_of_makers() -> Iterator[tuple[str, set[str]]]:
    """Yield name and options, except `_DECOUPLED`, of all optimizers here and in torch.optim."""
    torch_classes = [each for each in vars(optim).values() if isinstance(each, type)]
    for maker in [*_makers_below(SyncFreeOptimizer), *torch_classes]:
        if issubclass(maker, Optimizer) and maker is not Optimizer:
            names = {*inspect.signature(maker).parameters} - {"params", "options", _DECOUPLED}
            is_ours = issubclass(maker, SyncFreeOptimizer)
            yield maker.__name__, names | (TorchOptions.__optional_keys__ if is_ours else set())


def _makers_below(base: type[Optimizer]) -> Iterator[type[Optimizer]]:
    for maker in base.__subclasses__():
        if "__init__" in vars(maker):
            yield maker
        yield from _makers_below(maker)


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
    if value.device.type == "xla":  # a clone would compile a graph
        return upload([value.cpu()], value.device)[0]
    return value.clone(memory_format=torch.preserve_format)


def _scalar_on(scalar: Tensor | None, device: torch.device) -> Tensor | None:
    if scalar is None or (
        scalar.device == device and scalar.dim() == 0 and scalar.dtype == torch.float32
    ):
        return scalar
    return scalar.to(device, torch.float32).reshape(())
