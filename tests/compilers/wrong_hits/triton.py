"""Pairs of programs for Triton, compiled for an absent GPU."""

from typing import Any

from compilers.wrong_hits.pairs import (
    OFF_AND_ON,
    Pair,
    Relation,
    all_in_one_process,
    pair,
    with_extended,
)

__all__ = ["PAIRS", "VERSIONS", "WITH_ASSEMBLER", "forget", "install", "prepare"]

VERSIONS = {"3.3.0": "", "3.9.0": "torch-newest"}
"""Environment by Triton's version; empty is the tests' own."""


def prepare() -> None:
    """Import Triton and hash its files, which every key contains."""
    import triton
    from triton.compiler import compiler
    from triton.runtime import cache

    import graphstash.hooks.triton.hook  # noqa: F401 - imported once, for all programs

    (getattr(compiler, "triton_key", None) or cache.triton_key)()
    assert triton.__version__


def install(cache: Any) -> None:
    from graphstash.hooks.triton.hook import install

    assert install(cache) is not None


def forget() -> None:
    """Drop nothing: each program defines its own functions."""


_START = """
import functools
import os
import types

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Triton 3.3 has no functions that it runs; there these are functions that it inlines.
at_compilation = getattr(triton, "constexpr_function", triton.jit)


def compile(kernel, kind="*fp32", arch=90, options=None, **constants):
    signature = {"x": kind} | {name: "constexpr" for name in constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


"""

_STORE = """
@triton.jit
def kernel(x):
    tl.store(x, tl.load(x) * EXPRESSION)


compile(kernel)
"""


_ASSEMBLER = """
path = os.path.abspath("ptxas")
with open(path, "w") as file:
    file.write(f'''#!/bin/sh
case "$*" in *--version*) ;; *) CHANGE ;; esac
exec "{os.path.dirname(triton.__file__)}/backends/nvidia/bin/ptxas" "$@"
''')
os.chmod(path, 0o755)
os.environ |= {"TRITON_PTXAS_PATH": path, "TRITON_CACHE_DIR": os.path.abspath("cache")}
"""

WITH_ASSEMBLER = f"{_START}{_ASSEMBLER}{_STORE}".replace("EXPRESSION", "2.0")
"""A program with its own assembler, which runs the shell's command `CHANGE` while it assembles."""


def _reads(name: str, before: str, expression: str, *values: str, **how: Any) -> Pair:
    """Return a pair whose kernel reads a value outside the kernel."""
    return pair(
        name, f"{_START}{before}\n{_STORE.replace('EXPRESSION', expression)}", *values, **how
    )


def _compiles(name: str, call: str, *values: str, before: str = "", **how: Any) -> Pair:
    """Return a pair that compiles one kernel in two ways."""
    text = f"{_START}{before}\n{_STORE}".replace("EXPRESSION", "2.0").replace(
        "\ncompile(kernel)", ""
    )
    return pair(name, f"{text}\n{call}", *values, **how)


_CALL = "compile(kernel, kind='*fp32', arch=90, options=None)"

