"""The torch_xla hook, described without an import of torch_xla. `hook` explains how it works."""

from typing import Final

from graphstash.hooks.spec import HookSpec, TestedVersions

__all__ = ["SPEC"]

SPEC: Final = HookSpec(
    name="torch_xla",
    compiler="torch_xla 2.7 on its built-in CPU device",
    tested_with="2.7.0",
    modules=("torch_xla",),
    install="graphstash.hooks.torch_xla.hook:install",
    kinds=("torch_xla",),
    distributions=("torch_xla",),
    runtimes=("torch", "libtpu"),
    # 2.8 and newer write files into their cache that they cannot load (pytorch/xla#9094).
    tested=TestedVersions(
        "torch_xla", (2, 7), (2, 7), steps_aside_below=True, steps_aside_above=True
    ),
    requirement="graphstash[torch-xla27]",
    settings=("torch_xla_mode",),
    diagnose="graphstash.hooks.torch_xla.diagnosis:diagnose",
)
