"""Read the options that a framework passes to `PJRT_Client_Create`."""

import struct
from typing import Final

from graphstash.hooks.pjrt.abi import ClientCreateArgs, NamedValue
from graphstash.hooks.pjrt.api import view_of

__all__ = ["client_options"]

_NUMBERS: Final = {1: "<q", 3: "<f", 4: "?"}
"""Format of a number by `PJRT_NamedValue_Type`, at the first bytes of `value`."""

_TEXT: Final = 0
_ARRAYS: Final = {_TEXT: 1, 2: 8}
"""Bytes of an element by `PJRT_NamedValue_Type`: text, and a list of integers."""

_VALUE: Final = NamedValue.value.offset


def client_options(args: ClientCreateArgs) -> dict[str, object]:
    """Return the options by name.

    Raises:
        KeyError: The type of an option is not known.
    """
    found: dict[str, object] = {}
    for each in (NamedValue * args.options_count).from_address(args.options or 0):
        name = bytes(view_of(each.name, each.name_size)).decode("utf-8", "replace")
        if each.type in _ARRAYS:
            array = bytes(view_of(each.value, each.value_size * _ARRAYS[each.type]))
            text, numbers = array.decode("utf-8", "backslashreplace"), memoryview(array)
            found[name] = text if each.type == _TEXT else numbers.cast("q").tolist()
        else:
            found[name] = struct.unpack_from(_NUMBERS[each.type], bytes(each), _VALUE)[0]
    return found
