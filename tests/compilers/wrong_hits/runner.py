"""A process that has imported a compiler, and forks for every program.

Each line of standard input is a request, and each line of standard output its answer:

    {"directory"}           {"key", "unshared"}: run until a look-up, or until the hook refuses
                            to share the program
    {"directories"}         {"answers"}: run the programs in turn in one process
    {"directory", "tier"}   {"result", "hits"}: run to the end, with the artifacts of the directory
                            `tier`, or without a cache if it is empty

`result` is a digest of the value of the program's last line, and `hits` the number of artifacts
that the program used. A program that fails is answered {"failed"}, with a traceback.

    python runner.py COMPILER

The module of the compiler has two functions: `prepare()` imports the modules that programs need,
and `install(cache)` installs the hook in a forked child. `SETTINGS`, if present, are client
settings. If programs run in one process, `forget()` drops the compiler's state of a program.
"""

import ast
import gc
import hashlib
import importlib
import inspect
import json
import os
import runpy
import sys
import traceback
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import graphstash
import graphstash._http.download  # otherwise each program imports it when it makes a client
from graphstash import ClientConfig, CompileCache, Stash
from graphstash._compile.request import CompileRequest
from graphstash._compile.stats import Counters
from graphstash._executor import BoundedExecutor
from graphstash.errors import CacheError, Reason

__all__ = ["AskedError", "Recorder", "fork", "load", "run"]


class AskedError(BaseException):
    """The look-up of a program, which it ends. No compiler catches this exception."""

    def __init__(self, key: str, unshared: str) -> None:
        super().__init__(key, unshared)
        self.answer = {"key": key, "unshared": unshared}


class Recorder(CompileCache):
    """A cache that ends the program at its first look-up."""

    def __init__(self, output: int, **settings: object) -> None:
        config = ClientConfig.load(
            {}, cache_dir=Path("tier").absolute(), url="http://127.0.0.1:9", **settings
        )
        publisher = BoundedExecutor("publish", workers=1, capacity=1)
        super().__init__(Stash(config), counters=Counters(), publisher=publisher)
        self.answer: dict[str, str] | None = None
        # The pjrt hook raises an exception again in the main thread, at any later time. It could
        # then interrupt the exit of the child.
        self.answers_at_once = not config.wants_hook("jax")
        self.output = output
        self.remarks: dict[str, str] = {}  # reported by a program about itself

    def fetch_or_start(self, request: CompileRequest, *_: object, **__: object) -> NoReturn:
        self._end(str(request.key), "")

    def begin(self, request: CompileRequest) -> NoReturn:
        self._end(str(request.key), "")

    def record_fallback(self, error: Exception) -> None:
        if isinstance(error, CacheError) and error.reason is Reason.UNSHAREABLE:
            self._end("", str(error))
        raise error

    def _end(self, key: str, unshared: str) -> NoReturn:
        asked = AskedError(key, unshared)
        asked.answer |= self.remarks
        if self.answers_at_once:
            os.write(self.output, json.dumps(asked.answer).encode() + b"\n")
            os._exit(0)
        self.answer = self.answer or asked.answer  # some compilers call in a thread of their own
        raise asked


def run(
    compiler: Any, output: int, program: Callable[[Callable[..., None]], object]
) -> dict[str, str]:
    """Return the answer for one program, in a forked child. The program may add to the answer."""
    recorder = Recorder(output, **getattr(compiler, "SETTINGS", {}))
    try:
        compiler.install(recorder)
        program(recorder.remarks.update)
    except BaseException:
        if recorder.answer is None:
            return {"failed": traceback.format_exc()}
    return recorder.answer or {"failed": "nothing was asked for"}


def load(compiler: Any) -> None:
    """Import the modules that programs of a compiler need, in the parent of their processes."""
    compiler.prepare()
    inspect.getmodule(compile("", "unknown", "exec"))  # searches the files of all modules
    gc.disable()
    gc.freeze()  # children share the memory of their parent


