"""What a power cut leaves of directories, from the system calls of the processes that wrote there.

strace records the calls. `Disk` applies them in their order and keeps apart what was synced:

    bytes of a file     survive once an fsync or fdatasync of the file that began later has ended
    names of a directory (created, renamed, removed)   once such an fsync of the directory has ended

Everything else may be lost. A disk may also have written a part of it, so `Disk.save` can keep a
random part. The model is stricter than most file systems, which keep more than they must.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

_CHANGES: Final = (
    "open openat creat write writev pwrite64 pwritev pwritev2 lseek truncate ftruncate fallocate "
    "copy_file_range rename renameat renameat2 link linkat symlink symlinkat unlink unlinkat mkdir "
    "mkdirat rmdir fsync fdatasync sendto sendmsg"
)
_PAGE_BYTES: Final = 4096
_FD: Final = re.compile(r"(?:\d+|AT_FDCWD)<((?:\\x[0-9a-f]{2})*)>(\(deleted\))?")
_LINE: Final = re.compile(r"(\d+) +(?:(<\.\.\. )?(\w+)(?: resumed>|\())(.*)", re.DOTALL)
_UNFINISHED: Final = " <unfinished ...>"


def recording_command(log: Path, *command: str) -> tuple[str, ...]:
    """Return a command that runs `command` and records its calls.

    The process that it starts becomes `command`: signals reach it as usual.
    """
    options = ("-DDD", "-f", "-y", "-xx", "-s", str(2**25), "-e", "signal=KILL", "-o", str(log))
    traced = ("-e", f"trace={_CHANGES.replace(' ', ',')}", "--seccomp-bpf")
    return ("strace", *options, *traced, *command)


@dataclass(frozen=True)
class Call:
    """The beginning or the end of a system call."""

    thread: str
    name: str
    arguments: str
    result: str | None = None

    @property
    def is_end(self) -> bool:
        """Whether the call has ended. Only then did it succeed, or fail."""
        return self.result is not None

    @property
    def strings(self) -> list[bytes]:
        """Every string among the arguments: names, or bytes that are written."""
        return [_decoded(each) for each in self.arguments.split('"')[1::2]]

    @property
    def numbers(self) -> list[int]:
        """Every argument that is a number, other than a file descriptor."""
        return [int(each) for each in re.findall(r"(?<=, )\d+(?=,|$)", self.arguments)]

    @property
    def paths(self) -> list[str | None]:
        """Path of each file descriptor among the arguments. None if the file has no name."""
        return _paths(self.arguments)

    @property
    def opened(self) -> str | None:
        """Path of the file that the call opened, unless the file has no name."""
        return next(iter(_paths(self.result or "")), None)


def read_calls(log: Path) -> Iterator[Call]:
    """Yield the beginnings and ends of all calls in their order."""
    begun: dict[str, Call] = {}
    with log.open() as lines:
        for line in lines:
            if (found := _LINE.fullmatch(line.rstrip("\n"))) is None:
                continue  # the end of a thread
            thread, is_resumed, name, rest = found.groups()
            if is_resumed:
                call = begun.pop(thread)
                rest = call.arguments + rest
            elif rest.endswith(_UNFINISHED):
                begun[thread] = Call(thread, name, rest.removesuffix(_UNFINISHED))
                yield begun[thread]
                continue
            arguments, _, result = rest.rpartition(" = ")
            call = Call(thread, name, arguments.rstrip().removesuffix(")"), result)
            if not is_resumed:
                yield Call(thread, name, call.arguments)
            yield call


@dataclass(eq=False)
class _Node:
    """A file or a directory. `changes` are not yet durable; `forgotten` counts those that are."""

    durable: Any
    changes: list[Any] = field(default_factory=list)
    forgotten: int = 0
    position: int = 0

    @property
    def changed(self) -> int:
        return self.forgotten + len(self.changes)

    def sync(self, changed: int) -> None:
        """Make the first changes durable. Another sync may already have done a part."""
        count = max(0, changed - self.forgotten)
        for change in self.changes[:count]:
            self.apply(self.durable, change)
        del self.changes[:count]
        self.forgotten += count

    def left(self, keeps: random.Random | None) -> Any:
        """Return what a power cut leaves: what is durable, and a random part of the changes."""
        left = type(self.durable)(self.durable)
        for change in self.changes if keeps is not None else ():
            for part in self.parts(change):
                if keeps.random() < 0.5:
                    self.apply(left, part)
        return left


class _File(_Node):
    """Changes are pairs of an offset and bytes; without bytes, the offset is the new size."""

    @property
    def size(self) -> int:
        whole = bytearray(self.durable)
        for change in self.changes:
            self.apply(whole, change)
        return len(whole)

    @staticmethod
    def apply(durable: bytearray, change: tuple[int, bytes | None]) -> None:
        offset, written = change
        durable.extend(bytes(max(0, offset - len(durable))))
        if written is None:
            del durable[offset:]
        else:
            durable[offset : offset + len(written)] = written

    @staticmethod
    def parts(change: tuple[int, bytes | None]) -> Iterator[tuple[int, bytes | None]]:
        """Split a write into pages, of which a disk may have written any."""
        offset, written = change
        if written is None:
            yield change
            return
        begin = 0
        while begin < len(written):
            end = begin + _PAGE_BYTES - (offset + begin) % _PAGE_BYTES
            yield offset + begin, written[begin:end]
            begin = end


class _Directory(_Node):
    """Changes map names to nodes, or to None. A rename within a directory is one change."""

    def __init__(self) -> None:
        super().__init__({})
        self.now: dict[str, _Node] = {}

    def change(self, names: dict[str, _Node | None]) -> None:
        self.changes.append(names)
        self.apply(self.now, names)

    @staticmethod
    def apply(durable: dict[str, _Node], change: dict[str, _Node | None]) -> None:
        for name, node in change.items():
            if node is None:
                durable.pop(name, None)
            else:
                durable[name] = node

    @staticmethod
    def parts(change: dict[str, _Node | None]) -> Iterator[dict[str, _Node | None]]:
        yield change


class Disk:
    """A directory as of some moment, and which part of it is durable."""

    def __init__(self, directory: Path) -> None:
        """Everything that the directory holds now is durable."""
        self._path = str(directory)
        self._root = _loaded(directory)
        self._syncing: dict[str, tuple[_Node, int]] = {}
        self._changes: dict[str, Callable[[Call], bool]] = {
            **dict.fromkeys(("open", "openat", "creat"), self._open),
            **dict.fromkeys(("write", "writev", "pwrite64", "pwritev", "pwritev2"), self._write),
            **dict.fromkeys(("lseek", "ftruncate"), self._seek),
            **dict.fromkeys(("rename", "renameat", "renameat2"), self._rename),
            **dict.fromkeys(("mkdir", "mkdirat"), self._make_directory),
            **dict.fromkeys(("unlink", "unlinkat", "rmdir"), self._remove),
            **dict.fromkeys(("sendto", "sendmsg"), lambda _: False),
        }

    def apply(self, call: Call) -> bool:
        """Apply a call. Return whether it changed this directory, or what of it is durable."""
        if call.name in {"fsync", "fdatasync"}:
            return self._sync(call)
        if not call.is_end or (call.result or "").startswith(("-1", "?")):
            return False  # it has not ended, has failed, or the process was killed during it
        if (change := self._changes.get(call.name)) is not None:
            return change(call)
        names = [*call.paths, *self._named(call)]
        assert not any(map(self._below, names)), f"the model lacks {call.name}: {names}"
        return False

    def save(self, directory: Path, *, keeps: random.Random | None = None) -> None:
        """Write what a power cut leaves. With `keeps`, a part of what was not synced is there."""
        _save(self._root, directory, keeps)

    def _sync(self, call: Call) -> bool:
        if not call.is_end:
            if (node := self._find(call.paths[0])) is not None:
                self._syncing[call.thread] = node, node.changed
            return False
        node, changed = self._syncing.pop(call.thread, (None, 0))
        if node is None or call.result != "0":
            return False
        node.sync(changed)
        return True

    def _open(self, call: Call) -> bool:
        path = call.opened
        if not self._below(path):
            return False
        node = self._find(path)
        if node is None:
            assert "O_CREAT" in call.arguments, path
            self._change(path, to=_File(bytearray()))
            return True
        node.position = node.size if "O_APPEND" in call.arguments else 0
        if "O_TRUNC" in call.arguments:
            node.changes.append((0, None))
        return "O_TRUNC" in call.arguments

    def _write(self, call: Call) -> bool:
        if (node := self._find(call.paths[0])) is None:
            return False
        written = b"".join(call.strings)[: int(call.result)]
        if call.name.startswith("pwrite"):
            offset = call.numbers[-1 if call.name != "pwritev2" else -2]
        else:
            offset = node.position
            node.position += len(written)
        node.changes.append((offset, written))
        return True

    def _seek(self, call: Call) -> bool:
        if (node := self._find(call.paths[0])) is None:
            return False
        if call.name == "lseek":
            node.position = int(call.result)
            return False
        node.changes.append((call.numbers[-1], None))
        return True

    def _rename(self, call: Call) -> bool:
        old, new = self._named(call)
        if not (self._below(old) or self._below(new)):
            return False
        (source, old_name), (target, new_name) = self._parent(old), self._parent(new)
        node = source.now[old_name]
        if source is target:
            source.change({old_name: None, new_name: node})
        else:
            target.change({new_name: node})
            source.change({old_name: None})
        return True

    def _make_directory(self, call: Call) -> bool:
        return self._change(*self._named(call), to=_Directory())

    def _remove(self, call: Call) -> bool:
        return self._change(*self._named(call), to=None)

    def _change(self, path: str | None, *, to: _Node | None) -> bool:
        if not self._below(path):
            return False
        parent, name = self._parent(path)
        parent.change({name: to})
        return True

    def _named(self, call: Call) -> list[str]:
        """Return the absolute paths that the call names."""
        directories = [*call.paths, *[self._path] * 2]
        names = [each.decode() for each in call.strings]
        return [str(PurePosixPath(d or "", n)) for d, n in zip(directories, names, strict=False)]

    def _below(self, path: str | None) -> bool:
        return path is not None and path.startswith(f"{self._path}/")

    def _parent(self, path: str) -> tuple[_Directory, str]:
        parent, _, name = path.rpartition("/")
        found = self._find(parent)
        assert isinstance(found, _Directory), path
        return found, name

    def _find(self, path: str | None) -> _Node | None:
        if path == self._path:
            return self._root
        if not self._below(path):
            return None
        found: _Node | None = self._root
        for name in path.removeprefix(f"{self._path}/").split("/"):
            found = found.now.get(name) if isinstance(found, _Directory) else None
        return found


def _loaded(path: Path) -> _Node:
    if path.is_file():
        return _File(bytearray(path.read_bytes()))
    directory = _Directory()
    directory.durable = {each.name: _loaded(each) for each in path.iterdir()}
    directory.now = dict(directory.durable)
    return directory


def _save(node: _Node, path: Path, keeps: random.Random | None) -> None:
    left = node.left(keeps)
    if not isinstance(node, _Directory):
        path.write_bytes(left)
        return
    path.mkdir()
    for name, each in left.items():
        _save(each, path / name, keeps)


def _paths(text: str) -> list[str | None]:
    found = _FD.finditer(text)
    return [None if each[2] else _decoded(each[1]).decode() for each in found]


def _decoded(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))