_VALUES = (
    pair("operation", f"{_START}{_STORE}".replace("EXPRESSION", "HERE"), "2.0", "3.0"),
    _reads("global", "NUMBER = tl.constexpr(HERE)", "NUMBER", "2.0", "3.0"),
    _reads("sign of a zero", "NUMBER = tl.constexpr(HERE)", "NUMBER", "0.0", "-0.0"),
    _reads("sign of NaN", "NUMBER = tl.constexpr(HEREfloat('nan'))", "NUMBER", "+", "-"),
    _reads("type of a global", "KIND = HERE", "KIND(2)", "tl.float16", "tl.bfloat16"),
    _reads("global without a mark", "NUMBER = HERE", "NUMBER", "2.0", "3.0"),
    _reads("attribute of an object", "config = types.SimpleNamespace(by=HERE)", "config.by"),
    _reads("attribute of a class", "class Config:\n    by = HERE", "Config.by"),
    _reads(
        "dictionary of a module that a function reads",
        "TABLE = {'k': HERE}\n\n@at_compilation\ndef by(key):\n    return TABLE[key]",
        "by('k')",
    ),
    _reads(
        "dictionary as a default of a function",
        "@at_compilation\ndef by(key, table={'k': HERE}):\n    return table[key]",
        "by('k')",
    ),
    _reads(
        "default of an inner function",
        "@triton.jit\ndef by(x, factor: tl.constexpr = HERE):\n    return x * factor",
        "by(1)",
    ),
    _reads(
        "closure of a function",
        "def make(value):\n    @at_compilation\n    def by(key):\n        return value\n"
        "    return by\n\nby = make(HERE)",
        "by('k')",
    ),
    _reads(
        "closure of a kernel",
        "def make(value):\n    @triton.jit\n    def by(x):\n        return x * value\n"
        "    return by\n\nby = make(tl.constexpr(HERE))",
        "by(1)",
    ),
    _reads(
        "partial that a function calls",
        "CALLS = [functools.partial(max, HERE)]\n\n@at_compilation\n"
        "def by(key, calls=CALLS):\n    return calls[0](1)",
        "by('k')",
    ),
    _reads(
        "inlining of an inner function",
        "@triton.jit(noinline=HERE)\ndef by(x):\n    return x * 2",
        "by(1)",
        *OFF_AND_ON,
    ),
    _reads(
        "checks of an inner function",
        "@triton.jit(debug=HERE)\ndef by(x):\n    tl.device_assert(x == 1)\n    return x * 2",
        "by(1)",
        *OFF_AND_ON,
    ),
    _reads(
        "external function of a device library",
        "@tl.core.extern\ndef by(x, _builder=None, _semantic=None):\n"
        "    return tl.core.extern_elementwise('', '', [x], {(tl.float32,):\n"
        "        ('__nv_HEREf', tl.float32)}, is_pure=True, _builder=_builder)",
        "by(x)",
        "sin",
        "cos",
    ),
    _reads(
        "text of a kernel",
        "NUMBER = tl.constexpr(HERE)\n\n@triton.jit\ndef by(x):\n    return x * 2.0\n\n"
        "by._unsafe_update_src(by.src.replace('2.0', 'NUMBER'))",
        "by(1)",
    ),
    _reads(
        "text of a kernel whose key is known",
        "@triton.jit\ndef by(x):\n    return x * 2\n\nby.cache_key\n"
        "vars(by)['_src' if '_src' in vars(by) else 'src'] = by.src.replace('2', 'HERE')",
        "by(1)",
    ),
    _reads(
        "name of one of two functions",
        "def make(value):\n    @triton.jit\n    def by(x):\n        return x * value\n"
        "    return by\n\none, two = make(tl.constexpr(2)), make(tl.constexpr(3))\n"
        "one.__name__ = one.__qualname__ = 'one'\ntwo.__name__ = two.__qualname__ = HERE",
        "(one(1) + two(1))",
        "'one'",
        "'two'",
    ),
    _reads(
        "default in a signature",
        "import inspect\n\ndef by(x, factor: tl.constexpr = 2):\n    return x * factor\n\n"
        "by.__signature__ = inspect.signature(lambda x, factor=HERE: x)\nby = triton.jit(by)",
        "by(1)",
    ),
    _reads(
        "global with the name of a wrapper's argument",
        "NUMBER = tl.constexpr(HERE)\n\ndef wrapped(function):\n    @functools.wraps(function)\n"
        "    def wrapper(x, NUMBER):\n        return function(x)\n    return wrapper\n\n"
        "@triton.jit\n@wrapped\ndef by(x):\n    return x * NUMBER",
        "by(1)",
    ),
    _reads(
        "global that a closure hides only in later versions",
        "NUMBER = tl.constexpr(HERE)\n\ndef make(NUMBER):\n    @triton.jit\n    def by(x):\n"
        "        return x * NUMBER\n    return by\n\nby = make(2)",
        "by(1)",
        only_in="",
    ),
    _reads(
        "globals that a program assigns",
        "@triton.jit\ndef by(x):\n    return x * NUMBER\n\n"
        "by.__globals__ = globals() | {'NUMBER': tl.constexpr(HERE)}",
        "by(1)",
    ),
    _reads(
        "class of a function",
        "class Mine(triton.runtime.jit.JITFunction):\n    by = HERE\n\n"
        "def by(x):\n    return x * 2\n\nby = Mine(by)",
        "by(1)",
    ),
    _reads(
        "global that a local hides later",
        "n = tl.constexpr(HERE)\n\n@triton.jit\ndef by(x):\n    m = x * n\n    n = m\n    return n",
        "by(1)",
    ),
    _reads(
        "function in place of one of Triton",
        "@triton.jit\ndef mine(x):\n    return x * HERE\n\ntl.cdiv = mine",
        "tl.cdiv(1)",
    ),
)