def fork(answer_for: Callable[[], dict[str, Any]], output: int) -> int:
    """Write the answer that a forked child computes, and return the child's number."""
    pid = os.fork()
    if pid == 0:
        answer = {"failed": "it ended early"}
        try:
            answer = answer_for()
        finally:
            os.write(output, json.dumps(answer).encode() + b"\n")
            os._exit(0)
    return pid


def _answer(compiler: Any, request: dict[str, Any], output: int) -> dict[str, str]:
    os.chdir(request["directory"])
    sys.path.insert(0, request["directory"])
    return run(compiler, output, lambda _: runpy.run_path("program.py", run_name="__main__"))


def _answer_each(compiler: Any, directories: list[str], output: int) -> dict[str, Any]:
    recorder = Recorder(output, **getattr(compiler, "SETTINGS", {}))
    recorder.answers_at_once = False
    compiler.install(recorder)
    answers = []
    for number, directory in enumerate(directories):
        os.chdir(directory)
        # Python caches the lines of files by name.
        name = Path("program.py").rename(f"program{number}.py").name
        recorder.answer = None
        try:
            runpy.run_path(name, run_name="__main__")
        except BaseException:
            recorder.answer = recorder.answer or {"failed": traceback.format_exc()}
        answers.append(recorder.answer or {"failed": "nothing was asked for"})
        compiler.forget()
    return {"answers": answers}


def _run_to_end(compiler: Any, request: dict[str, Any]) -> dict[str, str]:
    os.chdir(request["directory"])
    if request["tier"]:
        hooks = getattr(compiler, "SETTINGS", {}).get(
            "hooks", [compiler.__name__.rpartition(".")[2]]
        )
        os.environ |= {"GRAPHSTASH_URL": "none", "GRAPHSTASH_CACHE_DIR": request["tier"]}
        os.environ["GRAPHSTASH_HOOKS"] = ",".join(hooks)
        graphstash.install()
    *before, last = ast.parse(Path("program.py").read_text()).body
    module = sys.modules["program"] = types.ModuleType("program")
    module.__file__ = "program.py"
    try:
        exec(compile(ast.Module(before, []), "program.py", "exec"), vars(module))
        line = ast.Expression(last.value) if isinstance(last, ast.Expr) else None
        value = eval(compile(line, "program.py", "eval"), vars(module)) if line else None
        result = _contents(value)
    except Exception as error:
        result = type(error).__name__.encode()
    hits = graphstash.stats().hits if request["tier"] else 0
    if request["tier"]:
        graphstash.uninstall()
    return {"result": hashlib.sha256(result).hexdigest(), "hits": str(hits)}


def _contents(value: Any) -> bytes:
    """Return the bits of arrays, or the code of a compiled program."""
    if isinstance(value, dict | list | tuple):
        items = sorted(value.items()) if isinstance(value, dict) else value
        return b";".join(_contents(each) for each in items)
    if hasattr(value, "as_text"):  # a program of JAX
        return bytes(value.as_text(), "utf-8")
    if hasattr(value, "__array__"):
        array = value.__array__()
        return f"{array.dtype} {array.shape} ".encode() + array.tobytes()
    return repr(value).encode()


def main() -> None:
    """Answer requests until standard input ends."""
    output = os.dup(1)
    os.dup2(2, 1)  # programs and compilers may print to standard output
    compiler = importlib.import_module(f"compilers.wrong_hits.{sys.argv[1]}")
    load(compiler)
    for line in sys.stdin:
        request = json.loads(line)
        if "tier" in request:
            answer_for = partial(_run_to_end, compiler, request)
        elif "directories" in request:
            answer_for = partial(_answer_each, compiler, request["directories"], output)
        else:
            answer_for = partial(_answer, compiler, request, output)
        os.waitpid(fork(answer_for, output), 0)
    os._exit(0)  # the compiler needs no shutdown


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])
    main()
