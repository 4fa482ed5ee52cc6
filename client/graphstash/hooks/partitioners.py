"""The custom calls that this process has taught XLA to partition over devices.

A program names its custom calls. How XLA partitions a custom call depends on what the process has
registered for that name: nothing, each row alone (`register_ffi_target_as_batch_partitionable` of
`jax.ffi`), or functions in Python. Neither JAX's key nor the program contains the registration.

XLA does not list its registrations. JAX lists the registrations that a program made before JAX
searched for plug-ins. If a hook is installed later, a name without a known registration may have an
unknown one.
"""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

from graphstash.hooks.patching import Patches

__all__ = ["Partitioners"]

_BY_ROWS: Final = "register_custom_call_as_batch_partitionable"
_IN_PYTHON: Final = "register_custom_call_partitioner"

_OF_XLA: Final = re.compile(
    r"Sharding|SPMD\w+|MoveTo\w+|annotate_device_placement|LayoutConstraint|PartialReduce"
    r"|(Approx)?TopK|(xla|mhlo|chlo|stablehlo)\..*|tpu_custom_call|mosaic_gpu\w*|__gpu\$.*|__cu\w+.*"
)
"""Names of custom calls that XLA or JAX defines, and for which JAX registers nothing."""


class Partitioners:
    """Collects the names that JAX registers, from before the hook was installed and after.

    Attributes:
        is_late: Whether programs may have registered names that are not known.

    Args:
        xla_client: JAX's module `jaxlib.xla_client`, whose functions register a name.
        xla_bridge: JAX's module `jax._src.xla_bridge`. It lists the registrations that JAX repeats
            for each plug-in.
    """

    def __init__(self, xla_client: Any, xla_bridge: Any) -> None:
        self.is_late = bool(getattr(xla_bridge, "_plugins_registered", False))
        self._xla_client = xla_client
        self._by_rows: set[bytes] = set()
        self._in_python: set[bytes] = set()
        repeated = {
            getattr(xla_client, _BY_ROWS, None): self._by_rows,
            getattr(xla_client, _IN_PYTHON, None): self._in_python,
        }
        for each in getattr(xla_bridge, "_plugin_callbacks", ()):
            if isinstance(each, functools.partial) and each.func in repeated:
                _add_name(repeated[each.func], each.args, each.keywords)

    def observe(self, patches: Patches) -> None:
        """Wrap the functions that register a name."""
        for function, names in ((_BY_ROWS, self._by_rows), (_IN_PYTHON, self._in_python)):
            if hasattr(self._xla_client, function):  # JAX 0.4.31 has only partitioners in Python
                patches.wrap(
                    self._xla_client, function, functools.partial(_wrap_register, names=names)
                )

    def names_by_rows(self, program: bytes | memoryview) -> str:
        """Return the sorted names in a program that XLA partitions by rows."""
        return " ".join(sorted(map(bytes.decode, _names_in(self._by_rows, program))))

    def is_in_python(self, program: bytes | memoryview) -> bool:
        """Return whether functions in Python partition a custom call of a program."""
        return bool(_names_in(self._in_python, program))

    def first_unknown(self, calls: Iterable[str]) -> str:
        """Return the first of some custom calls whose registration may be unknown, or ""."""
        known = self._by_rows | self._in_python
        return next(
            (each for each in calls if each.encode() not in known and not _OF_XLA.fullmatch(each)),
            "",
        )


def _wrap_register(register: Callable[..., None], *, names: set[bytes]) -> Callable[..., None]:
    @functools.wraps(register)
    def register_and_note(*arguments: Any, **named: Any) -> None:
        _add_name(names, arguments, named)
        register(*arguments, **named)

    return register_and_note


def _add_name(names: set[bytes], arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    name = named.get("name", arguments[0] if arguments else "")
    if name:
        names.add(str(name).encode())


def _names_in(names: set[bytes], program: bytes | memoryview) -> list[bytes]:
    known = tuple(names)  # another thread may add a name
    code = bytes(program) if known else b""  # a program may be large
    return [name for name in known if name in code]
