"""Tune Triton kernels once for the team: a decorator in place of `triton.autotune`.

    @autotune(configs=[triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 1024})], key=["n"])
    @triton.jit
    def kernel(x, n, BLOCK: tl.constexpr): ...

Arguments, calls, hooks and measurements are the same as with `triton.autotune`, but the team shares
the results. The first job that calls a kernel with a new key measures the configurations. Other
jobs use its best one. Without the cache, this is `triton.autotune`.

As in `triton.autotune`, no reference checks what the kernel computes. The team can only choose
among the caller's own configurations, which `triton.autotune` could have chosen.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import time
from typing import Any, Final

import triton
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources, PTXASError

from graphstash.tuning.memory.findings import Finding
from graphstash.tuning.memory.journal import in_turns
from graphstash.tuning.memory.problem import Problem, word
from graphstash.tuning.memory.process import record_failure, team_memory
from graphstash.tuning.memory.team import Schedule, Search, TeamMemory
from graphstash.tuning.space import MAX_COST, Configuration
from graphstash.tuning.spaces.listed import ListedSpace
from graphstash_schema import DeviceType

__all__ = ["TeamAutotuner", "autotune"]

_FAILURES: Final = (OutOfResources, CompileTimeAssertionFailure, PTXASError)
"""Errors after which `triton.autotune` rejects a configuration."""

_MILLISECONDS: Final = 1e-3

_DIVISOR: Final = 16
"""Triton compiles a kernel of its own for addresses and integers that are multiples of this."""


def autotune(
    configs: Sequence[Any],
    key: Sequence[str],
    prune_configs_by: Mapping[str, Any] | None = None,
    reset_to_zero: Sequence[str] | None = None,
    restore_value: Sequence[str] | None = None,
    **options: Any,
) -> "Callable[[Any], TeamAutotuner]":
    """Decorate a kernel like `triton.autotune`, and tune it once for the team.

    Args:
        configs: `triton.Config`s to choose from.
        key: names of the arguments whose values determine the best configuration.
        prune_configs_by: as for `triton.autotune`.
        reset_to_zero: arguments that are zeroed before each measurement.
        restore_value: arguments that are restored after each measurement.
        options: other options of `triton.autotune`: `pre_hook`, `post_hook`, `do_bench`, ...
    """

    def decorate(kernel: Any) -> TeamAutotuner:
        return TeamAutotuner(
            *(kernel, kernel.arg_names, configs, key, reset_to_zero, restore_value),
            prune_configs_by=prune_configs_by,
            **options,
        )

    return decorate


class _TeamError(Exception):
    """The team's memory failed, not the kernel."""


