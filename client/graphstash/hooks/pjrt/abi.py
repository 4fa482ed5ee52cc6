"""The part of the PJRT C interface that the hook uses: function numbers and argument layouts.

A plug-in's `GetPjrtApi` returns the address of a table, which begins with its size, extensions and
version. The function pointers start at byte 40. Each function takes a pointer to a structure that
begins with the structure's size. It returns a `PJRT_Error *`, null for success; `Error_Destroy` and
`Error_Message` return nothing.

Source: xla/pjrt/c/pjrt_c_api.h and the CHANGELOG.md beside it. Version 0.57 was the last to reorder
the table. Later versions only append to the table and the structures. A test compares these numbers
with the header that a plug-in ships.
"""

import ctypes
from enum import IntEnum
from typing import Final

__all__ = [
    "FIRST_MINOR",
    "FUNCTIONS_OFFSET",
    "POINTER_BYTES",
    "PROFILER_EXTENSION",
    "TRIED_MINORS",
    "UNIMPLEMENTED",
    "AheadOfTimeArgs",
    "AskArgs",
    "ClientCompileArgs",
    "ClientCreateArgs",
    "Extension",
    "Function",
    "LoadArgs",
    "NamedValue",
    "Program",
    "TableHead",
]

FIRST_MINOR: Final = 57
"""First minor version with the current order of the table."""

TRIED_MINORS: Final = (81, 112)
"""Lowest and highest tested minor version: xla-cpu-pjrt 0.0.1 and libtpu 0.0.42.1."""

FUNCTIONS_OFFSET: Final = 40
POINTER_BYTES: Final = 8

PROFILER_EXTENSION: Final = 1
"""`PJRT_Extension_Type_Profiler`, which does not change what a call compiles."""

UNIMPLEMENTED: Final = 12
"""`PJRT_Error_Code_UNIMPLEMENTED`."""


class Function(IntEnum):
    """Index of each function in the table."""

    ERROR_DESTROY = 0
    ERROR_MESSAGE = 1
    ERROR_GET_CODE = 2
    CLIENT_CREATE = 10
    CLIENT_PLATFORM_NAME = 12
    CLIENT_PLATFORM_VERSION = 14
    CLIENT_COMPILE = 20
    DEVICE_DESCRIPTION_PROCESS_INDEX = 24
    DEVICE_DESCRIPTION_KIND = 26
    EXECUTABLE_DESTROY = 40
    EXECUTABLE_SERIALIZE = 49
    LOADED_EXECUTABLE_GET_EXECUTABLE = 51
    EXECUTABLE_DESERIALIZE_AND_LOAD = 56
    TOPOLOGY_DESCRIPTION_PLATFORM_NAME = 84
    TOPOLOGY_DESCRIPTION_PLATFORM_VERSION = 85
    TOPOLOGY_DESCRIPTION_GET_DEVICE_DESCRIPTIONS = 86
    TOPOLOGY_DESCRIPTION_SERIALIZE = 87
    COMPILE = 89
    CLIENT_TOPOLOGY_DESCRIPTION = 95


_HEAD: Final = (("struct_size", ctypes.c_size_t), ("extension_start", ctypes.c_void_p))
"""First fields of every structure."""


class TableHead(ctypes.Structure):
    """`PJRT_Api` up to its functions; `major` and `minor` belong to `PJRT_Api_Version`."""

    _fields_ = (
        *_HEAD,
        ("version_size", ctypes.c_size_t),
        ("version_extension_start", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    )


class AskArgs(ctypes.Structure):
    """Arguments of a function whose only input is one object, `subject`.

    The function writes a pointer or a number to `answer`, and the length of a text or array to
    `size`. A function that serializes also sets `backing`, and the `deleter` that frees it. The
    zeros in `later` stand for fields that later versions append. A plug-in refuses a structure that
    is shorter than its own, but accepts a longer one.
    """

    _fields_ = (
        *_HEAD,
        ("subject", ctypes.c_void_p),
        ("answer", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("backing", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("later", ctypes.c_uint64 * 8),
    )


class LoadArgs(ctypes.Structure):
    """`PJRT_Executable_DeserializeAndLoad_Args`. Options since 0.71. `later` as in `AskArgs`."""

    _fields_ = (
        *_HEAD,
        ("client", ctypes.c_void_p),
        ("serialized", ctypes.c_char_p),
        ("serialized_size", ctypes.c_size_t),
        ("loaded", ctypes.c_void_p),
        ("options", ctypes.c_void_p),
        ("options_size", ctypes.c_size_t),
        ("later", ctypes.c_uint64 * 8),
    )


class ClientCreateArgs(ctypes.Structure):
    """`PJRT_Client_Create_Args`, which a framework fills."""

    _fields_ = (
        *_HEAD,
        ("options", ctypes.c_void_p),
        ("options_count", ctypes.c_size_t),
        ("get_callback", ctypes.c_void_p),
        ("get_argument", ctypes.c_void_p),
        ("put_callback", ctypes.c_void_p),
        ("put_argument", ctypes.c_void_p),
        ("client", ctypes.c_void_p),
    )


class NamedValue(ctypes.Structure):
    """`PJRT_NamedValue`: an option. `value` holds a number, or the address of a text or array."""

    _fields_ = (
        *_HEAD,
        ("name", ctypes.c_void_p),
        ("name_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("value", ctypes.c_uint64),
        ("value_size", ctypes.c_size_t),
    )


class ClientCompileArgs(ctypes.Structure):
    """`PJRT_Client_Compile_Args`, which a framework fills."""

    _fields_ = (
        *_HEAD,
        ("client", ctypes.c_void_p),
        ("program", ctypes.c_void_p),
        ("options", ctypes.c_void_p),
        ("options_size", ctypes.c_size_t),
        ("executable", ctypes.c_void_p),
    )


class AheadOfTimeArgs(ctypes.Structure):
    """`PJRT_Compile_Args`: compile for a topology. `client` may be null."""

    _fields_ = (
        *_HEAD,
        ("topology", ctypes.c_void_p),
        ("program", ctypes.c_void_p),
        ("options", ctypes.c_void_p),
        ("options_size", ctypes.c_size_t),
        ("client", ctypes.c_void_p),
        ("executable", ctypes.c_void_p),
    )


class Extension(ctypes.Structure):
    """`PJRT_Extension_Base`: first fields of every extension. The extensions are a linked list."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
    )


class Program(ctypes.Structure):
    """`PJRT_Program`: code in the format `hlo`, `hlo_with_config` or `mlir`."""

    _fields_ = (
        *_HEAD,
        ("code", ctypes.c_void_p),
        ("code_size", ctypes.c_size_t),
        ("format", ctypes.c_void_p),
        ("format_size", ctypes.c_size_t),
    )
