"""Process-wide switches that a graph can read, and that torch's own keys omit.

The lists follow the setters in `torch._C` of 2.7 and 2.15, and torch's own guards on global state
(`GlobalStateGuard`). If torch has a setter that the lists lack, the hook shares no graph, because
the new switch may change what a graph computes.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import chain
from typing import Any, Final

import torch
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.fx_passes import post_grad
from torch.backends import mha, opt_einsum
from torch.fx.experimental import _config as symbols_config

from graphstash.hooks.environment import flushed_denormals, read_part

__all__ = ["ambient_state", "is_changed", "unknown_switches"]

_SCALARS: Final = "TENSORIFY_PYTHON_SCALARS"
"""Variable that decides whether AOTAutograd turns arithmetic on numbers into tensors."""

_READ: Final = (
    *("_get_autograd_fallback_mode", "_get_blas_preferred_backend", "_get_default_device"),
    *("_get_cpu_allow_fp16_reduced_precision_reduction", "_get_cublas_allow_fp16_accumulation"),
    "_get_cublas_allow_bf16_reduced_precision_reduction",
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    *("_get_cublas_allow_tf32", "_get_cublaslt_prefer_grouped_gemm", "_get_cudnn_allow_tf32"),
    *("_get_cudnn_benchmark", "_get_cudnn_depthwise_kernel", "_get_cudnn_deterministic"),
    *("_get_cudnn_enabled", "_get_cudnn_sdp_enabled", "_get_deterministic_algorithms"),
    *("_get_deterministic_algorithms_warn_only", "_get_deterministic_fill_uninitialized_memory"),
    *("_get_dtensor_allow_implicit_replication", "_get_fa3_sdp_enabled", "_get_fa4_sdp_enabled"),
    *("_get_flash_sdp_enabled", "_get_float32_matmul_precision", "_get_linalg_preferred_backend"),
    *("_get_math_sdp_allow_fp16_bf16_reduction", "_get_math_sdp_enabled"),
    *("_get_mem_efficient_sdp_enabled", "_get_miopen_immediate", "_get_mkldnn_deterministic"),
    *("_get_mkldnn_enabled", "_get_native_aot_enabled", "_get_native_aot_unconditional_masked"),
    *("_get_nnpack_enabled", "_get_onednn_allow_tf32", "_get_overrideable_sdp_enabled"),
    *("_get_qengine", "_get_rocm_fa_preferred_backend", "_get_sdp_priority_order"),
    "_get_sm_carveout_experimental",
    *("_is_fwd_grad_enabled", "_is_grad_layout_enforcement_enabled", "_is_view_replay_enabled"),
    *("is_anomaly_enabled", "is_autocast_cache_enabled", "is_grad_enabled"),
    *("is_inference_mode_enabled", "_is_torch_function_enabled"),
    "_check_sparse_tensor_invariants",
)
"""Functions of `torch._C` without arguments that return the state of a switch."""

_SET: Final = frozenset(
    {
        *("autograd_fallback_mode", "blas_preferred_backend", "check_sparse_tensor_invariants"),
        *("cpu_allow_fp16_reduced_precision_reduction", "cublas_allow_fp16_accumulation"),
        "cublas_allow_bf16_reduced_precision_reduction",
        "cublas_allow_fp16_reduced_precision_reduction",
        *("cublas_allow_tf32", "cublaslt_prefer_grouped_gemm", "cudnn_allow_tf32"),
        *("cudnn_benchmark", "cudnn_depthwise_kernel", "cudnn_deterministic", "cudnn_enabled"),
        *("default_dtype", "default_tensor_type", "deterministic_algorithms"),
        *("deterministic_fill_uninitialized_memory", "dtensor_allow_implicit_replication"),
        *("float32_matmul_precision", "fp32_precision_setter", "fwd_grad_enabled"),
        *("grad_enabled", "grad_layout_enforcement_enabled", "linalg_preferred_backend"),
        *("math_sdp_allow_fp16_bf16_reduction", "miopen_immediate", "mkldnn_deterministic"),
        *("mkldnn_enabled", "native_aot_enabled", "native_aot_unconditional_masked"),
        *("nnpack_enabled", "onednn_allow_tf32", "qengine", "rocm_fa_preferred_backend"),
        *("sdp_priority_order", "sdp_use_cudnn", "sdp_use_fa3", "sdp_use_fa4", "sdp_use_flash"),
        *("sdp_use_math", "sdp_use_mem_efficient", "sdp_use_overrideable"),
        *("sm_carveout_experimental", "torch_function_state", "view_replay_enabled"),
        *("anomaly_enabled", "autocast_cache_enabled", "autocast_cpu_dtype", "num_threads"),
        *("autocast_cpu_enabled", "autocast_dtype", "autocast_enabled", "autocast_gpu_dtype"),
        *("autocast_ipu_dtype", "autocast_ipu_enabled", "autocast_xla_dtype"),
        *("autocast_xla_enabled", "flush_denormal"),
    }
)
"""Setters of switches in the key: `ambient_state` reads most of them. The number of threads is a
separate part of the key."""

_NOT_READ: Final = frozenset(
    {
        # Warnings, messages, logs and names.
        *("backcompat_broadcast_warn", "backcompat_keepdim_warn", "should_use_format"),
        *("print_stack_traces_on_fatal_signal", "should_use_format_with_string_table", "vital"),
        *("storage_access_error_msg", "storage_data_ptr_access_error_msg", "thread_name"),
        *("throw_on_mutable_data_ptr", "warnAlways", "warn_deprecated_on_mutable_data_ptr"),
        *("warn_on_accumulate_grad_stream_mismatch", "worker_pids", "worker_signal_handlers"),
        # State of one tensor, of TorchScript, or of a dispatch mode that tracing replaces.
        *("cached_tensors_enabled", "conj", "default_mobile_cpu_allocator", "dispatch_mode"),
        *("fake_constant", "generator_metaclass", "graph_exec_group", "graph_executor_optimize"),
        *("meta_in_tls_dispatch_include", "multithreading_enabled", "neg"),
        *("only_lift_cpu_tensors", "override_stale_capture_stream", "skip_next_torch_function"),
        *("tensor_metadata", "tracing_state", "value_trace"),
        "num_interop_threads",  # an executable reads it when it runs
    }
)
"""Setters of switches that change no executable."""

_SETTER: Final = re.compile(r"_?set_(\w+)")

_PRECISIONS: Final = (
    ("generic", "all"),
    *(("cuda", operation) for operation in ("all", "matmul", "conv", "rnn")),
    *(("mkldnn", operation) for operation in ("all", "matmul", "conv", "rnn")),
)

_AUTOCAST_DEVICES: Final = ("cpu", "cuda", "xpu", "mps", "mtia", "maia", "hpu", "ipu", "xla")


@cache
def unknown_switches() -> tuple[str, ...]:
    """Return the setters in the installed torch that this module does not list."""
    found = (_SETTER.fullmatch(name) for name in dir(torch._C))
    return tuple(sorted({each[1] for each in found if each} - _SET - _NOT_READ))


def ambient_state() -> str:
    """Return every switch with its state, one line each."""
    core: Any = torch._C
    lines = [f"{name}={read_part(getter)}" for name, getter in _getters()]
    lines.append(f"default_dtype={torch.get_default_dtype()}")
    for device in _devices():
        enabled = read_part(partial(torch.is_autocast_enabled, device))
        dtype = read_part(partial(torch.get_autocast_dtype, device))
        lines.append(f"autocast.{device}={enabled} {dtype}")
    if (precision := getattr(core, "_get_fp32_precision_getter", None)) is not None:
        lines += [
            f"fp32.{backend}.{operation}={read_part(partial(precision, backend, operation))}"
            for backend, operation in _PRECISIONS
        ]
    einsum: Any = opt_einsum
    lines.append(f"opt_einsum={einsum.enabled} {einsum.strategy}")
    lines.append(f"mha={mha.get_fastpath_enabled()}")
    settings: Any = symbols_config
    lines += [
        f"symbols.{name}={getattr(settings, name)}"
        for name in settings._config
        if is_changed(settings, name)
    ]
    if (scalars := os.environ.get(_SCALARS)) is not None:
        lines.append(f"scalars={scalars}")
    if flushed := flushed_denormals():
        lines.append(f"flush_denormal={flushed}")
    return "\n".join([*lines, f"onednn_fusions={_has_fusions()}", *_omitted_settings()])


def is_changed(module: Any, name: str) -> bool:
    """Return whether a setting of a config module of torch has another value than its default.

    torch counts each setting that was assigned as changed, also one that got its default back, as
    all do in `config.load_config(config.save_config())`.
    """
    if module._is_default(name):
        return False
    value, default = getattr(module, name), module._config[name].default
    return type(value) is not type(default) or bool(value != default)


def _omitted_settings() -> Iterator[str]:
    """Yield the settings that a program has changed, and that torch's keys omit.

    The keys omit Inductor's private settings, a setting of Dynamo that Inductor reads, and how
    AOTAutograd chooses what to keep for the backward pass (2.15). `user_code` describes the
    settings whose values are functions.
    """
    for module, name in _names_of_omitted():
        if is_changed(module, name):
            value = getattr(module, name)
            values = value if isinstance(value, list | tuple) else [value]
            plain = [each for each in values if isinstance(each, str | int | float)]
            yield f"setting.{name}={plain}"


@cache
def _names_of_omitted() -> list[tuple[Any, str]]:
    inductor: Any = config
    functorch: Any = functorch_config
    known: tuple[tuple[Any, str], ...] = (
        *((inductor, name) for name in inductor._config if name.startswith("_")),
        *((functorch, name) for name in getattr(functorch, "_save_config_ignore", ())),
        (dynamo_config, "skip_fsdp_hooks"),
    )
    return [(module, name) for module, name in known if name in module._config]


_known_fusions: list[Any] = [0, False]
"""Cache of `_has_fusions`: number of patterns, and the result."""


def _has_fusions() -> bool:
    """Return whether Inductor fuses operations of oneDNN.

    Before its first compilation, Inductor registers the fusions if mkldnn is enabled then. Later
    changes of that switch have no effect on them.
    """
    fusions = sys.modules.get("torch._inductor.fx_passes.mkldnn_fusion")
    register: Any = getattr(fusions, "_mkldnn_fusion_init", None)
    if register is None or not register.cache_info().currsize:
        return bool(torch.backends.mkldnn.enabled)
    entries = [each.patterns.values() for each in post_grad.pass_patterns]
    if (count := sum(map(len, chain(*entries)))) != _known_fusions[0]:
        handlers = [getattr(each, "handler", None) for each in chain(*chain(*entries))]
        modules = {getattr(each, "__module__", "") for each in handlers}
        _known_fusions[:] = [count, "torch._inductor.fx_passes.mkldnn_fusion" in modules]
    found: bool = _known_fusions[1]
    return found


@cache
def _getters() -> list[tuple[str, Callable[[], Any]]]:
    core: Any = torch._C
    return [(name, getattr(core, name)) for name in _READ if hasattr(core, name)]


@cache
def _devices() -> tuple[str, ...]:
    listed = getattr(torch._C, "_autocast_supported_devices", None)
    return tuple(listed()) if listed is not None else _AUTOCAST_DEVICES
