"""Description of the jax hook, which does not import JAX. `hook` explains how the hook works."""

from typing import Final

from graphstash.hooks.spec import HookSpec, TestedVersions

__all__ = ["SPEC"]

SPEC: Final = HookSpec(
    name="jax",
    compiler="JAX's persistent compilation cache",
    tested_with="0.4.31, 0.10.2",
    modules=("jax",),
    install="graphstash.hooks.jax.hook:install",
    kinds=("jax",),
    distributions=("jax",),
    runtimes=("jaxlib", "libtpu"),
    # First and last version with tests. The sources of 0.4.25 to 0.12.0 have what the hook needs.
    tested=TestedVersions(
        "jax", (0, 4, 31), (0, 10, 2), steps_aside_below=False, steps_aside_above=False
    ),
    requirement="graphstash[jax]",
)
