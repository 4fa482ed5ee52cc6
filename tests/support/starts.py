"""Fork processes from a Python that has already imported their modules (`support.zygote`).

`install` replaces `subprocess.Popen` in the tests' own process. From then on, `Popen` forks `python
-m graphstash ...`, `python -m graphstash_server ...`, and `python -c ... --port 0 ...`, a server
whose modules a program changes. That saves the import of the server, a second of CPU. A process
still starts from scratch if its imports could differ: if it has other environment variables than
the zygote (except those of `_READ_LATER`), other limits, another user, other signals, or options of
`Popen` such as `preexec_fn`. The script `graphstash` and all other commands also start from
scratch, for the tests of packages, pages and clocks. `fork_with` adds the Python of an earlier
release, and `fork_command` one command line. `use_shared` takes the zygote that all workers share.
"""

import inspect
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_ZYGOTE = Path(__file__).with_name("zygote.py")
COMMANDS = (
    *("graphstash._http.connections", "graphstash._cli.main"),
    *("graphstash_server.__main__", "graphstash.hooks.installing"),
    *("graphstash_server.settings:load_settings", "graphstash_server.db.migrate:newest_revision"),
    *("graphstash_server.serving.workers", "uvicorn.lifespan.on"),
    *("graphstash_server.context", "aiosqlite", "alembic.command", "alembic.script", "uvloop"),
    *("platformdirs.unix", "pydantic_settings"),
)
"""Modules that the zygote of the commands imports, and functions that it calls."""

_READ_LATER = re.compile(
    "_?GRAPHSTASH_|XDG_|AWS_|OTEL_(?!PROPAGATORS|PYTHON_)|PYTEST_|(COLUMNS|NO_COLOR|PYTHONUNBUFFERED)$"
)
"""Variables that no import reads."""

_INHERITED = re.compile(r"^(?:Uid|Gid|Groups|SigBlk|SigIgn|CapEff|Cpus_allowed):.*", re.MULTILINE)

_environment: dict[str, str] = {}
"""Variables that the imports of the command zygotes may read."""

_imported: dict[str, tuple[str, ...]] = {sys.executable: COMMANDS}
"""For each Python whose commands are forked: the modules that its zygote imports."""

_zygotes: dict[str, tuple["Zygote", tuple[str, list[str]]]] = {}

_zygotes_of_commands: dict[tuple[str, ...], "Zygote"] = {}
"""Zygotes of whole command lines."""

_Popen: Any = subprocess.Popen  # typeshed lacks the methods that Popen overrides
_signature = inspect.signature(_Popen._execute_child)


def install() -> None:
    """Let `subprocess.Popen` fork commands of graphstash, with the present environment."""
    _environment.update(read_at_import(os.environ))
    subprocess.Popen = Popen  # type: ignore[misc] # a subclass


def restore_environment() -> None:
    """Give each variable that imports may read the value that it had when the zygotes started.

    Some libraries set such variables when they are imported. Afterwards no command could be forked.
    """
    for name in read_at_import(os.environ).keys() - _environment.keys():
        del os.environ[name]
    os.environ.update(_environment)


def fork_with(python: Path, *imported: str) -> None:
    """Also fork the commands of this Python, whose zygote imports these modules."""
    _imported[str(python)] = imported


def fork_command(command: Sequence[str], zygote: "Zygote") -> None:
    """Let `zygote` fork every process with this command line."""
    _zygotes_of_commands[tuple(command)] = zygote


def use_shared(zygote: "Zygote", environment: Mapping[str, str]) -> None:
    """Let a zygote with these variables fork the commands of this Python, if imports allow it."""
    if environment == _environment:
        _zygotes[sys.executable] = zygote, _inherited()


def close() -> None:
    """End the zygotes of commands that have started, and leave shared ones to their owner."""
    while _zygotes:
        _zygotes.popitem()[1][0].close()


def start_zygote(
    requests: socket.socket,
    python: str | Path,
    imported: Sequence[str],
    *,
    environment: Mapping[str, str],
    pass_fds: Sequence[int] = (),
) -> Any:
    """Start a Python that imports modules and forks for the requests that arrive at a socket."""
    return _Popen(
        [python, _ZYGOTE, str(requests.fileno()), *imported],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[requests.fileno(), *pass_fds],
    )


