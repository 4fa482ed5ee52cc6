"""Details about a program and JAX's settings, which explain a miss. No key contains them."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import jax

__all__ = ["details_of", "settings"]

_SHOWN_ELEMENTS: Final = 64
"""Maximum elements of a constant in the program's text."""

_SETTINGS: Final = (
    *("jax_default_matmul_precision", "jax_default_prng_impl", "jax_disable_most_optimizations"),
    *("jax_embedded_constants_max_bytes", "jax_enable_custom_prng", "jax_enable_x64"),
    *("jax_exec_time_optimization_effort", "jax_memory_fitting_effort"),
    *("jax_memory_fitting_level", "jax_numpy_dtype_promotion", "jax_optimization_level"),
    *("jax_random_seed_offset", "jax_remove_size_one_mesh_axis_from_type"),
    *("jax_softmax_custom_jvp", "jax_threefry_partitionable", "jax_use_direct_linearize"),
    *("jax_use_shardy_partitioner", "jax_use_simplified_jaxpr_constants"),
)
"""Settings that change programs or their compilation. Each release of JAX has some of them."""

_MODULE: Final = re.compile(r"^module @\S+", re.MULTILINE)
_OPERATION: Final = re.compile(
    r"\b(?:stablehlo|mhlo|chlo|sdy)\.(?!(?:broadcast_in_dim|constant|reshape|return)\b)(\w+)"
)
"""Every operation except constants, returns, and operations that only change a shape."""
_ARGUMENT: Final = re.compile(r"%arg(\d+): [^%]*?(?:tf\.aliasing_output|jax\.buffer_donor)\b")
_PRECISION: Final = re.compile(r"precision = \[(\w+), (\w+)\]")
_CONSTANT: Final = re.compile(r"\bdense<([^<>]*)> : (tensor<[^>]*>)")
_MAX_CONSTANTS: Final = 200
_MAX_CHARACTERS: Final = 24


def settings() -> dict[str, str]:
    """Return JAX's settings in this thread, a detail each."""
    found = {}
    for name in _SETTINGS:
        with suppress(AttributeError):
            value = getattr(jax.config, name)
            found[f"setting.{name}"] = str(getattr(value, "value", value))
    return found


def details_of(module: Any) -> dict[str, str]:
    """Return a digest of an MLIR module, and a short text of its operations.

    The digest omits the module's name, so renaming the function does not change it.
    """
    text = _MODULE.sub(
        "module",
        module.operation.get_asm(enable_debug_info=False, large_elements_limit=_SHOWN_ELEMENTS),
    )
    main = next((line for line in text.splitlines() if "@main(" in line), "")
    precisions = {word for pair in _PRECISION.findall(text) for word in pair}
    return {
        "program": hashlib.sha256(text.encode()).hexdigest(),
        "inputs": _inputs(module),
        "donated": " ".join(_ARGUMENT.findall(main)),
        "operations": " ".join(
            f"{name}={count}" for name, count in sorted(Counter(_OPERATION.findall(text)).items())
        ),
        # Sorted, because any edit can move a constant: its place is no cause of a miss.
        "constants": " ".join(sorted(_constants(text))),
        "precision": " ".join(sorted(precisions)),
    }


def _inputs(module: Any) -> str:
    """Return the shapes and types of the program's inputs and outputs, in MLIR's notation."""
    for each in module.body.operations:
        attributes = each.operation.attributes
        if "function_type" in attributes and attributes["sym_name"].value == "main":
            return str(attributes["function_type"])
    return ""


def _constants(text: str) -> Iterator[str]:
    """Yield the first constants of a program. A long one is its type with a digest."""
    for value, kind in _CONSTANT.findall(text)[:_MAX_CONSTANTS]:
        if len(value) > _MAX_CHARACTERS:
            yield f"{kind}#{hashlib.sha256(value.encode()).hexdigest()[:8]}"
        else:
            try:
                yield f"{float(value):g}"
            except ValueError:  # true, a list, a bit pattern
                yield value.replace(" ", "")
