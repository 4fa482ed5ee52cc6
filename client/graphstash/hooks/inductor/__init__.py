"""The inductor hook, described without an import of torch. `hook` explains how it works."""

from typing import Final

from graphstash.hooks.spec import HookSpec, TestedVersions

__all__ = ["SPEC"]

SPEC: Final = HookSpec(
    name="inductor",
    compiler="torch.compile: FX graphs, AOTAutograd results, and the C++ objects that torch's "
    "remote caches omit",
    tested_with="2.7.0, 2.15.0",
    modules=("torch._inductor.compile_fx",),
    observers=(("torch", "graphstash.hooks.inductor.recorded:record"),),
    install="graphstash.hooks.inductor.hook:install",
    kinds=("inductor", "aot_autograd", "autotune"),
    distributions=("torch",),
    runtimes=("triton",),
    # The tests run 2.7 and 2.15. Each minor release in between was tried by hand with one program.
    tested=TestedVersions(
        "torch", (2, 7), (2, 15), steps_aside_below=True, steps_aside_above=False
    ),
    requirement="graphstash[torch]",
)
