"""Tables of torch's compiler that torch fills only when it is imported.

They hold rules, such as which operations Inductor makes in place, and numbers, such as the block
sizes that it tries. torch's keys hash torch's files, and `replaced` compares no contents of tables.
A change is not seen if it precedes the installation of the hook, which imports this module.

torch has other tables, such as caches, to which it adds entries while it compiles. `registries`
describes those of functions by operation.
"""

import sys
from collections.abc import Iterator
from typing import Any, Final

import torch._inductor.compile_fx  # noqa: F401 - imports the modules below

__all__ = ["changed_table"]

_TABLES: Final = {
    "torch._decomp.decompositions_for_rng": ("rng_decompositions",),
    "torch._functorch.compile_utils": ("rand_ops",),
    "torch._higher_order_ops.out_dtype": ("ALLOWABLE_OPS",),
    "torch._inductor.codegen.common": ("DTYPE_TO_COMPUTATION_DTYPE", "pointwise_overrides_data"),
    "torch._inductor.codegen.cpp": (
        *("CONTAINER_PYTHON_TO_CPP", "DTYPE_LOWP_FP", "DTYPE_TO_CPP", "MASKED_VECTORIZABLE_DTYPES"),
        *("NATIVE_OMP_RTYPES", "PYTHON_TO_CPP", "RTYPE_TO_CPP", "VECTORIZABLE_DTYPES"),
        "VECTORIZABLE_RTYPES",
    ),
    "torch._inductor.codegen.cpp_micro_gemm": ("micro_gemm_configs",),
    "torch._inductor.codegen.cpp_utils": ("DEVICE_TO_ATEN", "DTYPE_TO_ATEN", "DTYPE_TO_CPP"),
    "torch._inductor.codegen.triton": ("TRITON_MAX_BLOCK",),
    "torch._inductor.cpu_vec_isa": ("supported_vec_isa_list",),
    "torch._inductor.decomposition": ("decomps_to_exclude", "inductor_decompositions"),
    "torch._inductor.fx_passes.b2b_gemm": ("b2b_gemm_configs",),
    "torch._inductor.fx_passes.group_batch_fusion": (
        *("POST_GRAD_FUSIONS", "PRE_GRAD_FUSIONS", "SEARCH_EXCLUSIONS"),
        "default_graph_search_options",
    ),
    "torch._inductor.fx_passes.post_grad": ("noop_registry",),
    "torch._inductor.fx_passes.reinplace": (
        *("META_ONLY_OPS", "_ALWAYS_MUTATING_SCATTER_OPS", "_SCATTER_OP_TO_VIEW"),
        *("inplaceable_foreach_ops", "inplaceable_ops", "inplaceable_triton_ops"),
    ),
    "torch._inductor.fx_passes.split_cat": ("post_grad_pass_names", "pre_grad_pass_names"),
    "torch._inductor.kernel.conv": ("kernel_configs",),
    "torch._inductor.kernel.flex_attention": (
        *("_a100_default_config", "_h100_default_config", "_rocm_default_config"),
    ),
    "torch._inductor.kernel.mm_common": (
        *("extra_mm_kernel_configs", "int8_mm_kernel_configs", "mixed_mm_kernel_configs"),
        *("mixed_mm_kernel_configs_small_m", "mm_kernel_configs", "persistent_mm_kernel_configs"),
        *("scaled_mm_kernel_configs", "scaled_persistent_mm_kernel_configs"),
    ),
    "torch._inductor.lowering": ("DTYPE_ID_LOOKUP", "FALLBACK_ALLOW_LIST", "foreach_ops"),
    "torch._subclasses.fake_impls": (
        *("_device_not_kwarg_ops", "_like_tensor_constructors", "op_implementations_checks"),
        "op_implementations_dict",
    ),
    "torch._subclasses.fake_tensor": ("_DISPATCH_HANDLE_DIRECTLY", "_DISPATCH_META_HANDLERS"),
}
"""By module of torch 2.7 to 2.15. A release lacks some of these tables."""


def changed_table() -> str:
    """Return the name of a table whose contents a program has changed, or an empty string."""
    for name, module, table, containers in _first:
        if vars(module).get(name) is not table:
            return f"{module.__name__}.{name}"
        for each, copied in containers:
            if (each if type(each) in _COMPARED else [*each]) != copied:
                return f"{module.__name__}.{name}"
    return ""


_COMPARED: Final = (dict, list)


def _containers(table: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a table and the tables in it, each with a copy that holds the same objects."""
    yield table, table.copy() if type(table) in _COMPARED else [*table]
    for each in table.values() if isinstance(table, dict) else table:
        if type(each) in _COMPARED:
            yield from _containers(each)


_first: Final = [
    (name, sys.modules[module], table, [*_containers(table)])
    for module, names in _TABLES.items()
    if module in sys.modules
    for name in names
    if (table := vars(sys.modules[module]).get(name)) is not None
]
"""The tables, with their contents at the import of this module."""
