"""Inductor's matrix products, which max-autotune then measures once per team.

    from graphstash.tuning.targets import inductor

    inductor.install()
    compiled = torch.compile(model, mode="max-autotune")

`install` changes two parts of torch 2.15. It changes nothing in a torch without them.

    AlgorithmSelectorCache.do_autotuning   compiles and measures the candidates for a product. The
                                           wrapper first looks up the team's best candidate.
    LookupTableChoices                     limits the candidates that torch generates. The team's
                                           best candidates fill this table.

A candidate of the team is used only if torch also generates it on this host. So a peer can make a
product slower, but never wrong. With `select_algorithm.VERIFY`, torch checks the results of all
candidates that it measures. Nothing is shared then, because torch would not check a shared one.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from inspect import signature
from typing import Any, Final

import torch
from torch._inductor import config, select_algorithm

from graphstash.hooks.patching import Patches
from graphstash.tuning.memory.findings import Finding
from graphstash.tuning.memory.journal import in_turns
from graphstash.tuning.memory.process import record_failure, team_memory
from graphstash.tuning.memory.team import Schedule, Search, TeamMemory
from graphstash.tuning.space import MAX_COST, Configuration
from graphstash.tuning.targets.inductor_candidates import CandidateSpace, identity_of, problem_of

__all__ = ["TeamGemms", "install"]

_log = logging.getLogger("graphstash")

_PRODUCTS: Final = frozenset(
    {
        *("mm", "addmm", "bmm", "baddbmm", "mm_plus_mm", "int_mm", "scaled_mm"),
        *("packed_linear", "linear_unary", "linear_binary"),  # on CPUs
    }
)
"""torch's names of the shared products. torch tunes convolutions and attention alone."""

_PARAMS: Final = ["self", "name", "input_nodes", "layout", "input_gen_fns", "inputs_key", "choices"]
"""First parameters of `do_autotuning` in the supported versions."""

_MILLISECONDS: Final = 1e-3


def install() -> "TeamGemms | None":
    """Share max-autotune's measurements of matrix products with the team from now on.

    torch measures alone if the cache is absent or fails. A second call returns the same handle.

    Returns:
        A handle whose `close` undoes this. None, after a warning, if torch lacks a needed part or
            does not accept the lookup table.
    """
    if _installed:
        return _installed[0]
    try:
        problem = f"has no {missing}" if (missing := _missing_part()) else ""
        if not problem:
            _installed.append(TeamGemms())
    except Exception as error:  # noqa: BLE001 - torch may raise anything: continue
        problem = f"does not take it ({error})"
    if problem:
        _log.warning(
            "graphstash: torch %s %s; what its max-autotune measures is not shared",
            torch.__version__,
            problem,
        )
        return None
    return _installed[0]


class TeamGemms:
    """The changes that `install` made to torch. `close` undoes them."""

    def __init__(self) -> None:
        from graphstash.tuning.targets.inductor_table import register

        self._unregister = register()  # first, because it may raise
        self._patches = Patches()
        self._patches.wrap(
            select_algorithm.AlgorithmSelectorCache, "do_autotuning", _wrap_do_autotuning
        )

    def close(self) -> None:
        """Undo the changes; a second call has no effect."""
        if self not in _installed:
            return
        _installed.remove(self)
        self._patches.undo()
        self._unregister()


_installed: Final[list[TeamGemms]] = []


