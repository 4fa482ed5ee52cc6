"""Compare a run with the checkpoint that it resumes from, and the processes of a job.

A checkpoint records the run that made it:

    arguments    refused if they differ: the saved state would not fit, or be ignored
    parameters   the names of the optimizer's parameters, which stay in order: optimizers save their
                 state by position, so equal shapes in another order would swap state
    settings     a difference is logged, because it is often a mistake

The options of optimizer, schedule and loss scale, and the seeds of the data, are restored from the
checkpoint. A run that was started with other values is told so.
"""

import logging
from collections.abc import Iterable, Mapping, Sized
from contextlib import suppress
from inspect import isfunction
from reprlib import repr as short
from typing import Any, Final

from torch import Tensor, nn
from torch.optim.lr_scheduler import ChainedScheduler, SequentialLR

from graphstash.errors import ConfigError
from graphstash.training.checkpoints import Checkpoint
from graphstash.training.data.batches import Batches
from graphstash.training.data.position import generators_of
from graphstash.training.loop.training_step import Options, Stateful

__all__ = [
    "common_arguments",
    "describe_run",
    "load_schedule",
    "require_compatible",
    "schedule_state",
    "state_of",
    "warn_of_changes",
]

_log = logging.getLogger("graphstash")

_CHANGING: Final = frozenset({"last_epoch", "T_cur", "T_i", "scale"})
"""Numbers of a schedule or a loss scale that change with each step."""

_COMPOSED: Final = (ChainedScheduler, SequentialLR)

_OF_LOADER: Final = ("drop_last", "num_workers")


def state_of(part: Stateful | None) -> dict[str, Any] | None:
    """Return the state of an object, or None without an object."""
    return None if part is None else dict(part.state_dict())


def schedule_state(schedule: Any) -> dict[str, Any] | None:
    """Return the state of a schedule, or None without one. Its own functions, as SWALR has one, are
    replaced by their names: a checkpoint contains no code.
    """
    if schedule is None:
        return None
    state = dict(schedule.state_dict())
    for name, value in state.items():
        function = value.__name__ if isfunction(value) else ""
        if function and getattr(schedule, function, None) is value:
            state[name] = function
    if isinstance(schedule, _COMPOSED):
        state["_schedulers"] = list(map(schedule_state, schedule._schedulers))
    return state


def load_schedule(schedule: Any, state: dict[str, Any]) -> None:
    """Restore a result of `schedule_state`."""
    schedule.load_state_dict(_with_functions(schedule, state))


def _with_functions(schedule: Any, state: dict[str, Any]) -> dict[str, Any]:
    own = vars(schedule)
    new = {
        name: getattr(schedule, value)
        if isinstance(value, str) and isfunction(own.get(name))
        else value
        for name, value in state.items()
    }
    if isinstance(schedule, _COMPOSED):
        new["_schedulers"] = list(map(_with_functions, schedule._schedulers, new["_schedulers"]))
    return new


def describe_run(options: Options) -> dict[str, Any]:
    """Return what a checkpoint records of its run."""
    return {
        "arguments": _arguments(options),
        "parameters": _parameter_names(options.model, options.optimizer.param_groups),
        "sizes": _settings(options),
        "seeds": _seeds(options.data),
    }


def common_arguments(options: Options) -> dict[str, Any]:
    """Return the arguments that all processes of a job must have in common.

    If one of them differed, the processes would wait for each other in different steps, or train to
    different parameters.
    """
    groups = options.optimizer.param_groups
    schedule = _constants(schedule_state(options.schedule), "the schedule's")
    numbers = {name: each for name, each in schedule.items() if isinstance(each, (int, float, str))}
    names = ("steps", "precision", "clip_norm", "clip_value")
    return {
        **_arguments(options),
        **{name: getattr(options, name) for name in names},
        "checkpoint_every": None if options.checkpoints is None else options.checkpoint_every,
        "the set of logging boundaries": _boundaries(options),
        "the order of the optimizer's parameters": _parameter_names(options.model, groups),
        **_group_options({"param_groups": groups}),
        **numbers,
        **_constants(state_of(options.loss_scale), "the loss scale's"),
    }


