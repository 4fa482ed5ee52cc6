"""Compilers: which hooks have theirs here, in versions that they know. None of them is imported."""

import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Final

from graphstash._config import ClientConfig
from graphstash._doctor.findings import Finding, ok, warn
from graphstash._entry_points import AUTOLOAD
from graphstash.hooks import HOOKS
from graphstash.hooks.versions import TRIED, TriedVersions

__all__ = ["check_compilers", "installed_hooks", "modules_to_import"]

_PLUGIN_GROUPS: Final = ("jax_plugins", "torch_xla.plugins")
"""Where PJRT plug-ins announce themselves."""

_NO_PLUGINS: Final = ("graphstash", "torch_xla")
"""Announce something in those groups, too."""

_PLUGINS: Final = ("libtpu", "libneuronxla")
"""Distributions of plug-ins that frameworks find without an announcement."""

_DISTRIBUTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    **{hook: (tried.distribution,) for hook, tried in TRIED.items()},
    "pjrt": ("torch_xla", "jax"),
}


def check_compilers(config: ClientConfig, environ: Mapping[str, str]) -> Iterator[Finding]:
    """One line per hook, and one about how the cache gets into a job."""
    installed = installed_hooks()
    if not installed:
        yield warn(
            "compilers",
            f"none that a hook knows is installed for {sys.executable}",
            "ask with the Python that the job runs with: <its python> -m graphstash doctor",
        )
        return
    for hook in HOOKS:
        name = f"{hook} hook"
        if hook not in installed:
            wanted = " or ".join(_DISTRIBUTIONS[hook])
            yield ok(name, f"not needed: {wanted} is not installed")
        elif hook not in config.hooks:
            yield ok(name, f"left out by GRAPHSTASH_HOOKS ({installed[hook]} is installed)")
        elif hook in TRIED:
            yield _judged(hook, TRIED[hook], config)
        else:
            yield _plugins()
    yield _start(environ)


def installed_hooks() -> dict[str, str]:
    """For each hook that has a compiler in this Python, which ones: `torch 2.7.0`."""
    found = {}
    for hook in HOOKS:
        versions = ((each, _version(each)) for each in _DISTRIBUTIONS[hook])
        if told := ", ".join(f"{each} {version}" for each, version in versions if version):
            found[hook] = told
    return found


def modules_to_import() -> list[str]:
    """The modules whose import installs the hooks, of the compilers that are in this Python."""
    modules = dict.fromkeys(module for each in HOOKS.values() for module in each)
    # Of these compilers, the distribution and the package have one name.
    return [module for module in modules if _version(module.partition(".")[0])]


def _judged(hook: str, tried: TriedVersions, config: ClientConfig) -> Finding:
    name, version = f"{hook} hook", _version(tried.distribution)
    told = f"{tried.distribution} {version}"
    if tried.covers(version):
        return ok(name, f"{told}, one of those that it was tried with ({tried})")
    if not tried.is_refused(version):
        return warn(
            name,
            f"{told} was not tried, {tried} was: the hook goes on by the names that it finds",
            "see whether it does: `graphstash doctor --probe`",
        )
    if hook == "torch_xla" and tried.is_above(version):
        return _left_to_pjrt(name, told, config)
    return warn(
        name,
        f"the hook steps aside for {told}: it knows {tried}, and what {tried.distribution} "
        "compiles is not shared",
        f"install {tried.distribution} {tried}"
        + (", or a newer graphstash" if tried.is_above(version) else ""),
    )


def _left_to_pjrt(name: str, told: str, config: ClientConfig) -> Finding:
    """torch_xla 2.8 and newer cannot load what it compiled; plug-ins can."""
    plugins = _plugin_names()
    if plugins and "pjrt" in config.hooks:
        return ok(name, f"{told}, whose own cache cannot load; {', '.join(plugins)}: see pjrt hook")
    return warn(
        name,
        f"the hook steps aside for {told}, whose own cache cannot load a compiled graph "
        "(pytorch/xla#9094)",
        "on a TPU or another PJRT plug-in the pjrt hook shares it (GRAPHSTASH_HOOKS must hold "
        "pjrt); on the built-in CPU device install torch_xla 2.7",
    )


def _plugins() -> Finding:
    names = _plugin_names()
    if not names:
        return ok("pjrt hook", "waits for a PJRT plug-in; no known one is installed")
    return ok(
        "pjrt hook",
        f"goes into {', '.join(names)} when it is loaded, and tells then whether it knows its "
        "version",
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
    value = environ.get(AUTOLOAD)
    by_hand = "`graphstash run -- <command>`, or graphstash.install() in the script"
    if not value:
        return ok("start", f"put the cache into a job by {by_hand}")
    if value != "1":
        return warn("start", f"{AUTOLOAD}={value!r} does nothing", f"set {AUTOLOAD}=1, or unset it")
    has_points = any(
        point.dist is not None and point.dist.name == "graphstash"
        for point in metadata.entry_points(group="jax_plugins")
    )
    if not has_points:
        return warn(
            "start",
            f"{AUTOLOAD}=1, but torch and JAX do not find graphstash among the installed packages",
            f"install graphstash into {sys.prefix} with pip, or start jobs by {by_hand}",
        )
    return ok("start", f"{AUTOLOAD}=1: torch (2.5 and newer) and JAX start the cache themselves")


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
