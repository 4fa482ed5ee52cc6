"""The triton hook, described without an import of Triton. `hook` explains how it works.

Users set Triton's variables to the two classes here.
"""

from typing import TYPE_CHECKING, Final

from graphstash._lazy import lazy
from graphstash.hooks.spec import HookSpec, TestedVersions

if TYPE_CHECKING:
    from graphstash.hooks.triton.kernels import SharedCacheBackend, SharedCacheManager

__all__ = ["SPEC", "SharedCacheBackend", "SharedCacheManager"]

SPEC: Final = HookSpec(
    name="triton",
    compiler="Triton kernels, however they are launched",
    tested_with="3.3.0, 3.9.0, for sm_90",
    modules=("triton",),
    install="graphstash.hooks.triton.hook:install",
    kinds=("triton",),
    distributions=("triton",),
    # The tests run 3.3, 3.5 and 3.9, whose interfaces are equal here.
    tested=TestedVersions("triton", (3, 0), (3, 9), steps_aside_below=True, steps_aside_above=True),
    requirement="graphstash[torch]",
)

__getattr__, __dir__ = lazy(__name__)
