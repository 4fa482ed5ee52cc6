"""RootsOptimizer: preconditions gradients with roots that a thread computes during training.

Shampoo and SOAP multiply gradients by "roots" of their statistics, [d, d] matrices: by inverse
roots, or bases of eigenvectors. Computing roots takes many times as long as the rest of a step, and
reads the device. With `delay` k > 0:

    call c          copies the statistics; the thread begins to compute
    calls c+1 ...   use the old roots
    call c+k        begins with the new roots, and waits for them if they are not ready

If k is 0, call c waits for its roots. The first roots are always waited for.

The host counts calls without reading the device, so bad steps count. If call c is a bad step, the
old roots stay.

If roots are ready before call c+k, the next call uses them, unless `deterministic` is set or the
job has several processes, whose parameters must stay equal. In both cases, and if k is 0 or 1,
equal runs give equal bits.

State dictionaries contain pending roots, and the call that will use them.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed

from graphstash.errors import ConfigError
from graphstash.training.optimizers.background import (
    Background,
    Compute,
    Pending,
    Roots,
    Snapshot,
    nothing_pending,
)
from graphstash.training.optimizers.base import SyncFreeOptimizer
from graphstash.training.optimizers.cohort import Cohort
from graphstash.training.optimizers.factors import Blocking, Factors, factors_of
from graphstash.training.optimizers.formula import Options
from graphstash.training.optimizers.options import Group

__all__ = ["RootsOptimizer"]

_log = logging.getLogger("graphstash")


class RootsOptimizer(SyncFreeOptimizer):
    """Base of the optimizers with roots; see the module's docstring.

    Besides the slots, a parameter's state has `statistics` and `roots` (flat, see `Factors`),
    `calls` (since the first roots; -1 before), and `pending` (None if no roots are pending).

    Attributes:
        failed_roots: number of computations that left the old roots, for lack of a finite result.
    """

    works_on_host = True
    _refuses_shards = "needs whole matrices, and a parameter is sharded; use LAMB or AdamW"
    _accumulates_first: ClassVar[bool]
    """Whether a step updates the statistics before the parameters."""
    _splits: ClassVar[bool]
    """Whether too large dimensions are split. If not, they have no matrix."""
    _own_option: ClassVar[str]
    """An option that identifies the state dictionaries of this class."""

    def __init__(self, params: Any, defaults: dict[str, Any], **options: Any) -> None:
        self._background = Background()
        self.failed_roots = 0
        super().__init__(params, defaults, **options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled or loaded state."""
        self.__dict__.setdefault("_background", Background())
        self.__dict__.setdefault("failed_roots", 0)
        super().__setstate__(state)

    def close(self) -> None:
        """End the thread early, after its computations. A later step starts a new one."""
        self._background.close()

    # Subclasses override these methods.

    def _statistics_beta(self, group: Group) -> float:
        """Return the decay of the statistics; 1 sums them."""
        raise NotImplementedError

    def _compute(self, group: Group) -> Compute:
        """Return the function that the thread calls. It must not refer to the optimizer."""
        raise NotImplementedError

    def _replace(self, state: dict[str, Any], factors: Factors, roots: Roots) -> None:
        del factors
        state["roots"].copy_(roots.flat)

    def _options(self, group: Group) -> Options:
        return (*super()._options(group), self._blocking(group))

    def _blocking(self, group: Group) -> Blocking:
        return Blocking(
            group["max_preconditioner_dim"],
            splits=self._splits,
            merges=group["merge_dims"],
            one_dimensional=group["precondition_1d"],
        )

    def _check(self, group: Group) -> None:
        super()._check(group)
        for name in ("precondition_frequency", "max_preconditioner_dim"):
            if not isinstance(group[name], int) or group[name] < 1:
                raise ValueError(
                    f"{name} must be a whole number and at least 1 (got {group[name]})"
                )
        delay, frequency = group["delay"], group["precondition_frequency"]
        if not isinstance(delay, int) or not 0 <= delay <= frequency:
            raise ValueError(
                "delay must be a whole number from 0 to precondition_frequency, which is "
                f"{frequency} (got {delay})"
            )

    def _check_parameters(self, group: Group) -> None:
        super()._check_parameters(group)
        if any(parameter.device.type == "xla" for parameter in group["params"]):
            raise ValueError(
                f"{type(self).__name__} decomposes matrices beside the training, and torch_xla "
                "computes nothing beside a step; use Muon, LAMB or AdamW"
            )

    def _check_loaded(self, group: Group, saved: Group, states: Sequence[Group]) -> None:
        if self._own_option not in saved:
            raise ConfigError(
                f"the state dictionary is not one of {type(self).__name__}: its groups have no "
                f"{self._own_option}"
            )
        super()._check_loaded(group, saved, states)

    def _shapes_of(self, group: Group, like: Tensor) -> dict[str, torch.Size]:
        factors = self._factors(group, like)
        flat, pending = torch.Size([factors.numel]), nothing_pending(factors, like).shape
        own = {"statistics": flat, "roots": flat, "pending": pending}
        return super()._shapes_of(group, like) | own

    def _update_cohort(self, index: int, group: Group, cohort: Cohort) -> None:
        cohort.gradients = list(map(_aligned, cohort.gradients))
        for parameter in cohort.parameters:
            self._begin_call(group, parameter)
        if self._accumulates_first:
            self._accumulate(group, cohort)
        super()._update_cohort(index, group, cohort)
        if not self._accumulates_first:
            self._accumulate(group, cohort)

    def _update_by_formula(self, group: Group, cohort: Cohort, scalars: Sequence[Tensor]) -> None:
        roots = [self.state[parameter]["roots"] for parameter in cohort.parameters]
        super()._update_by_formula(group, cohort, [*scalars, *roots])

    def _begin_call(self, group: Group, parameter: Tensor) -> None:
        """Count the call, and take pending roots that are due, or ready and allowed early."""
        state = self.state[parameter]
        if "roots" not in state:
            wide = torch.promote_types(parameter.dtype, torch.float32)
            like = parameter.new_empty((), dtype=wide)
            state["roots"] = self._factors(group, parameter).identity(like)
            state["statistics"] = torch.zeros_like(state["roots"])
            state["calls"], state["pending"] = -1, None
        if state["calls"] >= 0:
            state["calls"] += 1
        pending = state["pending"]
        if pending is None:
            return
        may_be_early = not (group["deterministic"] or _has_replicas())
        if state["calls"] >= pending.due or (may_be_early and pending.is_here()):
            self._take(group, parameter)

    def _accumulate(self, group: Group, cohort: Cohort) -> None:
        """Update the statistics, and begin to compute roots at `precondition_frequency`."""
        good = None if cohort.found_inf is None else cohort.found_inf == 0
        beta = self._statistics_beta(group)
        for parameter, gradient in zip(cohort.parameters, cohort.gradients, strict=True):
            factors = self._factors(group, parameter)
            if not factors.numel:
                continue
            state = self.state[parameter]
            old = state["statistics"]
            wide = gradient.to(old.dtype)
            if cohort.grad_scale is not None:
                wide = wide * cohort.grad_scale.reciprocal()
            views = [each for block in factors.matrices(old) for each in block if each is not None]
            _mix(views, factors.statistics(wide), beta, good)
            is_due = max(state["calls"], 0) % group["precondition_frequency"] == 0
            if is_due and state["pending"] is None:
                self._begin_roots(group, parameter, cohort.found_inf)

    def _begin_roots(self, group: Group, parameter: Tensor, found_inf: Tensor | None) -> None:
        state = self.state[parameter]
        is_first = state["calls"] < 0
        delay = 0 if is_first else group["delay"]
        snapshot = Snapshot(
            self._factors(group, parameter),
            statistics=state["statistics"].clone(),
            roots=state["roots"],  # no copy: only the results of this computation replace them
            is_first=is_first,
            found_inf=None if found_inf is None else found_inf.clone(),
        )
        due = max(state["calls"], 0) + delay
        state["pending"] = self._background.submit(self._compute(group), snapshot, due=due)
        if delay == 0:
            self._take(group, parameter)

    def _take(self, group: Group, parameter: Tensor) -> None:
        """Wait for a parameter's pending roots and replace the old roots."""
        state = self.state[parameter]
        pending, state["pending"] = state["pending"], None
        roots = pending.roots()
        if roots.flat is not None:
            for tensor in (roots.flat, roots.order):
                if tensor is not None and tensor.is_cuda:  # allocated on the thread's stream
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
            self._replace(state, self._factors(group, parameter), roots)
            state["calls"] = max(state["calls"], 0)
        elif roots.has_failed:
            self.failed_roots += 1
            if self.failed_roots == 1:
                _log.warning(
                    "%s could not decompose the statistics of a parameter of shape %s, or not into "
                    "finite numbers; what it had stays (further cases are counted in failed_roots)",
                    type(self).__name__,
                    list(parameter.shape),
                )

    def _factors(self, group: Group, parameter: Tensor) -> Factors:
        return factors_of(parameter.shape, self._blocking(group))

    def state_dict(self) -> dict[str, Any]:
        """Return a state dictionary with the pending roots. Waits for them and reads the device."""
        state_dict = super().state_dict()
        states = dict(state_dict["state"])
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for number, parameter in zip(saved["params"], group["params"], strict=True):
                state = states.get(number, {})
                if "pending" in state:
                    plain = _plain(state, self._factors(group, parameter))
                    states[number] = state | {"pending": plain}
        return state_dict | {"state": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dictionary of this class, and drop running computations.

        Raises:
            ConfigError: the state is of another optimizer; nothing was changed.
            ValueError: the state is of other groups; nothing was changed.
        """
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        ours = [parameter for group in self.param_groups for parameter in group["params"]]
        groups = [group for group in self.param_groups for _ in group["params"]]
        for number, parameter, group in zip(saved, ours, groups, strict=True):
            given = state_dict["state"].get(number, {})
            state = self.state[parameter] if given else {}
            # torch casts its copies to the parameter's type, or shares memory with `state_dict`.
            for name in given.keys() & {"statistics", "roots"}:
                state[name] = given[name].to(parameter.device, copy=True)
            if "pending" in given:
                plain = given["pending"].to(parameter.device)
                factors = self._factors(group, parameter)
                state["pending"] = Pending.from_plain(plain, state["calls"], factors)


def _mix(old: list[Tensor], new: list[Tensor], beta: float, good: Tensor | None) -> None:
    """Update statistics in place, unless the step is bad or one would not be finite.

    Statistics are the largest tensors of a step, so this writes over `new` to use no more memory.
    """
    for before, current in zip(old, new, strict=True):
        if beta == 1:
            torch.add(before, current, out=current)
        else:
            torch.lerp(before, current, 1 - beta, out=current)
    extremes = [extreme for each in new for extreme in torch.aminmax(each)]  # NaN if one is
    fits = torch.isfinite(torch.stack(extremes)).all()
    for before, current in zip(old, new, strict=True):
        torch.where(fits if good is None else good & fits, current, before, out=before)


def _plain(state: Mapping[str, Any], factors: Factors) -> Tensor:
    pending: Pending | None = state["pending"]
    nothing = nothing_pending(factors, state["roots"])
    return nothing if pending is None else pending.plain(nothing, state["calls"])


def _aligned(gradient: Tensor) -> Tensor:
    """Copy a gradient that is unaligned, as in DDP's buckets: alignment changes rounding."""
    return gradient.clone() if gradient.data_ptr() % 64 else gradient


def _has_replicas() -> bool:
    is_distributed = distributed.is_available() and distributed.is_initialized()
    return is_distributed and distributed.get_world_size() > 1
