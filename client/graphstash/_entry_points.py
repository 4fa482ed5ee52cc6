"""Entry points that JAX and torch call at startup wherever graphstash is installed.

    jax_plugins       `initialize()`, before JAX creates its backends
    torch.backends    `initialize()`, at the end of `import torch` (2.5 and newer)

Both do nothing unless `GRAPHSTASH_AUTOLOAD=1` is set, as `graphstash run` does. They warn about an
unknown value. Under `graphstash run`, they also reach interpreters that skip `sitecustomize`
(`python -I`). In a container that sets the variable, jobs do not need `graphstash run`.
"""

import os
from contextlib import suppress
from functools import cache

from graphstash.hooks.import_hook import before_first_package
from graphstash.hooks.installing import AUTOLOAD, AUTOLOAD_OFF, install_when_needed

__all__ = ["initialize", "load"]


@cache
def load() -> None:
    """Watch for compilers as soon as this process imports a package. Further calls do nothing.

    `sitecustomize` calls it in every process, and many processes import no package.
    """
    value = os.environ.get(AUTOLOAD, "")
    if value == "1":
        before_first_package(_watch)
    elif value not in AUTOLOAD_OFF:
        _warn_of(value)


def initialize() -> None:
    """Install every hook, now or when its compiler is imported. Further calls do nothing."""
    load()
    if os.environ.get(AUTOLOAD) == "1":
        _watch()


@cache
def _watch() -> None:
    try:  # raising would break `import torch`
        from graphstash.hooks.registry import broken_hooks, hook_specs

        install_when_needed(hook_specs().values(), _add, begun=_begin)
        if broken_hooks():
            _warn_of_broken_hooks()
    except Exception:
        import logging  # most processes never get here

        logging.getLogger("graphstash").warning("graphstash: cannot install hooks", exc_info=True)


def _warn_of(value: str) -> None:
    with suppress(Exception):  # raising would break the import, as in `load`
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
        from graphstash._process.session import (
            add_hook,  # heavy: import it only once a compiler is imported
        )

        add_hook(name)
    except Exception:  # outermost frame of a hook: the compiler must go on without it
        import logging  # most processes never get here

        logging.getLogger("graphstash").warning(
            "graphstash: cannot install the %s hook", name, exc_info=True
        )
