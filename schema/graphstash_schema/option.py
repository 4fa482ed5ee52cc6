"""Option: declares that a setting is also an option of commands."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["Option"]


class Option(NamedTuple):
    """Option of a setting: `--<setting> <value>`, or flags.

    Attributes:
        flags: value of the setting by flag. Empty for an option with a value.
        help: replaces the setting's description in the help if the flags do something else.
            `--quiet` switches `summary` off, and `--explain` cannot set `explain` to `live`.
    """

    flags: Mapping[str, bool] = MappingProxyType({})
    help: str = ""

    def spelled(self, setting: str) -> str:
        """Return the option as the help prints it: `--url`, or `--read-only / --read-write`."""
        sides = (", ".join(self.flags_for(value=value)) for value in (True, False))
        return " / ".join(filter(None, sides)) or f"--{setting.replace('_', '-')}"

    def flags_for(self, *, value: bool) -> list[str]:
        """Return the flags that give the setting this value."""
        return [flag for flag, given in self.flags.items() if given is value]
