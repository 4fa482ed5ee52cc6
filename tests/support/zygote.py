"""A Python that imports the modules of its command line and forks a process for each request.

The zygote also calls the functions that are named as `module:function`. Each of them does once per
process what does not depend on the job, such as hashing a compiler's own files.

Importing torch_xla takes ten to twenty seconds of relocations, torch with its distributed parts
four, JAX two, and the server one. A fork of a process that has imported them and has not touched a
device takes none. Everything after the import equals a started process: its environment, its
folder, its streams, the hook as the import hook installs it, its exit handlers.

The kernel kills a forked process when the zygote ends, and the zygote ends with the tests' process.

`support.starts` is the other side. The first argument is the descriptor of a socket. Each request
is one JSON message: {"argv", "environment", "folder", "umask", "new_session", "hook"}, with the
descriptors of a socket for the answers and of the three standard streams. `argv` holds the words
after `python` on a command line, and `hook` is empty for none.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

__all__: list[str] = []

PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def next_request(requests: socket.socket) -> dict[str, Any]:
    """Return a request in the process that was forked for it, and never in the zygote.

    The zygote ends when the tests' process has ended: a fork of that process may keep the other end
    of the socket open, and a death signal would come too early, when the thread ends that has
    started the zygote.
    """
    zygote, tests = os.getpid(), os.getppid()
    waiting = selectors.DefaultSelector()
    waiting.register(requests, selectors.EVENT_READ)
    while os.getppid() == tests:
        for key, _ in waiting.select(1.0):
            if key.fileobj is not requests:
                report(key, waiting)
                continue
            message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 4)
            if not message:  # the other side has closed
                os._exit(0)
            answers, *streams = descriptors
            if (pid := os.fork()) == 0:
                end_with(zygote)
                others = [each for each in waiting.get_map().values() if each.data]
                for each in {answers, *(fd for key in others for fd in (key.fd, key.data[1]))}:
                    os.close(each)
                waiting.close()
                requests.close()
                request: dict[str, Any] = json.loads(message)
                become(request, streams)
                return request
            tell(answers, str(pid))
            waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, answers))
            for each in streams:
                os.close(each)
    os._exit(0)


def report(key: selectors.SelectorKey, waiting: selectors.BaseSelector) -> None:
    """Send the exit status of a process that has ended. Reap the process once it is read."""
    pid, answers = key.data
    waiting.unregister(key.fd)
    os.close(key.fd)
    if key.fd == answers:
        os.waitpid(pid, 0)
        return
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    tell(answers, json.dumps([status, time.time()]))
    waiting.register(answers, selectors.EVENT_READ, key.data)


def tell(answers: int, text: str) -> None:
    with suppress(BrokenPipeError):  # the worker that has asked was killed
        os.write(answers, text.encode())


def become(request: dict[str, Any], streams: list[int]) -> None:
    """Take over the environment, folder and streams of a request."""
    if request["new_session"]:
        os.setsid()
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.umask(request["umask"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    # The new files may have other properties, such as whether they can seek.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, f"__{name}__")
        is_by_line = name == "stderr" or (name == "stdout" and "PYTHONUNBUFFERED" in os.environ)
        stream = open(  # noqa: SIM115 - for the life of the process
            number,
            before.mode,
            1 if is_by_line else -1,
            encoding=before.encoding,
            errors=before.errors,
            closefd=False,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = request["argv"]
    sys.orig_argv = [sys.executable, *sys.argv]


def run_script(hook: str) -> None:
    """Run `sys.argv`, and exit without destroying the state of compilers."""
    status = 1
    try:
        if hook:
            from graphstash._process.session import add_hook

            add_hook(hook)  # as the import hook does right after the import
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
            status = 0
        except SystemExit as exit_:
            status = int(exit_.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@contextmanager
def exiting_at_once() -> Iterator[None]:
    """End as Python does, but do not destroy all objects, which copies the zygote's memory."""
    status = 0
    try:
        yield
    except KeyboardInterrupt:
        raise  # Python ends by the signal
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined] # joins threads
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        status = 120
    sys.stderr.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        module, _, function = name.partition(":")
        named: Any = importlib.import_module(module)
        for part in filter(None, function.split(".")):
            named = getattr(named, part, None)
        if function and named:  # some versions lack it
            named()
    if "torch_xla" in sys.modules:
        ends = sys.modules["torch_xla"]._prepare_to_exit
        atexit.unregister(ends)
        atexit.register(ends)
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        connection.send(b"ready")
        asked = next_request(connection)
    if sys.argv[0] not in {"-c", "-m"}:
        run_script(asked["hook"])
    if not sys.flags.safe_path:
        sys.path[0] = asked["folder"]
    with exiting_at_once():
        if sys.argv[0] == "-c":
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(sys.argv.pop(1), vars(main))  # a server with changed modules, or a worker
        else:
            del sys.argv[0]
            sys.modules.pop(f"{sys.argv[0]}.__main__", None)  # runpy warns of a module that it runs
            runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined] # as `python -m`
