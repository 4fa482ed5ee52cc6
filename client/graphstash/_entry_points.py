"""What JAX and torch call by themselves when they start, wherever graphstash is installed.

    jax_plugins       `initialize()`, before JAX makes its backends
    torch.backends    `load()`, at the end of `import torch` (2.5 and newer)

Both do nothing unless the environment has `GRAPHSTASH_AUTOLOAD=1`, as under `graphstash run`. There
they reach interpreters that `sitecustomize` does not (`python -I`); elsewhere a container sets the
variable once, and its jobs need no `graphstash run`.
"""

import os
from functools import cache

from graphstash.hooks import AUTOLOAD, HOOKS, install_when_needed

__all__ = ["initialize", "load"]


@cache
def load() -> None:
    """Installs every hook, now or when its compiler is imported; further calls do nothing."""
    if os.environ.get(AUTOLOAD) == "1":
        install_when_needed(HOOKS, _add)  # what this raised would end `import torch`


def initialize() -> None:
    """The name that JAX looks for in the module that the entry point gives it."""
    load()


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
