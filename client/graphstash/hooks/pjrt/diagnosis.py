"""What `graphstash doctor` reports of the pjrt hook."""

from graphstash.config import ClientConfig
from graphstash.hooks.environment import installed_pjrt_plugins
from graphstash.hooks.spec import Verdict

__all__ = ["diagnose"]


def diagnose(_: ClientConfig) -> Verdict:
    """Name the plug-ins that the hook would serve."""
    if plugins := installed_pjrt_plugins():
        return Verdict(f"will be installed into {', '.join(plugins)} when it is loaded")
    return Verdict("no PJRT plug-in is installed")