def _boundaries(options: Options) -> tuple[list[int], bool]:
    """Return the fewest intervals that give all boundaries, and whether the last step is one."""
    intervals = {options.log_every}
    if options.evaluate is not None and options.evaluate_every is not None:
        intervals.add(options.evaluate_every)
    if options.checkpoints is not None:
        intervals.add(options.checkpoint_every)
    fewest = {
        each
        for each in intervals
        if not any(each % other == 0 for other in intervals - {each})  # no multiple of another
    }
    ends = options.evaluate is not None or options.checkpoints is not None
    return (
        sorted(each for each in fewest if each <= options.steps),
        ends or any(options.steps % each == 0 for each in fewest),
    )


def require_compatible(found: Checkpoint, options: Options) -> None:
    """Check that the run can continue from the checkpoint.

    Raises:
        ConfigError: an argument differs, or the optimizer's parameters are in another order.
    """
    state, arguments = found.state, _arguments(options)
    saved = state.get("arguments")
    if saved is None:  # written by an earlier version
        saved = arguments | {"stateful": []}
        for name in ("schedule", "loss_scale"):
            saved[name] = state[name] and (arguments[name] or "one")
    for name, value in arguments.items():
        if (then := saved.get(name, value)) != value:
            raise ConfigError(
                f"{found.path} was made with {name}={then!r}, but this run has {value!r}; resume "
                "with the arguments of the run that made it, or give another directory"
            )
    _require_same_order(found, options)


def warn_of_changes(found: Checkpoint, options: Options) -> None:
    """Warn of changes that are allowed on resume, but often a mistake."""
    state = found.state
    restored = (
        (_group_options(state["optimizer"]), _group_options(options.optimizer.state_dict())),
        _constants_then_and_now("schedule", state, schedule_state(options.schedule)),
        _constants_then_and_now("loss_scale", state, state_of(options.loss_scale)),
        (state.get("seeds", {}), _seeds(options.data)),
    )
    for then, now in restored:
        for name in _changed_names(then, now):
            _log.warning(
                "%s was made with %s=%s, but this run has %s; it resumes with %s: to start with "
                "another value, give another directory",
                *(found.path, name, short(then[name]), short(now[name]), short(then[name])),
            )
    then, now = state.get("sizes", {}), _settings(options)
    for name in _changed_names(then, now):
        _log.warning(
            "%s was made with %s=%s; this run resumes with %s",
            *(found.path, name, short(then[name]), short(now[name])),
        )


def _changed_names(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [name for name in sorted(then.keys() & now.keys()) if then[name] != now[name]]


def _constants_then_and_now(
    name: str, state: Mapping[str, Any], part: Mapping[str, Any] | None
) -> tuple[dict[str, object], dict[str, object]]:
    owner = f"the {name.replace('_', ' ')}'s"
    return _constants(state[name], owner), _constants(part, owner)


def _arguments(options: Options) -> dict[str, Any]:
    return {
        "optimizer": type(options.optimizer).__name__,
        "accumulate": options.accumulate,
        "schedule": options.schedule and type(options.schedule).__name__,
        "schedules": _types_of_parts(options.schedule),
        "loss_scale": options.loss_scale and type(options.loss_scale).__name__,
        "stateful": sorted(options.stateful),
    }


def _types_of_parts(schedule: Any) -> list[str]:
    inner = getattr(schedule, "_schedulers", ())
    return [name for each in inner for name in (type(each).__name__, *_types_of_parts(each))]


def _parameter_names(model: nn.Module, groups: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Return the names of the parameters of each group; "" for those outside of the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names.get(id(each), "") for each in group["params"]] for group in groups]