def _wrap_do_autotuning(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `AlgorithmSelectorCache.do_autotuning`, which returns milliseconds by candidate."""

    def do_autotuning(selector: Any, *args: Any, **options: Any) -> Any:
        *product, choices = args[: len(_PARAMS) - 1]
        rest = args[len(_PARAMS) - 1 :]
        raised: list[Exception] = []

        def call_torch(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            try:
                return function(selector, *args, **options)
            except Exception as error:
                raised.append(error)
                raise

        def tune(choices: list[Any]) -> Any:
            return call_torch(original, *product, choices, *rest, **options)

        def measure(choice: Any) -> float:
            _, nodes, layout, input_gen_fns, _ = product
            found = call_torch(type(selector).benchmark, [choice], nodes, layout, input_gen_fns)
            return float(found[choice])

        if _is_shared(product, options):
            name, nodes, *_ = product
            try:
                if (found := _choose_with_team(name, nodes, choices, tune, measure)) is not None:
                    return found
            except Exception as error:
                if error in raised:
                    raise
                # A failure of the cache must not end training.
                record_failure(f"{name} is tuned without the team", error)
        return tune(choices)

    return do_autotuning


def _is_shared(product: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return whether a shared candidate can replace this call."""
    return (
        len(product) == len(_PARAMS) - 2
        and product[0] in _PRODUCTS
        and not select_algorithm.VERIFY
        and not getattr(config, "pipeline_max_autotune_gemm", False)  # then torch returns nothing
        and not any(options.values())  # e.g. size hints or a collective
    )


def _choose_with_team(
    name: str,
    nodes: Sequence[Any],
    choices: Sequence[Any],
    tune_by_torch: Callable[[list[Any]], Mapping[Any, float]],
    measure_by_torch: Callable[[Any], float],
) -> dict[Any, float] | None:
    """Return the candidate to use, with its milliseconds. None lets torch tune alone."""
    memory = team_memory()
    space = CandidateSpace((identity_of(choice), choice) for choice in choices)
    if memory is None or not 1 < space.size == len(choices):
        return None
    problem = problem_of(name, nodes)

    def tune(search: Search) -> None:
        unknown = {space.thing(each): each for each in space if each not in search.known}
        try:
            costs = tune_by_torch([*unknown]) if unknown else {}
        except select_algorithm.NoValidChoicesError:
            costs = {}
        for choice, configuration in unknown.items():
            search.publish(_make_finding(configuration, costs.get(choice, 0.0)))

    def measure(configuration: Configuration) -> Finding:
        return _make_finding(configuration, measure_by_torch(space.thing(configuration)))

    while (
        schedule := memory.schedule(problem, space, tune, measure=in_turns(measure))
    ) is not None:
        choice = space.thing(schedule.configuration)
        if schedule.was_searched or _compile_or_reject(choice, memory, schedule):
            return {choice: (schedule.best[0].cost or 0.0) / _MILLISECONDS}
    return None


def _make_finding(configuration: Configuration, milliseconds: float) -> Finding:
    cost = milliseconds * _MILLISECONDS
    if not 0 < cost <= MAX_COST:  # torch reports infinity for a failure
        return Finding(configuration, None, failure="run")
    return Finding(configuration, cost, count=1)


def _compile_or_reject(choice: Any, memory: TeamMemory, schedule: Schedule) -> bool:
    """Return whether the team's candidate compiles here. torch could not replace it later."""
    try:
        choice.precompile()
    except Exception as error:  # noqa: BLE001 - a compiler may raise anything
        memory.reject(schedule, f"{choice.name} does not compile: {error}")
        return False
    return True


def _missing_part() -> str:
    """Return the first needed part that this torch lacks, or an empty string."""
    from torch._inductor import choices

    selector = select_algorithm.AlgorithmSelectorCache
    tuning: Any = getattr(selector, "do_autotuning", None)
    if tuning is None or [*signature(tuning).parameters][: len(_PARAMS)] != _PARAMS:
        return "AlgorithmSelectorCache.do_autotuning of the form that is known"
    if not hasattr(selector, "benchmark"):
        return "AlgorithmSelectorCache.benchmark"
    if find_spec("torch._inductor.lookup_table") is None:
        return "torch._inductor.lookup_table"
    names = [f"{each}_inductor_choices" for each in ("create", "register", "unregister")]
    names.append("registered_inductor_choices")
    return next((name for name in names if not hasattr(choices, name)), "")
