"""Compilers: which are installed, and whether their hooks support the versions.

This module imports no compiler. With `--probe`, a Python under `graphstash run` imports them.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from graphstash._cli.doctor.findings import Finding, fail, ok, skipped, warn
from graphstash._process.notices import autoload_notice
from graphstash.config import ENVIRONMENT_PREFIX, ClientConfig
from graphstash.hooks import AUTOLOAD, AUTOLOAD_OFF, HOOKS
from graphstash.hooks.versions import TRIED, TriedVersions

__all__ = ["check_compilers", "probe_hooks"]

_IMPORT_SECONDS: Final = 120.0
"""Limit for the imports: torch_xla takes 20 s on a busy host, and a broken driver may hang."""

_PLUGIN_GROUPS: Final = ("jax_plugins", "torch_xla.plugins")
"""Entry-point groups in which PJRT plug-ins register."""

_NO_PLUGINS: Final = ("graphstash", "torch_xla")
"""Distributions in these groups that are not plug-ins."""

_PLUGINS: Final = ("libtpu", "libneuronxla")
"""Distributions of plug-ins that frameworks find without an entry point."""

_DISTRIBUTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    **{hook: (tried.distribution,) for hook, tried in TRIED.items()},
    "pjrt": ("torch_xla", "jax"),
}

_HOW_TO_REPEAT: Final = (
    "reproduce it with: graphstash run -- python -c 'import <compiler>'; see the table of "
    "compilers in the README"
)


def check_compilers(config: ClientConfig, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield one finding per hook, and one about how jobs start the cache."""
    installed = _installed_hooks()
    if not installed:
        yield warn(
            "compilers",
            f"no supported compiler is installed for {sys.executable}",
            "run the doctor with the Python of the job: <its python> -m graphstash doctor",
        )
        return
    for hook in HOOKS:
        name = f"{hook} hook"
        if hook not in installed:
            wanted = " or ".join(_DISTRIBUTIONS[hook])
            yield ok(name, f"not needed: {wanted} is not installed")
        elif hook not in config.hooks:
            yield ok(name, f"disabled by GRAPHSTASH_HOOKS ({installed[hook]} is installed)")
        elif hook in TRIED:
            yield _judged(hook, TRIED[hook], config)
        else:
            yield _plugins()
    yield _start(environ)


def _installed_hooks() -> dict[str, str]:
    """Map each hook whose compiler is installed to the versions, such as `torch 2.7.0`."""
    found = {}
    for hook in HOOKS:
        versions = ((each, _version(each)) for each in _DISTRIBUTIONS[hook])
        if told := ", ".join(f"{each} {version}" for each, version in versions if version):
            found[hook] = told
    return found


def _modules_to_import() -> list[str]:
    """Return the modules of installed compilers whose import installs the hooks."""
    modules = dict.fromkeys(module for each in HOOKS.values() for module in each)
    # For these compilers, the distribution and the package have the same name.
    return [module for module in modules if _version(module.partition(".")[0])]


def _judged(hook: str, tried: TriedVersions, config: ClientConfig) -> Finding:
    name, version = f"{hook} hook", _version(tried.distribution)
    told = f"{tried.distribution} {version}"
    if tried.covers(version):
        return ok(name, f"{told} (supported: {tried})")
    if not tried.is_refused(version):
        return warn(
            name,
            f"{told} has not been tested (supported: {tried}); the hook runs if it finds the "
            "internals it needs",
            "check with `graphstash doctor --probe`",
        )
    if hook == "torch_xla" and tried.is_above(version):
        return _left_to_pjrt(name, told, config)
    return warn(
        name,
        f"{told} is not supported (supported: {tried}); what {tried.distribution} compiles is not "
        "shared",
        f"install {tried.distribution} {tried}"
        + (", or a newer graphstash" if tried.is_above(version) else ""),
    )


def _left_to_pjrt(name: str, told: str, config: ClientConfig) -> Finding:
    """Refer to the pjrt hook: torch_xla 2.8 and newer cannot load its compiled graphs."""
    plugins = _plugin_names()
    if plugins and "pjrt" in config.hooks:
        return ok(name, f"{told} cannot load cached graphs; {', '.join(plugins)}: see pjrt hook")
    return warn(
        name,
        f"{told} is not supported: its own cache cannot load a compiled graph (pytorch/xla#9094)",
        "on a TPU or another PJRT plug-in the pjrt hook shares it (GRAPHSTASH_HOOKS must hold "
        "pjrt); on the built-in CPU device install torch_xla 2.7",
    )


def _plugins() -> Finding:
    names = _plugin_names()
    if not names:
        return ok("pjrt hook", "no PJRT plug-in is installed")
    return ok(
        "pjrt hook",
        f"will be installed into {', '.join(names)} when it is loaded",
    )


def _plugin_names() -> list[str]:
    announced = {
        point.dist.name
        for group in _PLUGIN_GROUPS
        for point in metadata.entry_points(group=group)
        if point.dist is not None and point.dist.name.replace("-", "_") not in _NO_PLUGINS
    }
    return sorted(announced | {name for name in _PLUGINS if _version(name)})


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


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def probe_hooks(
    environ: Mapping[str, str],
    options: Mapping[str, str | None],
    *,
    limit_seconds: float = _IMPORT_SECONDS,
) -> Iterator[Finding]:
    """Import every installed compiler under `graphstash run`, and report the installed hooks.

    Args:
        environ: environment of the job.
        options: options of `graphstash run`, by name without dashes. None omits an option.
        limit_seconds: maximum seconds for all imports together.
    """
    modules = _modules_to_import()
    if not modules:
        yield skipped("import probe", "no compiler is installed")
        return
    with tempfile.TemporaryDirectory(prefix="graphstash-doctor-") as folder:
        report = Path(folder) / "report"
        ended = _import(environ, options, report, modules, limit_seconds)
        told = _read(report)
    for each in told.get("errors", ()):
        yield warn("import probe", str(each), "the job's import fails too; fix that first")
    if ended is not None:
        module = told.get("importing")
        when = f"while it imported {module}" if module else "before it imported anything"
        yield fail("import probe", f"{ended} {when}", _HOW_TO_REPEAT)
        return
    if not told.get("is_started"):
        yield fail(
            "import probe",
            "`graphstash run` did not reach a Python that imports "
            f"{', '.join(modules)}: something resets PYTHONPATH, or {ENVIRONMENT_PREFIX}ENABLED "
            "is off",
            "call graphstash.install() at the top of the script instead",
        )
        return
    for each in told.get("warnings", ()):
        yield warn("import probe", str(each).removeprefix("graphstash: "), _HOW_TO_REPEAT)
    present = told.get("hooks", {})
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
    """Run the imports. Return how Python failed, or None for success."""
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    witness = [sys.executable, "-m", "graphstash._cli.doctor.witness", str(report), *modules]
    # Drop the job's name, which would start that job's prefetch.
    variables = {k: v for k, v in environ.items() if k != f"{ENVIRONMENT_PREFIX}JOB"}
    with subprocess.Popen(
        [sys.executable, "-m", "graphstash", "run", "--quiet", *given, "--", *witness],
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
        told = json.loads(report.read_text())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}
