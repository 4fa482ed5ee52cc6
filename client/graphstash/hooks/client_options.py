"""The options with which a framework creates a PJRT client. The compilers' own keys lack them."""

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["options_by_jax", "text_of"]

_SAME_EXECUTABLE: Final = frozenset(
    {
        *("node_id", "partition_index", "visible_devices"),
        *("ml_framework_name", "ml_framework_version", "max_inflight_computations"),
        *("platform_name", "allocator", "memory_fraction", "preallocate"),
        *("collective_memory_size", "should_stage_host_to_device_transfers"),
        *("abort_collectives_on_failure", "use_tfrt_gpu_client"),
        "enable_mock_nccl",
    }
)
"""Options outside the key: they identify the rank, the framework or the platform, or decide only
how programs run. Programs that are compiled without a device have none of them."""

_CREATE: Final = "make_pjrt_c_api_client"
"""Name of JAX's function that creates the client of a plug-in; JAX 0.4.31 has none."""


def text_of(options: Mapping[str, object]) -> str:
    """Return the options that may change an executable, sorted."""
    kept = sorted((k, v) for k, v in options.items() if k not in _SAME_EXECUTABLE)
    return " ".join(f"{name}={value!r}" for name, value in kept)


def options_by_jax(xla_bridge: Any, platform: str) -> dict[str, Any] | None:
    """Return the options that JAX passes to a client, or None if they are unknown.

    Args:
        xla_bridge: JAX's module `jax._src.xla_bridge`.
        platform: JAX's name of the client's platform.
    """
    factory = xla_bridge._backend_factories[platform].factory
    given: Any = {}
    if platform != "tpu":
        if getattr(factory, "func", None) is not getattr(xla_bridge, _CREATE, factory):
            return None
        given = factory.keywords["options"] or {}
    return {
        **(given() if callable(given) else given),
        **xla_bridge._options_from_jax_configs(platform),
    }
