"""What JAX and torch call by themselves when they start, wherever graphstash is installed.

    jax_plugins       `initialize()`, before JAX makes its backends
    torch.backends    `load()`, at the end of `import torch` (2.5 and newer)

Both do nothing unless the environment has `GRAPHSTASH_AUTOLOAD=1`, as under `graphstash run`, but
warn of a value that they do not know. There they reach interpreters that `sitecustomize` does not
(`python -I`); elsewhere a container sets the variable once, and its jobs need no `graphstash run`.
"""

import os
from contextlib import suppress
from functools import cache

from graphstash.hooks import AUTOLOAD, AUTOLOAD_OFF, HOOKS, install_when_needed

__all__ = ["initialize", "load"]


@cache
def load() -> None:
    """Installs every hook, now or when its compiler is imported; further calls do nothing."""
    value = os.environ.get(AUTOLOAD, "")
    if value == "1":
        install_when_needed(HOOKS, _add, begun=_begin)  # what this raised would end `import torch`
    elif value not in AUTOLOAD_OFF:
        _warn_of(value)


def initialize() -> None:
    """The name that JAX looks for in the module that the entry point gives it."""
    load()


def _warn_of(value: str) -> None:
    with suppress(Exception):  # as above
        from graphstash._process.notices import autoload_notice, tell_once

        tell_once([autoload_notice(value)])


def _begin(name: str) -> None:
    with suppress(Exception):  # what is wrong, `_add` tells
        from graphstash._process.session import begin_for_hook  # likewise

        begin_for_hook(name)


def _add(name: str) -> None:
    try:
        from graphstash._process.session import (
            add_hook,  # not before a compiler is there: it is heavy
        )

        add_hook(name)
    except Exception:  # a hook's outermost frame: the compiler goes on without
        import logging  # here, because most processes never come here

        logging.getLogger("graphstash").warning(
            "graphstash: cannot install the %s hook", name, exc_info=True
        )
