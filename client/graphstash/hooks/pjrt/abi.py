"""The PJRT C interface as far as the hook speaks it: numbers of functions, layouts of arguments.

A plug-in's `GetPjrtApi` returns the address of a table: its size, its extensions, its version, and
from byte 40 on one pointer per function. Every function takes one pointer, to a structure that
begins with its size, and returns a `PJRT_Error *`, null for success (`Error_Destroy` and
`Error_Message` return nothing). Source: xla/pjrt/c/pjrt_c_api.h and CHANGELOG.md beside it; both
the table and the structures only grow at their ends since 0.57, where the table's order was last
changed. A test holds these numbers against the header that a plug-in ships.
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
    "Program",
    "TableHead",
]

FIRST_MINOR: Final = 57
"""The table has had its order since 0.57."""

TRIED_MINORS: Final = (81, 112)
"""First and last minor version with tests: xla-cpu-pjrt 0.0.1 and libtpu 0.0.42.1."""

FUNCTIONS_OFFSET: Final = 40
POINTER_BYTES: Final = 8

PROFILER_EXTENSION: Final = 1
"""`PJRT_Extension_Type_Profiler`: links a call with the events of a profile, and means no more."""

UNIMPLEMENTED: Final = 12
"""`PJRT_Error_Code_UNIMPLEMENTED`."""


class Function(IntEnum):
    """Places in the table."""

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
"""How every structure begins."""


class TableHead(ctypes.Structure):
    """`PJRT_Api` up to its functions; `major` and `minor` are those of `PJRT_Api_Version`."""

    _fields_ = (
        *_HEAD,
        ("version_size", ctypes.c_size_t),
        ("version_extension_start", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    )


class AskArgs(ctypes.Structure):
    """The arguments of every function that is asked about one object, `subject`.

    The answer is the pointer `answer`, or a number in its place, or `answer` and `size`; what
    serializes adds `backing` and the function `deleter` that frees it. The zeroes behind stand for
    fields of later versions: a plug-in takes a structure that is longer than its own, and refuses
    one that is shorter.
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
    """`PJRT_Executable_DeserializeAndLoad_Args`; the options since 0.71, zeroes as above."""

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
    """`PJRT_Client_Create_Args`, as a framework fills it."""

    _fields_ = (
        *_HEAD,
        ("options", ctypes.c_void_p),
        ("options_size", ctypes.c_size_t),
        ("get_callback", ctypes.c_void_p),
        ("get_argument", ctypes.c_void_p),
        ("put_callback", ctypes.c_void_p),
        ("put_argument", ctypes.c_void_p),
        ("client", ctypes.c_void_p),
    )


class ClientCompileArgs(ctypes.Structure):
    """`PJRT_Client_Compile_Args`, as a framework fills it."""

    _fields_ = (
        *_HEAD,
        ("client", ctypes.c_void_p),
        ("program", ctypes.c_void_p),
        ("options", ctypes.c_void_p),
        ("options_size", ctypes.c_size_t),
        ("executable", ctypes.c_void_p),
    )


class AheadOfTimeArgs(ctypes.Structure):
    """`PJRT_Compile_Args`: compiles for a topology, with or without a client."""

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
    """`PJRT_Extension_Base`: the head of one of the extensions of a structure; they are a chain."""

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
