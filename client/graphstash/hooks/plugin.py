"""Keys for hooks of other packages, whose compilers have no artifact kind of their own."""

from collections.abc import Mapping

from graphstash.hooks.environment import cpu_device_type
from graphstash_schema import ArtifactKey, ArtifactKind, DeviceType, fingerprint_of

__all__ = ["plugin_key"]


def plugin_key(
    hook: str, parts: Mapping[str, str], *, device_type: DeviceType | None = None
) -> ArtifactKey:
    """Return the key of a program that a hook of another package shares.

    Args:
        hook: name of the hook, which separates the keys of different compilers.
        parts: everything that changes the result, by name: the program, options, versions of the
            compiler and of its tools. 1 to 255 parts, none of them called `hook`.
        device_type: hardware that can load the result. Default: CPUs with the features of this
            host's CPU.

    Raises:
        ValueError: the number of parts or a part's name is invalid.
    """
    if not parts or "hook" in parts:
        raise ValueError("a key needs parts, and the part `hook` is the hook's name")
    return ArtifactKey(
        kind=ArtifactKind.PLUGIN,
        device_type=device_type or cpu_device_type(),
        fingerprint=fingerprint_of(ArtifactKind.PLUGIN, {"hook": hook, **parts}),
    )
