"""Option: declares beside a setting that a command takes it on its command line."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["Option"]


class Option(NamedTuple):
    """Option of a setting: `--<name of the setting> <value>`, or flags.

    Attributes:
        flags: maps each flag to the value that it gives the setting. Empty for an option that
            takes a value.
        help: help of flags whose meaning is not the one of the setting, such as `--quiet`.
    """

    flags: Mapping[str, bool] = MappingProxyType({})
    help: str = ""

    def spelled(self, setting: str) -> str:
        """Return the option as in help pages: `--url`, or `--read-only / --read-write`."""
        sides = (", ".join(self.giving(value=value)) for value in (True, False))
        return " / ".join(filter(None, sides)) or f"--{setting.replace('_', '-')}"

    def giving(self, *, value: bool) -> list[str]:
        """Return the flags that give the setting this value."""
        return [flag for flag, given in self.flags.items() if given is value]