class Zygote:
    """A Python that has imported modules, and forks."""

    def __init__(
        self,
        python: str | Path,
        *imported: str,
        environment: Mapping[str, str] = os.environ,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start the process. It and its forks keep the descriptors of `pass_fds` open."""
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            self._process = start_zygote(
                there, python, imported, environment=environment, pass_fds=pass_fds
            )
        if self._socket.recv(16) != b"ready":
            raise RuntimeError(f"the zygote of {python} for {imported} has ended")

    def fork(self, request: dict[str, Any], streams: Sequence[int]) -> tuple[int, socket.socket]:
        """Return the ID of a new process and the socket that delivers its exit status."""
        answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            message = json.dumps(request).encode()
            socket.send_fds(self._socket, [message], [theirs.fileno(), *streams])
        if not (pid := answers.recv(32)):
            raise RuntimeError(f"the zygote has ended, which was to fork {request['argv']}")
        return int(pid), answers

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # forks of this process may share it
        self._socket.close()
        self._process.wait(30)


class SharedZygote(Zygote):
    """A zygote that another process owns."""

    def __init__(self, descriptor: int) -> None:
        """Take the inherited descriptor of the socket for its requests."""
        self._socket = socket.socket(fileno=descriptor)

    def close(self) -> None:
        """Close this process's descriptor. The owner ends the zygote."""
        self._socket.close()


class Popen(_Popen):  # type: ignore[misc] # see above
    """`subprocess.Popen` that may fork the process from a zygote.

    The process is then a child of the zygote, which reports its exit status.
    """

    ended_at: float  # of a forked process, comparable with the times of files
    returncode: int | None
    _answers: socket.socket | None = None

    def __init__(
        self, *arguments: Any, zygote: Zygote | None = None, hook: str = "", **others: Any
    ) -> None:
        """Start a process. With `zygote`, that zygote always forks it, and installs a hook."""
        self._zygote, self._hook = zygote, hook
        super().__init__(*arguments, **others)

    def _execute_child(self, *arguments: Any) -> None:
        given = _signature.bind(self, *arguments).arguments
        command = tuple(given["args"])
        zygote = self._zygote or _zygotes_of_commands.get(command) or _zygote_of(given)
        if zygote is None:
            super()._execute_child(*arguments)
            return
        pipes = [
            given[name]
            for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        ]
        streams = [n if own == -1 else own for n, own in enumerate((pipes[0], pipes[3], pipes[5]))]
        request = {
            "argv": [os.fspath(each) for each in given["args"] if each != "-u"][1:],
            "environment": dict(os.environ if given["env"] is None else given["env"]),
            "folder": os.fspath(given["cwd"] or Path.cwd()),
            "umask": int(re.findall(r"Umask:\s+(\d+)", _own_status())[0], 8),
            "new_session": given["start_new_session"],
            "hook": self._hook,
        }
        try:
            self.pid, self._answers = zygote.fork(request, streams)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)

    def _internal_poll(self, *arguments: Any, **others: Any) -> int | None:
        if self._answers is None:
            return super()._internal_poll(*arguments, **others)
        try:
            return self._wait(0)
        except subprocess.TimeoutExpired:
            return None

    def _wait(self, timeout: float | None) -> int | None:
        if self._answers is None:
            return super()._wait(timeout)
        if self.returncode is None:
            self._answers.settimeout(timeout)
            try:
                self.returncode, self.ended_at = json.loads(self._answers.recv(64))
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            self._answers.close()  # now the zygote may reap the process
        return self.returncode


def _zygote_of(given: Mapping[str, Any]) -> Zygote | None:
    """Return the zygote that forks this process, or None for a real start."""
    args: list[Any] = list(given["args"]) if isinstance(given["args"], (list, tuple)) else [""]
    is_changed_server = args[1:2] == ["-c"] and "--port 0 " in " ".join(map(str, args[3:]))
    is_command = (
        args[0] in _imported
        and (args[1:3] in (["-m", "graphstash"], ["-m", "graphstash_server"]) or is_changed_server)
        and args[3:4] != ["run"]
        and all(given[name] is None for name in ("executable", "preexec_fn", "gid", "gids", "uid"))
        and (given["close_fds"], given["shell"], given["restore_signals"]) == (True, False, True)
        and not given["pass_fds"]
        and (given["umask"], given["process_group"]) == (-1, -1)
    )
    env = os.environ if given["env"] is None else given["env"]
    if not is_command or read_at_import(env) != _environment:
        return None
    zygote, inherited = _commands(args[0])
    return zygote if inherited == _inherited() else None


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the imports may read."""
    return {name: v for name, v in environment.items() if not _READ_LATER.match(name)}


def _own_status() -> str:
    return Path("/proc/thread-self/status").read_text()


def _inherited() -> tuple[str, list[str]]:
    """Return what a process inherits besides environment, folder, umask and streams."""
    return Path("/proc/self/limits").read_text(), _INHERITED.findall(_own_status())


def _commands(python: str) -> tuple[Zygote, tuple[str, list[str]]]:
    if python not in _zygotes:
        zygote = Zygote(python, *_imported[python], environment=_environment)
        _zygotes[python] = zygote, _inherited()
    return _zygotes[python]
