"""JAX: every plug-in is loaded by `xla_client.load_pjrt_plugin_dynamically(name, library_path)`.

By its path the plug-in is loaded, and its table patched, right before. The function has had this
name and these arguments in JAX 0.4.31 to 0.10.2, for TPUs, GPUs and all other plug-ins.
"""

from collections.abc import Callable
from typing import Any, Final

import jaxlib.xla_client

__all__ = ["JaxSeam"]

_LOADER: Final = "load_pjrt_plugin_dynamically"


class JaxSeam:
    """Tells of every plug-in that JAX is about to load.

    Args:
        attach: called with the path; must not raise.

    Raises:
        AttributeError: this JAX loads plug-ins in another way.
    """

    def __init__(self, attach: Callable[[str], None]) -> None:
        self._load: Callable[..., Any] = getattr(jaxlib.xla_client, _LOADER)

        def load(plugin_name: str, library_path: str) -> Any:
            attach(str(library_path))
            return self._load(plugin_name, library_path)

        self._wrapper = load
        setattr(jaxlib.xla_client, _LOADER, load)

    def close(self) -> None:
        """Gives JAX its function back."""
        if getattr(jaxlib.xla_client, _LOADER) is self._wrapper:
            setattr(jaxlib.xla_client, _LOADER, self._load)
