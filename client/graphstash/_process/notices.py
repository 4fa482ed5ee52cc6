"""Warnings about a job's settings, logged once per job instead of once per process."""

import difflib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from graphstash.config import ENVIRONMENT_PREFIX, ClientConfig, SignaturePolicy, is_on_this_host
from graphstash.hooks.installing import AUTOLOAD
from graphstash.hooks.registry import broken_hooks, hook_specs
from graphstash_schema import misspelling
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

_LOGGED: Final = "_GRAPHSTASH_TOLD"
"""Environment variable that passes the logged lines to child processes."""

_VALUE_CHARACTERS: Final = 40

_REASON_CHARACTERS: Final = 300


def log_once(lines: Iterable[str]) -> None:
    """Log the lines that neither this process nor an ancestor has logged."""
    logged = os.environ.get(_LOGGED, "").split("\n")
    for line in lines:
        if line not in logged:
            _log.warning("graphstash: %s", line)
            logged.append(line)
    os.environ[_LOGGED] = "\n".join(logged)


def notices(config: ClientConfig, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield warnings about the settings of a job."""
    if config.file_problem:
        yield config.file_problem
    if not config.url:
        if "url" not in config.given:  # GRAPHSTASH_URL=none is a choice
            yield (
                "no server: set GRAPHSTASH_URL to your team's server, or run `graphstash serve` on "
                "this host. Until then nothing is shared, and artifacts stay on this host's disk "
                "(GRAPHSTASH_URL=none silences this warning)"
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
    unknown = unknown_variables(environ)
    if line := misspelling.warning_of(unknown):
        yield line
    if others := [variable for variable, nearest in unknown.items() if nearest is None]:
        yield f"ignored, because jobs have no such settings: {', '.join(others)}"


def autoload_notice(value: str) -> str:
    """Return the warning about an invalid value of the autoload variable."""
    shown = printable(value, most=_VALUE_CHARACTERS)
    return (
        f"{AUTOLOAD}={shown} does nothing: set {AUTOLOAD}=1 to start the cache in every process "
        "that imports torch or JAX, or 0 for no cache"
    )


def unknown_hooks(config: ClientConfig) -> tuple[str, str] | None:
    """Return a warning about unknown hooks and a remedy, or None if all hooks are known."""
    known = hook_specs()
    if not (unknown := sorted(set(config.hooks or ()) - {*known, *broken_hooks()})):
        return None
    similar = difflib.get_close_matches(unknown[0], known, n=1)
    return (
        f"GRAPHSTASH_HOOKS: unknown hook {', '.join(unknown)}, ignored",
        (f"did you mean {similar[0]}? " if similar else "") + f"Use {', '.join(sorted(known))}",
    )


def unusable_hooks(config: ClientConfig) -> Iterator[str]:
    """Yield a warning about each unusable hook, unless the settings exclude the hook."""
    for name, reason in broken_hooks().items():
        if config.wants_hook(name):
            yield f"the hook {name} cannot be used: {printable(reason, most=_REASON_CHARACTERS)}"


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Map each unknown variable with our prefix to the most similar job setting.

    The value is None if no setting is similar: the variable may be a server setting.
    """
    settings = {AUTOLOAD.removeprefix(ENVIRONMENT_PREFIX), *ClientConfig.rules()}
    settings.update(*(each.settings for each in hook_specs().values()))
    return misspelling.unknown_variables(environ, prefix=ENVIRONMENT_PREFIX, settings=settings)