_MINE = "@triton.jit\ndef mine(a, b):\n    return a + b * HERE\n\n"

_REPLACED = (
    _reads(
        "attribute of a function of Triton",
        "tl.cdiv.by = HERE\n\n@at_compilation\ndef by(key):\n    return tl.cdiv.by",
        "by('k')",
    ),
    _reads(
        "function that a function of Triton calls",
        f"{_MINE}tl.standard._sum_combine = mine",
        "tl.sum(tl.load(x + tl.arange(0, 4)), axis=0)",
        "5",
        "7",
    ),
    _reads(
        "text of a function of Triton",
        "tl.cdiv._unsafe_update_src(tl.cdiv.src + '\\n# HERE')",
        "tl.cdiv(1, 2)",
    ),
    _reads(
        "option of a function of Triton",
        "tl.cdiv.noinline = HERE",
        "tl.cdiv(3, 2)",
        *OFF_AND_ON,
    ),
    _compiles(
        "class that a program adds to Triton before the hook looks",
        "import triton.tools.link\n\nclass Mine:\n    by = HERE\n\n"
        f"triton.tools.link.Mine = Mine\n{_CALL}",
    ),
    _compiles(
        "class of a source",
        _CALL,
        before="class Mine(ASTSource):\n    by = HERE\n\nASTSource = Mine\n",
    ),
    _reads(
        "text of a function that a function of Triton calls",
        "inner = tl.standard._sum_combine\ntl.sum.cache_key\n"
        "inner._unsafe_update_src(inner.src + '\\n# HERE')",
        "tl.sum(tl.load(x + tl.arange(0, 4)), axis=0)",
    ),
    _compiles("number of Triton", f"tl.core.TRITON_MAX_TENSOR_NUMEL = HERE\n{_CALL}", "64", "128"),
    *(
        _compiles(
            f"{name} that a program replaces",
            _CALL,
            before=f"""
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler.code_generator import CodeGenerator

old = {owner}.{method}


def new(*given):
    print(HERE)
    return old(*given)


{owner}.{method} = {replaced}
""",
        )
        for name, owner, method, replaced in (
            ("pass of a compiler", "CUDABackend", "make_ttir", "staticmethod(new)"),
            ("step of the generator of code", "CodeGenerator", "visit_BinOp", "new"),
            ("source of a kernel", "ASTSource", "make_ir", "new"),
        )
    ),
    _compiles(
        "pass of the compiler in Triton's table",
        "from triton.backends import backends\n"
        f"backends['nvidia'].compiler.make_ttir = lambda *_: HERE\n{_CALL}",
    ),
)

_IN_PLACE = (
    (
        "backends",
        """
import dataclasses

from triton.backends import backends


class Mine(backends["nvidia"].compiler):
    by = HERE


backends["nvidia"] = dataclasses.replace(backends["nvidia"], compiler=Mine)
""",
    ),
    (
        "load_dialects",
        """
from triton.backends import backends

backends["nvidia"].compiler.load_dialects.__defaults__ = (HERE,)
""",
    ),
    (
        "make_ir",
        "ASTSource.make_ir.__code__ = (lambda *_: HERE).__code__",
    ),
)
"""Members of Triton, and programs that change them without a replacement."""

