"""What `graphstash doctor` reports about torch_xla 2.8 and newer, which cannot load its graphs."""

from graphstash.config import ClientConfig
from graphstash.hooks.environment import installed_pjrt_plugins, version_of
from graphstash.hooks.spec import Verdict
from graphstash.hooks.torch_xla import SPEC

__all__ = ["diagnose"]


def diagnose(config: ClientConfig) -> Verdict | None:
    """Return a verdict that refers to the pjrt hook, or None for torch_xla 2.7 and older."""
    version = version_of("torch_xla")
    if SPEC.tested is None or not SPEC.tested.is_above(version):
        return None
    plugins = installed_pjrt_plugins()
    if plugins and config.wants_hook("pjrt"):
        return Verdict(
            f"torch_xla {version} cannot load cached graphs; {', '.join(plugins)}: see pjrt hook"
        )
    return Verdict(
        f"torch_xla {version} is not supported: its own cache cannot load a compiled graph "
        "(pytorch/xla#9094)",
        "on a TPU or another PJRT plug-in the pjrt hook shares it (GRAPHSTASH_HOOKS must hold "
        "pjrt); on the built-in CPU device install torch_xla 2.7",
    )
