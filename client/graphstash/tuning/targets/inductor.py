"""Inductor's matrix products: what max-autotune measures is measured once for the team.

    from graphstash.tuning.targets import inductor

    inductor.install()
    compiled = torch.compile(model, mode="max-autotune")

Two places of torch are used, as they are in 2.15; in a torch without them nothing is changed.

    AlgorithmSelectorCache.do_autotuning   compiles and measures the candidates for one product.
                                           Here the team's answer is asked for first.
    LookupTableChoices                     torch's lookup table: which candidates are generated at
                                           all. Here it holds what the team found best.

An answer is one of the candidates that torch makes on this host, or it is not used: what a peer
says can make a product slower, never wrong. The results of candidates are checked by torch alone,
with `select_algorithm.VERIFY`; nothing is shared while that is set, because an answer would leave
out the check.
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
from graphstash.tuning.memory.process import record_failure, team_memory
from graphstash.tuning.memory.team import Schedule, Search, TeamMemory
from graphstash.tuning.space import MAX_COST, Configuration
from graphstash.tuning.targets.inductor_candidates import CandidateSpace, problem_of, told_of

__all__ = ["TeamGemms", "install"]

_log = logging.getLogger("graphstash")

_PRODUCTS: Final = frozenset(
    {
        *("mm", "addmm", "bmm", "baddbmm", "mm_plus_mm", "int_mm", "scaled_mm"),
        *("packed_linear", "linear_unary", "linear_binary"),  # on CPUs
    }
)
"""As torch calls them where it chooses; convolutions and attention are tuned as ever."""

_SHOWN: Final = ["self", "name", "input_nodes", "layout", "input_gen_fns", "inputs_key", "choices"]
"""What `do_autotuning` took when this was written."""

_MILLISECONDS: Final = 1e-3


def install() -> "TeamGemms | None":
    """Lets the team share what max-autotune measures of matrix products, from now on.

    Without the cache, and where the cache fails, torch measures for itself. A second call changes
    nothing.

    Returns:
        What takes it out again. None in a torch that has not what this needs or does not take it;
        a warning says why.
    """
    if _installed:
        return _installed[0]
    try:
        problem = f"has no {missing}" if (missing := _missing()) else ""
        if not problem:
            _installed.append(TeamGemms())
    except Exception as error:  # noqa: BLE001 - of torch: training goes on
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
    """What was put into torch by `install`, and the way back."""

    def __init__(self) -> None:
        from graphstash.tuning.targets.inductor_table import register

        self._unregister = register()  # first: torch may refuse
        self._patches = Patches()
        self._patches.wrap(select_algorithm.AlgorithmSelectorCache, "do_autotuning", _sharing)

    def close(self) -> None:
        """Takes it out of torch; a second call changes nothing."""
        if self not in _installed:
            return
        _installed.remove(self)
        self._patches.undo()
        self._unregister()


_installed: Final[list[TeamGemms]] = []


def _sharing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Takes the place of `AlgorithmSelectorCache.do_autotuning`, which returns milliseconds by
    candidate.
    """

    def do_autotuning(selector: Any, *args: Any, **options: Any) -> Any:
        *about, choices = args[: len(_SHOWN) - 1]
        rest = args[len(_SHOWN) - 1 :]
        raised: list[Exception] = []

        def of_torch(function: Callable[..., Any], *given: Any, **options: Any) -> Any:
            try:
                return function(selector, *given, **options)
            except Exception as error:
                raised.append(error)
                raise

        def tuned(some: list[Any]) -> Any:
            return of_torch(original, *about, some, *rest, **options)

        def measured(choice: Any) -> float:
            _, nodes, layout, input_gen_fns, _ = about
            found = of_torch(type(selector).benchmark, [choice], nodes, layout, input_gen_fns)
            return float(found[choice])

        if _is_shared(about, options):
            name, nodes, *_ = about
            try:
                if (found := _answer(name, nodes, choices, tuned, measured)) is not None:
                    return found
            except Exception as error:
                if error in raised:
                    raise
                # The cache's outermost frame: training goes on.
                record_failure(f"{name} is tuned without the team", error)
        return tuned(choices)

    return do_autotuning


def _is_shared(about: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether it is one of the products, and nothing is asked for that an answer cannot say."""
    return (
        len(about) == len(_SHOWN) - 2
        and about[0] in _PRODUCTS
        and not select_algorithm.VERIFY
        and not getattr(config, "pipeline_max_autotune_gemm", False)  # it returns nothing then
        and not any(options.values())  # another hint for sizes, a collective, a remote answer
    )


def _answer(
    name: str,
    nodes: Sequence[Any],
    choices: Sequence[Any],
    tuned: Callable[[list[Any]], Mapping[Any, float]],
    measured: Callable[[Any], float],
) -> dict[Any, float] | None:
    """The candidate to take, with what it costs; None where torch has to tune for itself."""
    memory = team_memory()
    space = CandidateSpace((told_of(choice), choice) for choice in choices)
    if memory is None or not 1 < space.size == len(choices):
        return None
    problem = problem_of(name, nodes)

    def tune(search: Search) -> None:
        of = {space.thing(each): each for each in space if each not in search.known}
        try:
            costs = tuned([*of]) if of else {}
        except select_algorithm.NoValidChoicesError:
            costs = {}
        for choice, configuration in of.items():
            search.publish(_finding(configuration, costs.get(choice, 0.0)))

    def measure(configuration: Configuration) -> Finding:
        return _finding(configuration, measured(space.thing(configuration)))

    while (schedule := memory.schedule(problem, space, tune, measure=measure)) is not None:
        choice = space.thing(schedule.configuration)
        if schedule.was_searched or _compiles(choice, memory, schedule):
            return {choice: (schedule.best[0].cost or 0.0) / _MILLISECONDS}
    return None


def _finding(configuration: Configuration, milliseconds: float) -> Finding:
    cost = milliseconds * _MILLISECONDS
    if not 0 < cost <= MAX_COST:  # torch writes infinity for what fails
        return Finding(configuration, None, failure="run")
    return Finding(configuration, cost, count=1)


def _compiles(choice: Any, memory: TeamMemory, schedule: Schedule) -> bool:
    """Whether what the team found best can be built here: torch builds it without a way back."""
    try:
        choice.precompile()
    except Exception as error:  # noqa: BLE001 - of a compiler: the rest is searched
        memory.reject(schedule, f"{choice.name} does not compile: {error}")
        return False
    return True


def _missing() -> str:
    """The first thing that this needs and this torch does not have; empty when all are there."""
    from torch._inductor import choices

    selector = select_algorithm.AlgorithmSelectorCache
    tuning: Any = getattr(selector, "do_autotuning", None)
    if tuning is None or [*signature(tuning).parameters][: len(_SHOWN)] != _SHOWN:
        return "AlgorithmSelectorCache.do_autotuning of the form that is known"
    if not hasattr(selector, "benchmark"):
        return "AlgorithmSelectorCache.benchmark"
    if find_spec("torch._inductor.lookup_table") is None:
        return "torch._inductor.lookup_table"
    names = [f"{each}_inductor_choices" for each in ("create", "register", "unregister")]
    names.append("registered_inductor_choices")
    return next((name for name in names if not hasattr(choices, name)), "")
