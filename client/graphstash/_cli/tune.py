"""`graphstash tune`: search, show and export the team's kernel schedules."""

import json
import logging
import os
import stat
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from graphstash import _rules
from graphstash._cli.artifacts import DeviceTypeOption
from graphstash._cli.output import (
    Json,
    NamespaceOption,
    Url,
    count_progress,
    err,
    fail,
    format_bytes,
    format_seconds,
    load_config,
    plural,
    print_json,
    print_table,
    say,
    shown,
)
from graphstash._replacing import replacing
from graphstash._user_code import load
from graphstash.errors import ConfigError, VerificationError
from graphstash_schema import ArtifactKey, ArtifactKind, DeviceType
from graphstash_schema.exit_status import ExitStatus
from graphstash_schema.listing import MAX_LISTED_ARTIFACTS, ArtifactQuery, ListOrder

if TYPE_CHECKING:
    from graphstash._artifacts.stash import Stash
    from graphstash.tuning.measuring import Budget, MakeExecutor, Method
    from graphstash.tuning.tuner import Progress

__all__ = ["tune"]

_SHOWN_VALUES: Final = 120

_KNOWN: Final = "the team has it: nothing was measured"

_SEARCHERS: Final = "One of g-bfs, n-a2c, xgboost, rnn, random, exhaustive."
"""Repeated here, because printing the help must not import `graphstash.tuning`."""

tune = typer.Typer(
    help="Find, show and export the team's schedules of kernels.",
    no_args_is_help=True,
)

TaskName = Annotated[
    str,
    typer.Argument(
        metavar="TASK", help="`script.py:name` or `module:name` of a `graphstash.tuning.Task`."
    ),
]
ProblemText = Annotated[
    str,
    typer.Argument(
        metavar="PROBLEM",
        help="Only problems whose name has this text, e.g. `matmul` or `512x512x512`.",
    ),
]


