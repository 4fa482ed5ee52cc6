"""Doctor: which compilers are installed, and whether their hooks support the versions.

This process imports no compiler. With `--probe`, a Python under `graphstash run` imports them.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from graphstash._cli.doctor.findings import Finding, Topic, fail, ok, skipped, warn
from graphstash._process.notices import autoload_notice
from graphstash.config import ENVIRONMENT_PREFIX, ClientConfig
from graphstash.hooks import HookSpec
from graphstash.hooks.environment import version_of
from graphstash.hooks.installing import AUTOLOAD, AUTOLOAD_OFF
from graphstash.hooks.registry import hook_specs

__all__ = ["check_compilers", "probe_hooks"]

_IMPORT_SECONDS: Final = 120.0
"""Limit for the imports: torch_xla takes 20 s on a busy host, and a broken driver may hang."""

_HOW_TO_REPEAT: Final = (
    "reproduce it with: graphstash run -- python -c 'import <compiler>'; see the table of "
    "compilers in the README"
)


def check_compilers(config: ClientConfig, environ: Mapping[str, str]) -> Topic[None]:
    """Yield a finding for each hook, and one about how jobs start the cache."""
    installed = _installed_hooks()
    if not installed:
        yield warn(
            "compilers",
            f"no supported compiler is installed for {sys.executable}",
            "run the doctor with the Python of the job: <its python> -m graphstash doctor",
        )
        return
    for hook, spec in hook_specs().items():
        name = f"{hook} hook"
        if hook not in installed:
            distributions = " or ".join(spec.distributions)
            yield ok(name, f"not needed: {distributions} is not installed")
        elif not config.wants_hook(hook):
            yield ok(name, f"disabled by GRAPHSTASH_HOOKS ({installed[hook]} is installed)")
        else:
            yield _finding_of(spec, installed[hook], config)
    yield _start(environ)


def _installed_hooks() -> dict[str, str]:
    """Map each hook whose compiler is installed to the versions, such as `torch 2.7.0`."""
    found = {}
    for hook, spec in hook_specs().items():
        versions = ((each, version_of(each)) for each in spec.distributions)
        if text := ", ".join(f"{each} {version}" for each, version in versions if version):
            found[hook] = text
    return found


def _modules_to_import() -> list[str]:
    """Return the modules of installed compilers whose import installs the hooks."""
    return list(
        dict.fromkeys(
            module
            for spec in hook_specs().values()
            for module in spec.modules
            if _is_installed(spec, module.partition(".")[0])
        )
    )


def _is_installed(spec: HookSpec, package: str) -> bool:
    """Return whether the distribution of a package is installed, even if its files are damaged.

    If no distribution of the hook has the package's name, any of its distributions counts.
    """
    names = (package,) if package in spec.distributions else spec.distributions
    return any(map(version_of, names))


def _finding_of(spec: HookSpec, installed: str, config: ClientConfig) -> Finding:
    name, tried = f"{spec.name} hook", spec.tested
    try:
        verdict = spec.judge(config)
    except Exception as error:  # noqa: BLE001 - a third party's code, outermost frame
        return warn(name, f"its diagnosis failed: {error!r}", "tell the authors of the hook")
    if verdict is not None and verdict.remedy:
        return warn(name, *verdict)
    if verdict is not None or tried is None:
        return ok(name, installed if verdict is None else verdict.finding)
    version = version_of(tried.distribution)
    release = f"{tried.distribution} {version}"
    if tried.covers(version):
        return ok(name, f"{release} (supported: {tried})")
    if not tried.is_refused(version):
        return warn(
            name,
            f"{release} has not been tested (supported: {tried}); the hook runs if it finds the "
            "internals it needs",
            "check with `graphstash doctor --probe`",
        )
    return warn(
        name,
        f"{release} is not supported (supported: {tried}); what {tried.distribution} compiles is "
        "not shared",
        f"install {tried.distribution} {tried}"
        + (", or a newer graphstash" if tried.is_above(version) else ""),
    )


def _start(environ: Mapping[str, str]) -> Finding:
    value = environ.get(AUTOLOAD, "")
    by_hand = "`graphstash run -- <command>`, or call graphstash.install() in the script"
    if value in AUTOLOAD_OFF:
        return ok("start", f"start jobs with {by_hand}")
    if value != "1":
        found, _, advice = autoload_notice(value).partition(": ")
        return warn("start", found, advice)
    has_points = any(
        point.dist is not None and point.dist.name == "graphstash"
        for point in metadata.entry_points(group="jax_plugins")
    )
    if not has_points:
        return warn(
            "start",
            f"{AUTOLOAD}=1, but torch and JAX do not find graphstash among the installed packages",
            f"install graphstash into {sys.prefix} with pip, or start jobs with {by_hand}",
        )
    return ok("start", f"{AUTOLOAD}=1: torch (2.5 and newer) and JAX start the cache themselves")


def probe_hooks(
    environ: Mapping[str, str],
    options: Mapping[str, str | None],
    *,
    limit_seconds: float = _IMPORT_SECONDS,
) -> Topic[None]:
    """Import every installed compiler under `graphstash run`, and report the installed hooks.

    The options are those of `graphstash run`, by name without dashes; None omits an option.
    """
    modules = _modules_to_import()
    if not modules:
        yield skipped("import probe", "no compiler is installed")
        return
    with tempfile.TemporaryDirectory(prefix="graphstash-doctor-") as folder:
        report = Path(folder) / "report"
        ended = _import(environ, options, report, modules, limit_seconds)
        results = _read(report)
    for each in results.get("errors", ()):
        yield warn("import probe", str(each), "the job's import fails too; fix that first")
    if ended is not None:
        module = results.get("importing")
        when = f"while it imported {module}" if module else "before it imported anything"
        yield fail("import probe", f"{ended} {when}", _HOW_TO_REPEAT)
        return
    if not results.get("is_started"):
        yield fail(
            "import probe",
            "`graphstash run` did not reach a Python that imports "
            f"{', '.join(modules)}: something resets PYTHONPATH, or {ENVIRONMENT_PREFIX}ENABLED "
            "is off",
            "call graphstash.install() at the top of the script instead",
        )
        return
    for each in results.get("warnings", ()):
        yield warn("import probe", str(each).removeprefix("graphstash: "), _HOW_TO_REPEAT)
    present = results.get("hooks", {})
    aside = [name for name, is_there in present.items() if not is_there]
    yield ok(
        "import probe",
        f"installed: {', '.join(name for name in present if present[name]) or 'no hook'}"
        + (f"; not installed: {', '.join(aside)}" if aside else ""),
    )


def _import(
    environ: Mapping[str, str],
    options: Mapping[str, str | None],
    report: Path,
    modules: list[str],
    limit_seconds: float,
) -> str | None:
    """Import the modules in a new process. Return how Python failed, or None for success."""
    arguments = [f"--{name}={value}" for name, value in options.items() if value is not None]
    witness = [sys.executable, "-m", "graphstash._cli.doctor.witness", str(report), *modules]
    # Drop the job's name, which would start that job's prefetch.
    variables = {k: v for k, v in environ.items() if k != f"{ENVIRONMENT_PREFIX}JOB"}
    with subprocess.Popen(
        [sys.executable, "-m", "graphstash", "run", "--quiet", *arguments, "--", *witness],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that killing the group ends its children
    ) as python:
        try:
            status = python.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(python.pid, signal.SIGKILL)
            return f"Python did not finish within {limit_seconds:g} s"
        finally:
            if python.poll() is None:  # interrupted: do not leave it running
                with suppress(ProcessLookupError):
                    os.killpg(python.pid, signal.SIGKILL)
    if status < 0:
        return f"Python was killed by {signal.Signals(-status).name}"
    return f"Python exited with status {status}" if status else None


def _read(report: Path) -> dict[str, Any]:
    try:
        results = json.loads(report.read_text())
    except (OSError, ValueError):
        return {}
    return results if isinstance(results, dict) else {}
