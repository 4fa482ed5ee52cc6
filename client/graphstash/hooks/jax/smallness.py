"""Predict from a program's operations whether it compiles fast.

Between its hot functions, a JAX job compiles dozens of tiny programs that fill an array, convert a
type or print a norm. Each takes 10 to 60 ms on a CPU, and more on a GPU. A small program has few
operations, and none that may compile slowly, such as a loop, call, sort, matrix product,
convolution or scatter. It has no large constant, with which XLA may compute while compiling.
"""

from typing import Any, Final

__all__ = ["is_small"]

_MAX_OPERATIONS: Final = 32
_MAX_ELEMENTS: Final = 1024**2

_FRAME: Final = frozenset({"func.func", "func.return", "sdy.mesh", "stablehlo.return"})

_QUICK: Final = frozenset(
    f"stablehlo.{name}"
    for name in (
        *("abs", "add", "and", "atan2", "bitcast_convert", "broadcast_in_dim", "cbrt", "ceil"),
        *("clamp", "compare", "complex", "concatenate", "constant", "convert", "cosine", "divide"),
        *("dynamic_slice", "dynamic_update_slice", "exponential", "exponential_minus_one"),
        *("floor", "imag", "iota", "is_finite", "log", "log_plus_one", "logistic", "maximum"),
        *("minimum", "multiply", "negate", "not", "or", "pad", "popcnt", "power", "real"),
        *("reduce", "remainder", "reshape", "reverse", "round_nearest_afz", "round_nearest_even"),
        *("rsqrt", "select", "shift_left", "shift_right_arithmetic", "shift_right_logical"),
        *("sign", "sine", "slice", "sqrt", "subtract", "tan", "tanh", "transpose", "xor"),
    )
)


_CONSTANTS: Final = frozenset({"stablehlo.constant", "stablehlo.iota"})


def is_small(module: Any) -> bool:
    """Return whether an MLIR module in StableHLO likely compiles fast."""
    left = [_MAX_OPERATIONS]
    return all(_is_quick(each.operation, left) for each in module.body.operations)


def _is_quick(operation: Any, left: list[int]) -> bool:
    left[0] -= 1
    name = operation.name
    if left[0] < 0 or (name not in _QUICK and name not in _FRAME):
        return False
    if name in _CONSTANTS and not _is_short(operation.results[0].type):
        return False
    return all(
        _is_quick(each.operation, left)
        for region in operation.regions
        for block in region.blocks
        for each in block.operations
    )


def _is_short(tensor: Any) -> bool:
    elements = 1
    for extent in tensor.shape:  # a dynamic extent is negative
        elements *= extent
    return 0 <= elements <= _MAX_ELEMENTS
