"""The hook's description of the PJRT interface matches the header that a plug-in ships."""

import ctypes
import re

import pytest

from graphstash.errors import CacheError
from graphstash.hooks.pjrt import abi
from graphstash.hooks.pjrt.api import view_of
from graphstash.hooks.pjrt.fingerprint import Fingerprints, Topology, is_portable
from graphstash.hooks.pjrt.plugins import is_writable, loaded_plugins, plugin_at
from support.pjrt_plugin import LIBRARY

FUNCTIONS = {
    abi.Function.COMPILE: "PJRT_Compile",
    **{
        function: "PJRT_" + "".join(word.capitalize() for word in function.name.split("_"))
        for function in abi.Function
        if function is not abi.Function.COMPILE
    },
}
ASKED = {
    "Error_Message": "error message message_size",
    "Error_GetCode": "error code",
    "Error_Destroy": "error",
    "Client_PlatformName": "client platform_name platform_name_size",
    "Client_TopologyDescription": "client topology",
    "DeviceDescription_Kind": "device_description device_kind device_kind_size",
    "DeviceDescription_ProcessIndex": "device_description process_index",
    "TopologyDescription_GetDeviceDescriptions": "topology descriptions num_descriptions",
    "LoadedExecutable_GetExecutable": "loaded_executable executable",
    "Executable_Destroy": "executable",
    "Executable_Serialize": "executable serialized_bytes serialized_bytes_size "
    "serialized_executable serialized_executable_deleter",
    "TopologyDescription_Serialize": "topology serialized_bytes serialized_bytes_size "
    "serialized_topology serialized_topology_deleter",
}
"""Fields of the structures that the hook passes to query an object."""

FILLED = {
    "PJRT_Client_Compile_Args": abi.ClientCompileArgs,
    "PJRT_Compile_Args": abi.AheadOfTimeArgs,
    "PJRT_Program": abi.Program,
    "PJRT_Executable_DeserializeAndLoad_Args": abi.LoadArgs,
}


@pytest.fixture(scope="module")
def package():
    """The directory of the plug-in's package."""
    return LIBRARY.parent


@pytest.fixture(scope="module")
def header(package):
    text = (package / "include" / "pjrt_c_api.h").read_text()
    return re.sub(r"//[^\n]*", "", text)


def fields_of(header, name):
    """Return the fields behind size and extensions. Each field takes 8 bytes, except the last."""
    (body,) = re.findall(rf"struct {name} \{{(.*?)\n\}}", header, re.DOTALL)
    declared = [
        re.sub(r"\(\*(\w+)\)\(.*\)", r"\1", line, flags=re.DOTALL) for line in body.split(";")
    ]
    names = [re.split(r"[\s*]+", line.strip())[-1] for line in declared if line.strip()]
    assert names[:2] == ["struct_size", "extension_start"]
    return tuple(names[2:])


def test_function_offsets_equal_the_header(header):
    table = header[header.index("typedef struct PJRT_Api {") :]
    listed = re.findall(r"_PJRT_API_STRUCT_FIELD\((\w+)\)", table)
    lower = [name.replace("_", "").lower() for name in listed]
    for function, name in FUNCTIONS.items():
        assert lower[function] == name.replace("_", "").lower()


def test_query_structures_have_one_layout(header):
    for name, fields in ASKED.items():
        assert fields_of(header, f"PJRT_{name}_Args") == tuple(fields.split())
    offsets = [getattr(abi.AskArgs, name).offset for name, _ in abi.AskArgs._fields_]
    assert offsets == [0, 8, 16, 24, 32, 40, 48, 56]


def test_other_structures_have_fields_of_the_header_in_order(header):
    for name, structure in FILLED.items():
        ours = [field for field, _ in structure._fields_[2:] if field != "later"]
        assert len(ours) == len(fields_of(header, name)), name
        assert [getattr(structure, field).offset for field in ours] == [
            16 + 8 * n for n in range(len(ours))
        ]


def test_codes_and_extensions_equal_the_header(header):
    assert f"PJRT_Error_Code_UNIMPLEMENTED = {abi.UNIMPLEMENTED}" in header
    listed = re.findall(r"PJRT_Extension_Type_(\w+)", header)
    assert listed[abi.PROFILER_EXTENSION] == "Profiler"


def test_plug_in_is_found_by_its_path_and_then_among_loaded_libraries(package):
    path = package / "xla_cpu_pjrt.so"
    plugin = plugin_at(str(path))
    assert (plugin.path, plugin.api.major, plugin.api.minor) == (path, 0, 81)
    assert plugin.api.table in [found.api.table for found in loaded_plugins()]
    assert is_writable(plugin.api.table)
    assert plugin.identity.startswith(f"xla_cpu_pjrt.so {path.stat().st_size} ")


def test_library_without_plug_in_is_ignored():
    assert plugin_at("libc.so.6") is None


def test_the_key_has_the_threads_of_the_client_that_compiles(package, monkeypatch):
    """XLA splits loops for the number of threads that it reads when the client starts."""
    fingerprints = Fingerprints(plugin_at(str(package / "xla_cpu_pjrt.so")))
    topology = Topology("cpu", "1", "none", (), device_count=1, process_count=1)
    code, form = ctypes.create_string_buffer(b"module"), ctypes.create_string_buffer(b"mlir")
    program = abi.Program(
        code=ctypes.addressof(code), code_size=6, format=ctypes.addressof(form), format_size=4
    )
    for client, number in ((1, "5"), (2, "7")):
        monkeypatch.setenv("NPROC", number)
        fingerprints.add_client(client, fingerprints.observe_environment(), {})
    monkeypatch.setenv("NPROC", "3")

    def threads_of(client):
        args = abi.ClientCompileArgs(client=client, program=ctypes.addressof(program))
        return fingerprints.parts(args, topology)["threads"]

    assert [threads_of(client) for client in (1, 2)] == ["5", "7"]
    assert threads_of(None) == "3"  # compiled ahead of time
    with pytest.raises(CacheError, match="whose options are unknown"):
        threads_of(9)  # a client that started before the hook


def test_a_program_that_calls_back_into_its_process_is_not_shared():
    code = ctypes.create_string_buffer(b"...xla_ffi_python_cpu_callback...")
    assert not is_portable(view_of(ctypes.addressof(code), len(code)))
    assert is_portable(view_of(ctypes.addressof(code), 10))
    assert is_portable(view_of(None, 0))