@tune.command()
def search(
    task: TaskName,
    *,
    trials: Annotated[
        int, typer.Option(min=1, help="Maximum number of configurations to measure.")
    ] = 500,
    seconds: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds after which no measurement starts.")
    ] = None,
    searcher: Annotated[str, typer.Option(help=_SEARCHERS)] = "g-bfs",
    seed: Annotated[int, typer.Option(help="Random seed of the searcher.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Number of parallel builds.")] = 1,
    timeout: Annotated[
        float,
        typer.Option(
            min=0.001,
            metavar="SECONDS",
            help="Seconds for a build, and for each check or sample. A trial that takes longer "
            "fails.",
        ),
    ] = 10.0,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of this host that a measuring process may allocate, e.g. `8GiB`. A trial "
            "that needs more fails. No limit by default.",
        ),
    ] = None,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="Measure on the machines of the Ray cluster of `RAY_ADDRESS`; they have to be "
            "alike.",
        ),
    ] = False,
    ray_gpus: Annotated[
        int, typer.Option(min=0, help="GPUs of each worker on Ray; implies --ray.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Find the schedule of a kernel, unless the team already has it.

    Trials run in separate processes, which may crash. Each measurement is published, so that an
    interrupted search keeps its results. Example:

        graphstash tune search gemm.py:task --trials 500
    """
    from graphstash.tuning.measuring import Budget, MeasuringError, Method, Pool
    from graphstash.tuning.task import Task
    from graphstash.tuning.task import tune as run

    log, failures = logging.getLogger("graphstash.trials"), _Failures()
    log.addHandler(failures)
    log.setLevel(logging.INFO)
    progress: Progress | None = None
    try:
        asked = load(task, what="task")
        if not isinstance(asked, Task):
            fail(f"{task!r} is no graphstash.tuning.Task", status=ExitStatus.USAGE)
        budget = Budget(measurements=trials, seconds=seconds)
        method = Method(timeout_seconds=timeout, memory_bytes=_bytes(memory))
        executor = _on_ray(task, gpus=ray_gpus) if ray or ray_gpus else Pool
        with count_progress() as bars:
            bar = bars.add_task(f"looking for {asked.problem.label}", total=trials)

            def observe(latest: "Progress") -> None:
                nonlocal progress
                progress, line = latest, _running(latest, seconds)
                bars.update(bar, completed=latest.measurements, description=line, refresh=True)

            found = run(
                asked,
                budget=budget,
                searcher=searcher,
                seed=seed,
                workers=workers,
                executor=executor,
                method=method,
                observe=observe,
            )
    except (ConfigError, ValueError) as error:
        fail(str(error), status=ExitStatus.USAGE)
    except ModuleNotFoundError as error:
        extra = ": graphstash[tuning] brings it" if error.name in {"numpy", "xgboost"} else ""
        fail(f"{error.name} is not installed here{extra}", status=ExitStatus.USAGE)
    except MeasuringError as error:
        fail(str(error))
    searched = "" if progress is None else _ended(progress, budget, method)
    if found is None:
        last = f"; the last: {shown(failures.last, most=600)}" if failures.last else ""
        fail(f"no configuration of {asked.problem.label} works: {searched}{last}")
    best = found.best[0]
    named = asked.space.named(best.configuration)
    values = " ".join(f"{name}={value}" for name, value in named.items())
    if as_json:
        key = None if found.key is None else str(found.key)
        best_found = {"configuration": named, "cost": best.cost, "spread": best.spread}
        ran = {
            "searched": found.was_searched,
            "key": key,
            "search": progress and progress._asdict(),
        }
        print_json({**best_found, "count": best.count, **ran})
        return
    say(f"found by a search here: {searched}" if searched else _KNOWN)
    say(f"{_format_cost(best.cost)}  {values}")


def _bytes(text: str | None) -> int | None:
    """Return the bytes that `--memory` names. End the command if the text is malformed."""
    if text is None:
        return None
    try:
        return int(_rules.size(above=0).read(text))
    except ValueError as error:
        fail(f"--memory={text!r}: {error}", status=ExitStatus.USAGE)


def _running(progress: "Progress", seconds: float | None) -> str:
    """Return a line about a running search: `best 1.2 ms, 3 failed`."""
    if progress.ended is not None:
        return "comparing the best few"
    best = "none works yet"
    if progress.best_cost is not None:
        best = f"best {_format_cost(progress.best_cost)}"
    line = f"{best}, {sum(progress.failures.values())} failed"
    if seconds is None:
        return line
    return f"{line}, at most {format_seconds(max(0.0, seconds - progress.seconds))} left"


def _ended(progress: "Progress", budget: "Budget", method: "Method") -> str:
    """Return what a search did, which limit ended it, and which limits its trials exceeded."""
    limits = {
        "timeout": f" (--timeout {method.timeout_seconds:g})",
        "memory": f" (--memory {format_bytes(method.memory_bytes)})" if method.memory_bytes else "",
    }
    failures = [
        f"{count} failed: {failure}{limits.get(failure, '')}"
        for failure, count in sorted(progress.failures.items())
    ]
    reasons = {
        "measurements": f"ended by --trials {budget.measurements}",
        "seconds": f"ended by --seconds {budget.seconds or 0:g}",
        "exhausted": "every configuration was tried",
    }
    trials = f"{plural(progress.measurements, 'trial')} in {format_seconds(progress.seconds)}"
    return "; ".join([trials, *failures, reasons[progress.ended or "exhausted"]])


class _Failures(logging.Handler):
    """Keeps the error of the last failed trial, unless a Ray worker measured it."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


def _on_ray(task: str, *, gpus: int) -> "MakeExecutor":
    """Return a factory of Ray pools that sends the script to machines that may lack it."""
    from graphstash.tuning.measuring.ray_pool import RayPool

    script = Path(task.rpartition(":")[0])
    modules = [script.stem] if script.suffix == ".py" else []
    return partial(RayPool, options={"num_gpus": gpus}, modules=modules)


def _none_found(problem: str, device_type: str | None) -> str:
    if problem or device_type:
        return "no such problem was tuned: `graphstash tune show` lists all"
    return "no problem is tuned in this namespace: `graphstash tune search` tunes one"


@tune.command()
def show(
    problem: ProblemText = "",
    *,
    device_type: DeviceTypeOption = None,
    url: Url = None,
    namespace: NamespaceOption = None,
    as_json: Json = False,
) -> None:
    """List the tuned problems, with the best configuration of each.

    A cost is the median of the measurements of the host that provided the answer. The spread is
    their interquartile range.
    """
    found = _schedules(problem, device_type, url=url, namespace=namespace)
    if as_json:
        print_json(found)
        return
    if not found:
        say(_none_found(problem, device_type))
        return
    headings = ("problem", ">cost", ">spread", ">count", ">measured", ">hosts", "configuration")
    below = [f"  on {each['device_type']}, {each['compiler']}" for each in found]
    print_table(headings, map(_cells, found), flexible=6, below=below)


@tune.command()
def export(
    file: Annotated[Path, typer.Argument(help="File to write, JSON.")],
    problem: ProblemText = "",
    *,
    device_type: DeviceTypeOption = None,
    url: Url = None,
    namespace: NamespaceOption = None,
) -> None:
    """Write the best configurations to a file, for programs that run without a server.

    The file holds the output of `tune show --json`. To take the artifacts themselves to hosts
    without a network to the server, use `graphstash export --kind schedule`.
    """
    found = _schedules(problem, device_type, url=url, namespace=namespace)
    if not found:
        fail(_none_found(problem, device_type))
    try:
        _write(file, json.dumps(found, indent=2) + "\n")
    except OSError as error:
        fail(f"{file} cannot be written: {error}; choose another file")
    say(f"{plural(len(found), 'schedule')} written to {file}")


def _write(file: Path, text: str) -> None:
    """Replace a regular file atomically, or write to a pipe, a device or another special file."""
    file = file.resolve()  # replace the target of a link, not the link
    try:
        mode = file.stat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG | (0o666 & ~_umask())
    if not stat.S_ISREG(mode):
        file.write_text(text, encoding="utf-8")
        return
    with replacing(file, mode=stat.S_IMODE(mode)) as written:
        written.write(text)


def _umask() -> int:
    umask = os.umask(0o077)  # POSIX reads the umask only by setting it
    os.umask(umask)
    return umask


def _schedules(
    problem: str, device_type: str | None, *, url: str | None, namespace: str | None
) -> list[dict[str, Any]]:
    """Return the verified schedules, newest first. End the command if the server fails."""
    from graphstash._artifacts.stash import Stash
    from graphstash.tuning.memory.problem import HELION_LABEL, parse_label

    config = load_config(url=url, namespace=namespace)
    query = ArtifactQuery(
        kind=ArtifactKind.SCHEDULE,
        device_type=None if device_type is None else DeviceType(device_type),
        label="tuned ",
        order=ListOrder.NEWEST,
        limit=MAX_LISTED_ARTIFACTS,
    )
    found = []
    with Stash(config) as stash, count_progress() as progress:
        listed = [
            (each.key, named)
            for each in stash.server.every_artifact(query)
            if each.key.kind is ArtifactKind.SCHEDULE
            and (named := parse_label(each.label)) is not None
            and problem.lower() in each.label.lower()
        ]
        for key, named in progress.track(listed, description="schedules"):
            if (schedule := _read(stash, key)) is not None:
                found.append({**named, "device_type": key.device_type, **schedule})
        of_helion = query.model_copy(update={"label": HELION_LABEL, "limit": 1})
        has_more = stash.server.list_artifacts(of_helion).artifacts
    if has_more:
        err.print(
            f"Helion's own entries are not among these: `graphstash ls '{HELION_LABEL}' --kind "
            "schedule` lists them",
            markup=False,
            soft_wrap=True,
        )
    return found


def _read(stash: "Stash", key: ArtifactKey) -> dict[str, Any] | None:
    """Return a schedule's content, or None if it was evicted or is unusable. Print why."""
    from graphstash._artifacts.stash import Memory
    from graphstash.tuning.memory.findings import MAX_RECORD_BYTES, read_answer

    payload = Memory(MAX_RECORD_BYTES)
    try:
        if stash.fetch(key, payload) is None:
            return None  # evicted since the listing; not an error
        answer = read_answer(payload.getvalue())
    except (VerificationError, ValueError) as error:
        err.print(f"rejected: {key}: {shown(str(error))}", markup=False, soft_wrap=True)
        return None
    return {
        "compiler": answer.compiler,
        **answer.best,
        "measured": answer.measured,
        "hosts": list(answer.hosts),
        "key": str(key),
    }


def _cells(each: dict[str, Any]) -> tuple[str, ...]:
    sizes = "x".join(map(str, each["shape"]))
    values = " ".join(f"{name}={value}" for name, value in each["configuration"].items())
    return (
        shown(f"{each['kernel']} {each['dtype']} {each['layout']} {sizes}"),
        _format_cost(each["cost"]),
        _format_cost(each["spread"]),
        f"{each['count']}",
        f"{each['measured']}",
        f"{len(each['hosts'])}",
        shown(values, most=_SHOWN_VALUES),
    )


def _format_cost(seconds: float | None) -> str:
    """Format seconds as `1.23 s`, `45.6 ms` or `7.89 µs`, and None as a dash."""
    if seconds is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