def _require_same_order(found: Checkpoint, options: Options) -> None:
    now = _parameter_names(options.model, options.optimizer.param_groups)
    then = found.state.get("parameters", now)
    known = {"", *(name for name, _ in options.model.named_parameters(remove_duplicate=False))}
    if then == now or not known.issuperset(name for group in then for name in group):
        return  # a model with other names fails where its weights are loaded
    flat_then, flat_now = (
        [(number, name) for number, group in enumerate(groups) for name in group]
        for groups in (then, now)
    )
    pairs = zip(flat_then, flat_now, strict=False)
    first = next((pair for pair in pairs if pair[0] != pair[1]), None)
    if first is None:
        return  # another number of parameters, which the optimizer refuses
    (old_group, old), (group, name) = first
    raise ConfigError(
        f"{found.path} was made by an optimizer with its parameters in another order or in other "
        f"groups: where it had {old!r} in group {old_group}, this run has {name!r} in group "
        f"{group}. Each parameter would get the state of another one; make the optimizer as "
        "before, or give another directory"
    )


def _group_options(optimizer: Mapping[str, Any]) -> dict[str, object]:
    """Return the options of each group that no schedule changes, and initial learning rates."""
    found: dict[str, object] = {}
    for number, group in enumerate(optimizer["param_groups"]):
        scheduled = {"betas", "momentum"} if "max_momentum" in group else set()
        for name, value in group.items():
            if name in {"params", "lr", "initial_lr"} | scheduled:
                continue
            is_plain = isinstance(value, tuple) and not any(isinstance(v, Tensor) for v in value)
            if is_plain or isinstance(value, (int, float)):
                found[f"{name} of group {number}"] = value
        if "lr" in group:
            found[f"lr of group {number}"] = float(group.get("initial_lr", group["lr"]))
    return found


def _constants(part: Mapping[str, Any] | None, owner: str) -> dict[str, object]:
    """Return the values that no step changes of a loss scale, a schedule and those in it."""
    found: dict[str, object] = {}
    for name, value in (part or {}).items():
        if name == "_schedulers":
            for number, each in enumerate(value):
                nested = _constants(each, owner)
                found |= {f"{key} (schedule {number} in it)": nested[key] for key in nested}
        elif name.lstrip("_") == "milestones":
            found[f"{owner} milestones"] = sorted(value)
        elif name == "_schedule_phases":  # OneCycleLR's, as shares of all steps
            total = part["total_steps"] if part else 1
            found[f"{owner} phases"] = [round((p["end_step"] + 1) / total, 6) for p in value]
        elif name in {"max_lrs", "lr_lambdas", "_anneal_func_type"} or (
            isinstance(value, (int, float, str))
            and not name.startswith("_")
            and name not in _CHANGING
        ):
            found[f"{owner} {name.lstrip('_')}"] = value
    return found


def _settings(options: Options) -> dict[str, Any]:
    """Return settings of the run, and what the data reports about itself."""
    data: Any = options.data
    parameters = dict(options.model.named_parameters())
    settings: dict[str, Any] = {
        "steps": options.steps,
        "precision": options.precision,
        "clip_norm": options.clip_norm,
        "clip_value": options.clip_value,
        "frozen parameters": [name for name, p in parameters.items() if not p.requires_grad],
        "types of the parameters": sorted({str(p.dtype) for p in parameters.values()}),
        "data": type(data).__name__,
    }
    if isinstance(batch_size := getattr(data, "batch_size", None), int):
        settings["batch_size"] = batch_size
    elif isinstance(data, Sized):  # a list of batches, or a loader with a batch sampler
        with suppress(TypeError):
            settings["batches"] = len(data)
    if isinstance(dataset := getattr(data, "dataset", None), Sized):
        with suppress(TypeError):  # torch's Sized datasets may have no length
            settings["samples"] = len(dataset)
    settings |= {
        name: each for name in _OF_LOADER if (each := getattr(data, name, None)) is not None
    }
    if (sampler := getattr(data, "sampler", None)) is not None:
        settings["sampler"] = type(sampler).__name__
    return settings


def _seeds(data: object) -> dict[str, object]:
    if isinstance(data, Batches):
        return {"the seed of the data": data.state_dict()["seed"]}
    seeds = [generator.initial_seed() for generator in generators_of(data)]
    return {"the seeds of the data": seeds} if seeds else {}