_ARGUMENTS = (
    _compiles("type of an argument", _CALL.replace("*fp32", "*HERE"), "fp32", "fp16"),
    _compiles("architecture", _CALL.replace("90", "HERE"), "90", "80"),
    _compiles("stages", _CALL.replace("None", "{'num_stages': HERE}")),
    _compiles(
        "fusion of additions",
        _CALL.replace("None", "{'enable_fp_fusion': HERE}"),
        "True",
        "False",
    ),
    _compiles(
        "contents of a device library",
        "open('mine.bc', 'w').write('HERE')\n"
        + _CALL.replace("None", "{'extern_libs': {'mine': os.path.abspath('mine.bc')}}"),
        "one",
        "another",
    ),
    _compiles(
        "order of device libraries",
        _CALL.replace("None", "{'extern_libs': {name: name for name in HERE}}"),
        "('one', 'other')",
        "('other', 'one')",
        before="for name in ('one', 'other'):\n    open(name, 'w').write(name)",
    ),
    _compiles(
        "device library that changes after the first kernel",
        _CALL.replace("None", "options"),
        before="""
open("mine.bc", "w").write("2")
options = {"extern_libs": {"mine": "mine.bc"}}
triton.compiler.make_backend(GPUTarget("cuda", 90, 32)).parse_options(options).hash()
open("mine.bc", "w").write("HERE")
""",
    ),
    pair(
        "fields of a named tuple with a text of its own",
        f"""{_START}
from typing import NamedTuple


class Pair(NamedTuple):
    one: str
    other: str

    def __repr__(self):
        return "a pair"


@triton.jit
def kernel(x, numbers):
    tl.store(x, numbers.one.to(tl.int64) * numbers.other.to(tl.int64))


signature = {{"x": "*i64", "numbers": Pair("i32", "HERE")}}
source = ASTSource(fn=kernel, signature=signature, constexprs={{}})
triton.compile(source, target=GPUTarget("cuda", 90, 32))
""",
        "i32",
        "i64",
    ),
    pair(
        "form of a text",
        f"""{_START}
text = 'module attributes {{"ttg.num-ctas" = 1 : i32, "ttg.num-warps" = 4 : i32}} {{'
with open("kernel.HERE", "w") as file:
    file.write(text + "tt.func public @kernel() {{tt.return}}}}")
triton.compile("kernel.HERE", target=GPUTarget("cuda", 90, 32))
""",
        "ttir",
        "ttgir",
    ),
    pair(
        "value of an argument",
        f"""{_START}
@triton.jit
def kernel(x, by: tl.constexpr):
    tl.store(x, tl.load(x) * by)


compile(kernel, by=HERE)
""",
    ),
    pair(
        "dictionary as an argument",
        f"""{_START}
class Table:
    def __init__(self, by):
        self.by = by

    def __repr__(self):
        return "a table"


@triton.jit
def kernel(x, table: tl.constexpr):
    tl.store(x, tl.load(x) * table.by)


compile(kernel, table=Table(HERE))
""",
    ),
    pair(
        "function as an argument",
        f"""{_START}
NUMBER = tl.constexpr(HERE)


@triton.jit
def times(x):
    return x * NUMBER


@triton.jit
def kernel(x, function: tl.constexpr):
    tl.store(x, function(tl.load(x)))


compile(kernel, function=times)
""",
    ),
    pair(
        "configuration of a tuner",
        f"""{_START}
configs = [triton.Config({{"BY": HERE}}, num_warps=4)]


@triton.autotune(configs, key=[], do_bench=lambda call, quantiles: 1.0)
@triton.heuristics({{"MORE": lambda arguments: arguments["BY"] + 1}})
@triton.jit
def kernel(x, BY: tl.constexpr, MORE: tl.constexpr):
    tl.store(x, tl.load(x) * BY + MORE)


chosen = kernel.configs[0]
more = kernel.fn.values["MORE"](chosen.kwargs)
compile(kernel.fn.fn, options={{"num_warps": chosen.num_warps}}, MORE=more, **chosen.kwargs)
""",
    ),
)


def _environment(name: str, *values: str, **how: Any) -> Pair:
    """Return a pair whose environments differ."""
    return _compiles(name, f"os.environ.update(HERE)\n{_CALL}", *values, **how)


_ENVIRONMENT = (
    _environment("optimization of the assembler", "{}", "{'DISABLE_PTXAS_OPT': '1'}"),
    _environment("precision of products", "{}", "{'TRITON_F32_DEFAULT': 'ieee'}"),
    _environment("sanitizer of addresses", "{}", "{'TRITON_ENABLE_ASAN': '1'}"),
    _environment("version of PTX", "{}", "{'TRITON_MOCK_PTX_VERSION': '12.0'}"),
    _environment(
        "pass of the user",
        "{}",
        "{'LLVM_PASS_PLUGIN_PATH': '/mine.so'}",
        reason="LLVM_PASS_PLUGIN_PATH",
    ),
    _compiles(
        "linker for AMD",
        "triton.compile(ASTSource(fn=kernel, signature={'x': '*fp32'}, constexprs={}),\n"
        "    target=GPUTarget('hip', 'gfx942', 64))",
        before="""
from triton.backends.amd import compiler

compiler.get_amd_codegen_revision = lambda: "1"  # since 3.9, of a library
path = os.path.abspath("linker")
with open(path, "w") as file:
    file.write("#!/bin/sh\\n# HERE\\necho 1")
os.chmod(path, 0o755)
os.environ |= {"TRITON_HIP_LLD_PATH": path, "TRITON_AMD_CODEGEN_PATH": path}
""",
    ),
    _environment(
        "program in place of the assembler",
        "assembler('one')",
        "assembler('another')",
        before="""
def assembler(word):
    path = os.path.abspath("ptxas")
    with open(path, "w") as file:
        file.write(f"#!/bin/sh\\n# {word}\\necho release 12.8, V12.8.93\\n")
    os.chmod(path, 0o755)
    return {"TRITON_PTXAS_PATH": path, "TRITON_PTXAS_BLACKWELL_PATH": path}
""",
    ),
)


