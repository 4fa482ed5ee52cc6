"""Warnings about a job's settings, logged once per job instead of once per process."""

import difflib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from graphstash.config import ENVIRONMENT_PREFIX, ClientConfig, SignaturePolicy, is_on_this_host
from graphstash.hooks.installing import AUTOLOAD
from graphstash.hooks.registry import broken_hooks, hook_specs
from graphstash_schema.names import printable

__all__ = [
    "autoload_notice",
    "log_once",
    "notices",
    "unknown_hooks",
    "unknown_variables",
    "unusable_hooks",
]

_log = logging.getLogger("graphstash")

_TOLD: Final = "_GRAPHSTASH_TOLD"
"""Internal variable that passes the lines already logged to child processes."""

_ALIKE: Final = 0.85
"""Minimum similarity for a variable to count as a misspelled setting. Server settings share the
prefix. The most similar pair of a server setting and a job setting has a similarity of 0.8."""


_VALUE_CHARACTERS: Final = 40

_REASON_CHARACTERS: Final = 300


def log_once(lines: Iterable[str]) -> None:
    """Log the lines that neither this process nor an ancestor has logged."""
    told = os.environ.get(_TOLD, "").split("\n")
    for line in lines:
        if line not in told:
            _log.warning("graphstash: %s", line)
            told.append(line)
    os.environ[_TOLD] = "\n".join(told)


def notices(config: ClientConfig, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield warnings about the settings of a job."""
    if not config.url:
        if "url" not in config.given:  # a user who sets `none` does not need the notice
            yield (
                "no server: set GRAPHSTASH_URL to that of your team, or run `graphstash serve` on "
                "this host. Until then nothing is shared, and artifacts stay on this host's disk "
                "(GRAPHSTASH_URL=none says that this is meant)"
            )
    elif config.signature_policy is SignaturePolicy.OFF and not is_on_this_host(config.url):
        yield (
            f"artifacts from {config.url} are loaded without a check of signatures: everyone who "
            f"can write to the namespaces that this job reads ({', '.join(config.readable)}) can "
            "run code in it. Set GRAPHSTASH_TRUSTED_KEYS to accept signed artifacts only"
        )
    if (wrong := unknown_hooks(config)) is not None:
        yield "; ".join(wrong)
    yield from unusable_hooks(config)
    if unknown := unknown_variables(environ):
        told = ", ".join(
            f"{variable} (did you mean {nearest}?)" if nearest else variable
            for variable, nearest in unknown.items()
        )
        yield f"ignored, because jobs have no such settings: {told}"


def autoload_notice(value: str) -> str:
    """Return the warning about an invalid value of the autoload variable."""
    told = printable(value, most=_VALUE_CHARACTERS)
    return (
        f"{AUTOLOAD}={told} does nothing: set {AUTOLOAD}=1 to start the cache in every process "
        "that imports torch or JAX, or 0 for no cache"
    )


def unknown_hooks(config: ClientConfig) -> tuple[str, str] | None:
    """Return a warning about unknown hooks and the remedy, or None if all hooks exist."""
    known = hook_specs()
    if not (unknown := sorted(set(config.hooks or ()) - {*known, *broken_hooks()})):
        return None
    near = difflib.get_close_matches(unknown[0], known, n=1)
    return (
        f"GRAPHSTASH_HOOKS: unknown hook {', '.join(unknown)}, ignored",
        (f"did you mean {near[0]}? " if near else "") + f"Use {', '.join(sorted(known))}",
    )


def unusable_hooks(config: ClientConfig) -> Iterator[str]:
    """Yield a warning about each hook whose package is broken, unless it was not requested."""
    for name, reason in broken_hooks().items():
        if config.wants_hook(name):
            yield f"the hook {name} cannot be used: {printable(reason, most=_REASON_CHARACTERS)}"


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return unknown variables with our prefix, each with the most similar setting of a job.

    The value is None for a variable without a similar setting, which may be a server setting.
    """
    settings = set(ClientConfig.rules()).union(*(each.settings for each in hook_specs().values()))
    known = {*(ENVIRONMENT_PREFIX + name.upper() for name in settings), AUTOLOAD}
    bare = {name.removeprefix(ENVIRONMENT_PREFIX): name for name in known}
    unknown = {}
    for variable in sorted(environ):
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in known:
            name = variable.removeprefix(ENVIRONMENT_PREFIX).upper()
            found = difflib.get_close_matches(name, bare, n=1, cutoff=_ALIKE)
            unknown[variable] = bare[found[0]] if found else None
    return unknown
