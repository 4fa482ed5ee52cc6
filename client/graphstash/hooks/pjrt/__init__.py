"""The pjrt hook, described without a load of a plug-in. `hook` explains how it works."""

from typing import Final

from graphstash.hooks.spec import HookSpec

__all__ = ["SPEC"]

SPEC: Final = HookSpec(
    name="pjrt",
    compiler="torch_xla 2.8 and newer on a PJRT plug-in, where its own cache cannot load "
    "([pytorch/xla#9094](https://github.com/pytorch/xla/issues/9094)); JAX with "
    "`GRAPHSTASH_HOOKS=pjrt`",
    tested_with="torch_xla 2.9.0, JAX 0.8.3 and 0.10.2, `xla-cpu-pjrt` 0.0.1 (torch_xla runs on "
    "that plug-in only with the patch in `tests/support/pjrt_plugin.py`); libtpu 0.0.42.1 ahead of "
    "time",
    modules=("torch_xla", "jax"),
    install="graphstash.hooks.pjrt.hook:install",
    kinds=("pjrt",),
    distributions=("torch_xla", "jax"),
    runtimes=("libtpu",),
    # The hook checks the interface's version, which a plug-in reports when it is loaded (`abi`).
    tested=None,
    requirement="graphstash[torch-xla]",
    diagnose="graphstash.hooks.pjrt.diagnosis:diagnose",
)