class TeamAutotuner(Autotuner):  # type: ignore[misc] # Triton ships no types
    """Chooses a configuration that the team has measured; created by `autotune`.

    Attributes:
        cache: chosen configurations, by the values of `key` and the types of the arguments.
    """

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the kernel with the best configuration for these arguments."""
        if len(self.configs) < 2:
            return super().run(*args, **kwargs)
        self.nargs: Any = dict(zip(self.arg_names, args, strict=False))
        key = self._key_of(kwargs)
        config = self.cache.get(key)
        if config is not None:
            return self._run(config, args, kwargs)
        memory = team_memory()
        if memory is None:
            return super().run(*args, **kwargs)
        return self._choose(memory, key, args, kwargs)

    def _choose(
        self, memory: TeamMemory, key: tuple[Any, ...], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        pruned = self.prune_configs(kwargs)
        try:
            listed = [(config.all_kwargs(), config) for config in pruned]
            space = ListedSpace("triton configs", listed)
            problem = self._make_problem(kwargs)
        except Exception as error:  # noqa: BLE001 - e.g. more sizes than a problem may have
            record_failure(f"{self.base_fn.__name__} is tuned without the team", error)
            return super().run(*args, **kwargs)
        while space.size > 1:
            try:
                schedule = self._search(memory, problem, space, args, kwargs)
            except _TeamError:  # the cache must not end the training
                return super().run(*args, **kwargs)
            if schedule is None:  # none works: run one, which raises its error as in Triton
                break
            config = space.thing(schedule.configuration)
            try:
                result = self._run(config, args, kwargs)
            except _FAILURES as error:
                if schedule.was_searched:
                    raise
                memory.reject(schedule, f"{problem.label}: {config}: {error}")
                self.nargs = dict(zip(self.arg_names, args, strict=False))
                continue
            self.cache[key] = config
            return result
        self.cache[key] = pruned[0]  # so that this process does not search again
        return self._run(pruned[0], args, kwargs)

    def _search(
        self,
        memory: TeamMemory,
        problem: Problem,
        space: ListedSpace,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Schedule | None:
        kernel_errors: list[Exception] = []

        def measure(configuration: Configuration) -> Finding:
            config = space.thing(configuration)
            try:
                median, spread = _median_and_spread(self._bench(*args, config=config, **kwargs))
            except Exception as error:
                kernel_errors.append(error)
                raise
            if not 0 < median * _MILLISECONDS <= MAX_COST:
                return Finding(configuration, None, failure="compile")
            return Finding(configuration, median * _MILLISECONDS, spread * _MILLISECONDS, count=1)

        def tune(search: Search) -> None:
            started = time()
            for configuration in space:
                if configuration not in search.known:
                    search.publish(measure(configuration))
            self.bench_time = time() - started

        try:
            schedule = memory.schedule(problem, space, tune, measure=in_turns(measure))
        except Exception as error:
            if error in kernel_errors:
                raise
            record_failure(f"{problem.label} is tuned without the team", error)
            raise _TeamError from error
        if schedule is not None and schedule.was_searched:
            config = space.thing(schedule.configuration)
            self.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()}, reset_only=True)
        return schedule

    def _run(self, config: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self.best_config = config
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
        result = self.fn.run(*args, **kwargs, **config.all_kwargs())
        self.nargs = None
        return result

    def _arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        given = {**self.nargs, **kwargs}
        return {name: value for name, value in given.items() if name in self.arg_names}

    def _key_of(self, kwargs: dict[str, Any]) -> tuple[Any, ...]:
        given = self._arguments(kwargs)
        return (*(given[name] for name in self.keys if name in given), *_dtypes(given))

    def _make_problem(self, kwargs: dict[str, Any]) -> Problem:
        given = self._arguments(kwargs)
        keys = {name: given[name] for name in self.keys if name in given}
        sizes = {name: value for name, value in keys.items() if _is_size(value)}
        others = [f"{name}={value}" for name, value in keys.items() if name not in sizes]
        function = self.fn
        while not hasattr(function, "cache_key"):  # other decorators in between
            function = function.fn
        return Problem(
            kernel=word(self.base_fn.__name__),
            shape=tuple(sizes.values()),
            dtype=word(",".join(each.rpartition(".")[2] for each in _dtypes(given))),
            device_type=_device_type(),
            compiler=f"triton {triton.__version__}",
            layout=word(",".join((*sizes, *others))),
            parts={
                "source": str(function.cache_key),
                "arguments": json.dumps({name: _shape_of(each) for name, each in given.items()}),
            },
        )


def _median_and_spread(measured: Any) -> tuple[float, float]:
    """Return the median and the spread in milliseconds.

    `do_bench` returns the quantiles 0.5, 0.2 and 0.8, which span almost the interquartile range. If
    it ignores the quantiles, it returns one number, and the spread is 0.
    """
    times = [*measured] if isinstance(measured, Iterable) else [measured]
    if len(times) < 3:
        return float(times[0]), 0.0
    return float(times[0]), max(0.0, float(times[2]) - float(times[1]))


def _device_type() -> DeviceType:
    """Return the device type: architecture and name, which both decide what is fastest."""
    target = driver.active.get_current_target()
    arch = f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return DeviceType.of(target.backend, arch, torch.cuda.get_device_name())
    return DeviceType.of(target.backend, arch)


def _dtypes(arguments: Mapping[str, Any]) -> list[str]:
    return [str(value.dtype) for value in arguments.values() if hasattr(value, "dtype")]


def _shape_of(value: Any) -> str:
    """Describe an argument by what Triton specializes on, and by the order of its strides.

    Exact strides would distinguish calls by sizes that `key` leaves out.
    """
    if hasattr(value, "data_ptr"):
        parts = [f"address {_describe_divisibility(value.data_ptr())}"]
        if hasattr(value, "stride"):
            strides = tuple(value.stride())
            order = sorted(range(len(strides)), key=lambda each: strides[each])
            parts.append(f"order {order}, strides {[*map(_describe_divisibility, strides)]}")
        return ", ".join(parts)
    return _describe_divisibility(value) if type(value) is int else type(value).__name__


def _describe_divisibility(number: int) -> str:
    if number in {0, 1}:
        return str(number)
    return "16" if number % _DIVISOR == 0 else "other"


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
