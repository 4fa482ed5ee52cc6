"""A Python that imports the modules of its command line and forks a job on request.

It also calls the functions that are named as `module:function`: they hash a compiler's own files,
once per process.

Importing torch_xla takes ten to twenty seconds of relocations, torch with its distributed parts
four, and JAX two. A fork of a process that has imported them and has not touched a device takes
none. Everything after the import is as in a job of its own: its process, its environment, the hook
as the import hook installs it, its exit handlers. The HTTP library of the client comes
with the compiler, as every job would import it otherwise.

Reads one JSON request a line from standard input: {"argv", "environment", "errors", "hook"};
the hook is empty for none.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import graphstash._http.deadline  # noqa: F401 - see above

__all__: list[str] = []


def job(request: dict[str, Any]) -> NoReturn:
    """The forked job; never returns."""
    status = 1
    try:
        sys.stdin.close()
        errors = os.open(request["errors"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(errors, 2)
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = request["argv"]
        if request["hook"]:
            from graphstash._process.session import add_hook

            add_hook(request["hook"])  # what the import hook does right after the import
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
            status = 0
        except SystemExit as exit_:
            status = int(exit_.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(status)


def keep(request: dict[str, Any]) -> NoReturn:
    """Forks the job and writes its pid and then its exit status; never returns."""
    pid = os.fork()
    if pid == 0:
        job(request)
    write(request["errors"] + ".pid", pid)
    write(request["errors"] + ".status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def write(path: str, number: int) -> None:
    Path(path + ".part").write_text(str(number))
    Path(path + ".part").replace(path)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        module, _, function = name.partition(":")
        imported = importlib.import_module(module)
        if hasattr(imported, function):  # some versions lack it
            getattr(imported, function)()
    if "torch_xla" in sys.modules:
        ends = sys.modules["torch_xla"]._prepare_to_exit
        atexit.unregister(ends)
        atexit.register(ends)
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        if os.fork() == 0:
            keep(json.loads(line))
        while True:  # collect keepers that are done
            try:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    break
            except ChildProcessError:
                break
