"""Hooks put the cache inside compilers. Only a hook's own modules import its compiler here.

    spec        HookSpec, which describes a hook
    registry    the hooks of all installed packages
    installing, import_hook     install a hook when its compiler is imported

No hook raises into a compiler, and every wait has a bound. The names here are for packages that
bring hooks of their own.
"""

from typing import TYPE_CHECKING

from graphstash._lazy import lazy

if TYPE_CHECKING:
    from graphstash.hooks.environment import cpu_device_type
    from graphstash.hooks.plugin import plugin_key
    from graphstash.hooks.spec import Hook, HookSpec, TestedVersions, Verdict

__all__ = ["Hook", "HookSpec", "TestedVersions", "Verdict", "cpu_device_type", "plugin_key"]

__getattr__, __dir__ = lazy(__name__)