_NEWEST = {"only_in": "torch-newest"}

_OF_PROCESS = (
    _compiles(
        "setting that is no plain value",
        f"triton.knobs.nvidia.disable_ptxas_opt = HERE\n{_CALL}",
        "0.0",
        "1.0",
        **_NEWEST,
    ),
    _reads(
        "setting that a function reads",
        "os.environ['TRITON_PRINT_AUTOTUNING'] = 'HERE'\n\n@at_compilation\ndef by():\n"
        "    return 3 if triton.knobs.autotuning.print else 2",
        "by()",
        "0",
        "1",
        **_NEWEST,
    ),
    _compiles(
        "file of Triton",
        _CALL,
        before="""
import glob
import shutil

os.mkdir("copy")
for file in glob.glob(os.path.dirname(triton.__file__) + "/*.py"):
    shutil.copy(file, "copy")
with open("copy/_utils.py", "a") as file:
    file.write("FACTOR = HERE")
triton.__path__ = ["copy"]
""",
    ),
    pair(
        "GPU of the process, for which Triton does not compile",
        f"""{_START}
from triton.runtime import driver


class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", HERE, 32)


@triton.jit
def kernel(x):
    if tl.target_info.cuda_capability_geq(9, 0):
        tl.store(x, 1.0)
    else:
        tl.store(x, 2.0)


driver.set_active(Driver())
compile(kernel)
""",
        "90",
        "80",
        **_NEWEST,
    ),
    pair(
        "file of Gluon",
        """
import os
import shutil
import sys

import triton
import triton.experimental

shutil.copytree(os.path.dirname(triton.__file__) + "/experimental", "experimental")
with open("experimental/gluon/language/_semantic.py", "a") as file:
    file.write("FACTOR = HERE")
triton.experimental.__path__[:] = [os.path.abspath("experimental")]
for name in [name for name in sys.modules if name.startswith("triton.experimental.")]:
    del sys.modules[name]

from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource


@gluon.jit
def kernel(x):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, 128, layout)
    gl.store(x + at, gl.load(x + at) * 2)


source = GluonASTSource(fn=kernel, signature={"x": "*fp32"}, constexprs={})
triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
""",
        **_NEWEST,
    ),
)

_UNSHARED = (
    *(
        _compiles(
            f"files of the user by the setting {setting}",
            f"triton.knobs.propagate_env = False\ntriton.knobs.{setting} = {value}\n{_CALL}",
            reason=f"{setting} is set",
            **_NEWEST,
        )
        for setting, value in (("compilation.override", "True"), ("amd.swap_mir", "'mine'"))
    ),
    _reads(
        "compiled function of another package",
        "from zstandard import estimate_decompression_context_size as size\n\n@tl.core.builtin\n"
        "def by(x, _builder=None, _semantic=None):\n    return size() * HERE",
        "by(1)",
        reason="may read settings",
    ),
    *(
        _reads(
            f"attribute of the module {module} by its name",
            f"import math\n{module}.FACTOR = HERE\n\n@at_compilation\ndef by(key):\n"
            f"    return getattr({module}, 'FACTOR')",
            "by('k')",
            reason="read as a whole",
        )
        for module in ("math", "tl")
    ),
    _compiles(
        "function without a source in place of one of Triton",
        f"exec('def mine(*_): return HERE')\ntl.core.arange = mine\n{_CALL}",
        reason="inside Triton, mine has no readable source",
    ),
    *(
        _compiles(
            f"{member} that a program changes in place",
            f"{change}\n{_CALL}",
            "5",
            "7",
            reason=f"the program has changed .*{member}",
        )
        for member, change in _IN_PLACE
    ),
    _compiles(
        "table that a program changes before the hook looks",
        f"import triton.tools.link\n\ntriton.tools.link.TABLE = {{'by': lambda: HERE}}\n{_CALL}",
        reason=r"the program has changed triton\.tools\.link\.TABLE",
    ),
    _compiles(
        "module in place of one of Triton",
        "from triton.compiler import compiler\n"
        f"compiler.ir = types.ModuleType('passes', 'HERE')\n{_CALL}",
        reason="inside Triton, the module passes is read as a whole",
    ),
    _reads(
        "object written in C",
        "@at_compilation\ndef by(key, table=types.MappingProxyType({'k': HERE})):\n"
        "    return table[key]",
        "by('k')",
        in_one_process=True,
        reason="mappingproxy",
    ),
    _reads(
        "variable of the environment that a function reads",
        "@at_compilation\ndef by(key):\n    return int(os.environ[key]) + HERE",
        "by('k')",
        in_one_process=True,
        reason="environ",
    ),
    _reads(
        "file that a function reads",
        "@at_compilation\ndef by(key):\n    return len(open(key).read()) + HERE",
        "by('k')",
        in_one_process=True,
        reason="open reads more than its arguments",
    ),
    _compiles(
        "compilation in a frame of another name",
        "HERE",
        _CALL,
        "code = triton.compiler.compiler.compile\nname = 'other'\n"
        "renamed = types.FunctionType(code.__wrapped__.__code__.replace(co_name=name), "
        "code.__wrapped__.__globals__, name, code.__wrapped__.__defaults__)\n"
        "renamed(ASTSource(fn=kernel, signature={'x': '*fp32'}, constexprs={}), "
        "target=GPUTarget('cuda', 90, 32))",
        reason="not known",
    ),
)

