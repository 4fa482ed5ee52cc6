"""What the environment sets, and what it seems to mean."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from graphstash._config import ENVIRONMENT_PREFIX, ClientConfig
from graphstash._doctor.findings import Finding, Topic, fail, ok, warn
from graphstash._entry_points import AUTOLOAD
from graphstash._errors import ConfigError
from graphstash._tls import server_context
from graphstash.hooks import HOOKS

__all__ = ["check_settings"]

_ALIKE: Final = 0.85
"""How alike a variable and a setting are when one is taken for the other, misspelled. The server's
settings share the prefix: the nearest pair of the two sides is 0.8 alike."""


def check_settings(
    environ: Mapping[str, str], overrides: Mapping[str, Any]
) -> Topic[ClientConfig | None]:
    """The settings as a job would read them; None when it could not.

    Args:
        environ: the environment.
        overrides: options of the command line, by setting; None means not given.
    """
    yield from _unknown_variables(environ)
    try:
        config = ClientConfig.load(environ, **overrides)
        if config.ca_file or config.client_cert:
            server_context(config)
    except ConfigError as error:
        yield fail(
            "settings",
            f"{error}",
            "correct the variable, or unset it to get the default; until then jobs compile as if "
            "there was no cache",
        )
        return None
    yield ok("settings", _told(environ, overrides))
    yield from _what_they_mean(config)
    return config


def _told(environ: Mapping[str, str], overrides: Mapping[str, Any]) -> str:
    """Which settings differ from their defaults, and where that comes from; never a value, which
    may be a secret.
    """
    options = {name for name, value in overrides.items() if value is not None}
    variables = {
        variable
        for name in ClientConfig.model_fields
        if environ.get(variable := ENVIRONMENT_PREFIX + name.upper()) and name not in options
    }
    told = []
    if variables:
        told.append(f"{', '.join(sorted(variables))} from the environment")
    if options:
        told.append(f"{', '.join(f'--{name}' for name in sorted(options))} from the command line")
    return "; ".join(told) or "all at their defaults"


def _unknown_variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    settings = [ENVIRONMENT_PREFIX + name.upper() for name in ClientConfig.model_fields]
    known = {*settings, AUTOLOAD}
    others = []
    for variable in sorted(environ):
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in known:
            if nearest := _nearest(variable, known):
                yield warn(
                    "settings",
                    f"{variable} is no setting, and nothing reads it",
                    f"did you mean {nearest}?",
                )
            else:
                others.append(variable)
    if others:
        yield ok("settings", f"not a job's, perhaps the server's: {', '.join(others)}")


def _nearest(variable: str, known: set[str]) -> str | None:
    bare = {name.removeprefix(ENVIRONMENT_PREFIX): name for name in known}
    name = variable.removeprefix(ENVIRONMENT_PREFIX).upper()
    found = difflib.get_close_matches(name, bare, n=1, cutoff=_ALIKE)
    return bare[found[0]] if found else None


def _what_they_mean(config: ClientConfig) -> Iterator[Finding]:
    if not config.enabled:
        yield warn(
            "settings",
            "the cache is switched off: hooks are not installed at all",
            "unset GRAPHSTASH_ENABLED",
        )
    if config.read_only:
        yield ok("settings", "GRAPHSTASH_READ_ONLY: this job fetches and never publishes")
    if unknown := sorted(set(config.hooks) - set(HOOKS)):
        near = difflib.get_close_matches(unknown[0], HOOKS, n=1)
        yield fail(
            "settings",
            f"GRAPHSTASH_HOOKS: no hook {', '.join(unknown)}",
            (f"did you mean {near[0]}? " if near else "")
            + f"There are: {', '.join(sorted(HOOKS))}; `graphstash run` refuses others",
        )
