"""Entry points that JAX and torch call at startup wherever graphstash is installed.

    jax_plugins       `initialize()`, before JAX creates its backends
    torch.backends    `initialize()`, at the end of `import torch` (2.5 and newer)

They install hooks only if `GRAPHSTASH_AUTOLOAD` is 1, and warn about an unknown value. Under
`graphstash run`, which sets the variable, they also work if Python skips `sitecustomize`
(`python -I`). In a container that sets it, jobs do not need `graphstash run`.
"""

import os
from contextlib import suppress
from functools import cache

from graphstash.hooks.import_hook import before_first_package
from graphstash.hooks.installing import AUTOLOAD, AUTOLOAD_OFF, install_when_needed

__all__ = ["initialize", "load"]


@cache
def load() -> None:
    """At the first import of a package, begin to watch for compilers. Further calls do nothing.

    `sitecustomize` calls this in every process, and many processes import no package.
    """
    value = os.environ.get(AUTOLOAD, "")
    if value == "1":
        before_first_package(_watch)
    elif value not in AUTOLOAD_OFF:
        _warn_of(value)


def initialize() -> None:
    """Install each hook now, or when its compiler is imported. Further calls do nothing."""
    if os.environ.get(AUTOLOAD) == "1":
        _watch()  # not `load`: a hook would import the first package, and begin to watch again
    else:
        load()


@cache
def _watch() -> None:
    try:  # raising would break `import torch`
        from graphstash.hooks.registry import broken_hooks, hook_specs

        install_when_needed(hook_specs().values(), _add, on_begin=_begin)
        if broken_hooks():
            _warn_of_broken_hooks()
    except Exception:
        import logging  # most processes never get here

        logging.getLogger("graphstash").warning("graphstash: cannot install hooks", exc_info=True)


def _warn_of(value: str) -> None:
    with suppress(Exception):  # raising would break the import
        from graphstash._process.notices import autoload_notice, log_once

        log_once([autoload_notice(value)])


def _warn_of_broken_hooks() -> None:
    with suppress(Exception):  # a session reports unusable settings
        from graphstash._process.notices import log_once, unusable_hooks
        from graphstash.config import ClientConfig

        log_once(unusable_hooks(ClientConfig.load()))


def _begin(name: str) -> None:
    with suppress(Exception):  # `_add` reports the error
        from graphstash._process.session import begin_for_hook  # heavy, as in `_add`

        begin_for_hook(name)


def _add(name: str) -> None:
    try:
        # heavy: import it only once a compiler is imported
        from graphstash._process.session import add_hook

        add_hook(name)
    except Exception:  # outermost frame of a hook: the compiler must go on without it
        import logging  # most processes never get here

        logging.getLogger("graphstash").warning(
            "graphstash: cannot install the %s hook", name, exc_info=True
        )