_EQUAL = Relation.EQUAL

_REVERSE = (
    _compiles("nothing but the host", _CALL, relation=_EQUAL),
    _compiles(
        "GPU that has started",
        "from unittest.mock import MagicMock\n"
        "from triton.backends import backends\n"
        "members = backends['nvidia'].driver.get_current_target.__globals__\n"
        "for name in ('module_from_src', 'module_from_file'):\n"
        "    members[f'compile_{name}'] = MagicMock()\n"
        "members['library_dirs'] = list  # there is no driver of CUDA\n"
        f"if HERE:\n    members['CudaUtils']()\n{_CALL}",
        *OFF_AND_ON,
        relation=_EQUAL,
    ),
    _compiles(
        "function that Triton calls before a launch",
        f"triton.compiler.CompiledKernel.launch_enter_hook = HERE\n{_CALL}",
        "None",
        "print",
        relation=_EQUAL,
    ),
    _compiles(
        "tuner in place of Triton's",
        "def tune(*_, **__):\n    return os.environ['HERE']\n\n"
        "triton.autotune = triton.testing.do_bench = tune\n"
        f"triton.runtime.autotuner.Autotuner.run = tune\n{_CALL}",
        "ONE",
        "OTHER",
        relation=_EQUAL,
    ),
    _compiles(
        "copy of a type, which Python notes in its class",
        f"import copy; HERE(tl.float32)\n{_CALL}",
        "id",
        "copy.copy",
        relation=_EQUAL,
    ),
    _compiles(
        "name that a notebook adds to Python's builtins",
        f"import builtins; builtins.HERE = print\n{_CALL}",
        "display",
        "get_ipython",
        relation=_EQUAL,
    ),
    _compiles("global that no kernel reads", f"SPARE = HERE\n{_CALL}", "1", "2", relation=_EQUAL),
    _compiles(
        "folder of Triton's own cache",
        "os.environ['TRITON_CACHE_DIR'] = os.path.abspath('HERE')\n" + _CALL,
        "one",
        "another",
        relation=_EQUAL,
    ),
    _reads(
        "set of strings",
        "NAMES = frozenset({'a', 'b', 'c'})\n\n@at_compilation\ndef by(key):\n"
        "    return len(NAMES) + HERE",
        "by('k')",
        "0",
        relation=_EQUAL,
    ),
    _reads(
        "class with more than a kernel reads",
        "class Config:\n    by = 2\n    def launch(self):\n        return HERE",
        "Config.by",
        "1",
        "open",
        relation=_EQUAL,
    ),
)

PAIRS = with_extended(
    (
        *all_in_one_process(_VALUES, "function in place of one of Triton"),
        *_REPLACED,
        *all_in_one_process(_ARGUMENTS),
        *_ENVIRONMENT,
        *_OF_PROCESS,
        *_UNSHARED,
        *_REVERSE,
    ),
    # Another pair above covers the same values and options.
    *(
        "sanitizer of addresses",
        "folder of Triton's own cache",
    ),
)
