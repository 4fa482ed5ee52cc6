"""The settings of JAX's persistent cache while the hook is in it, and as they were before.

What the user has set, in the environment or in `jax.config`, stays as it is. For the rest:

    jax_compilation_cache_dir                  without one JAX has no persistent cache. Nothing is
                                               written there; the name is the same everywhere,
                                               because it can enter the key (0.4.36 to 0.10)
    jax_persistent_cache_enable_xla_caches     `none`: XLA's autotuning files would be kept in that
                                               directory, and its name would enter the key
    jax_persistent_cache_min_compile_time_secs 0: on a CPU a program of one operation compiles in
                                               10 to 40 ms; it is found on this host in 1 to 2 ms,
                                               on a server in less than 10. And every lease that
                                               is taken ends with an artifact: hosts that wait for
                                               one another's tiny programs would compile in turn
    jax_persistent_cache_min_entry_size_bytes  -1: no limit
"""

import os
from typing import Any, Final

import jax

__all__ = ["DIRECTORY", "Settings"]

DIRECTORY: Final = "/nonexistent/graphstash"
"""A name: nothing is ever written there."""

_PATH: Final = "jax_compilation_cache_dir"
_XLA_CACHES: Final = "jax_persistent_cache_enable_xla_caches"

_DEFAULTS: Final = {
    _PATH: None,
    _XLA_CACHES: "xla_gpu_per_fusion_autotune_cache_dir",
    "jax_persistent_cache_min_compile_time_secs": 1.0,
    "jax_persistent_cache_min_entry_size_bytes": 0,
}
"""As JAX ships them; what differs was set by the user."""


class Settings:
    """Sets what the user has not set, until `close`.

    Args:
        directory: stands for the persistent cache.
        insist: take the directory also where the user has another one.
    """

    def __init__(self, directory: str = DIRECTORY, *, insist: bool = False) -> None:
        wanted: dict[str, Any] = {
            _PATH: directory,
            _XLA_CACHES: "none",
            "jax_persistent_cache_min_compile_time_secs": 0.0,
            "jax_persistent_cache_min_entry_size_bytes": -1,
        }
        keep = {name for name in wanted if _is_users(name)}
        if _PATH not in keep:
            keep.discard(_XLA_CACHES)  # without a directory of his it could not have any effect
        elif insist:
            keep.discard(_PATH)
        self._set = {name: value for name, value in wanted.items() if name not in keep}
        self._before: dict[str, Any] = {}
        for name, value in self._set.items():
            if hasattr(jax.config, name):  # the second one is there since 0.4.36
                self._before[name] = getattr(jax.config, name)
                _update(name, value)

    def close(self) -> None:
        """Puts back what nobody has changed meanwhile."""
        for name, value in self._before.items():
            if getattr(jax.config, name) == self._set[name]:
                _update(name, value)


def _is_users(name: str) -> bool:
    if not hasattr(jax.config, name):
        return False
    return name.upper() in os.environ or getattr(jax.config, name) != _DEFAULTS[name]


def _update(name: str, value: object) -> None:
    jax.config.update(name, value)  # type: ignore[no-untyped-call] # of a typed package
