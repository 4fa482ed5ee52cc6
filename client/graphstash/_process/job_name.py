"""Names for jobs that were given none: two runs of one command get the same.

A manifest is found by its name alone, so the name has to survive what differs between runs and
leave artifacts as they are: seeds, ports, directories of results, names of experiments. What
decides about artifacts (a model, a batch size) should be in it. Nobody can tell one from the other
for every script, so a job has two names:

    exact    program, script, arguments without what usually differs, versions of the compilers
    coarse   program, script, versions

The next run takes the manifest of the exact name, or of the coarse one where there is none. Either
may name artifacts that this run does not need: that costs what `GRAPHSTASH_PREFETCH_LIMIT` allows,
in the background.
"""

import hashlib
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from graphstash.hooks.environment import version_of
from graphstash_schema import ManifestName

__all__ = ["names_of"]

_COMPILERS: Final = ("torch", "torch_xla", "jax", "jaxlib", "libtpu", "triton")

_VARYING: Final = frozenset(
    {
        *("addr", "address", "endpoint", "host", "hostname", "master", "port", "rdzv", "url"),
        *("checkpoint", "checkpoints", "ckpt", "load", "restore", "resume", "save"),
        *("dir", "directory", "file", "folder", "out", "output", "outputs", "path", "root"),
        *("experiment", "id", "log", "logdir", "logging", "logs", "name", "notes", "project"),
        *("run", "tag", "tags", "uuid", "wandb"),
        *("date", "time", "timestamp", "seed", "rank", "node"),
        *("apikey", "auth", "credential", "credentials", "key"),
        *("passwd", "password", "secret", "token"),
    }
)
"""Words in the names of options whose values differ between runs that compile the same."""

_KEPT: Final = frozenset({"arch", "architecture", "config", "dataset", "model"})
"""Words that say the contrary, such as in `--model_name_or_path`."""

_VARYING_VALUE: Final = re.compile(
    r"[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}[0-9a-fA-F-]*"  # UUIDs, hashes
    r"|[0-9]{4}-?[0-9]{2}-?[0-9]{2}.*"  # dates
    r"|[0-9]{6,}"  # numbers of jobs, times
    r"|[a-z0-9+]+://.*|[^/]*:[0-9]+"  # URLs, ports of hosts
)

_MAX_VALUE: Final = 256
"""Characters; what is longer is data, and no choice."""

_OPTION: Final = re.compile(r"([+-]{0,2}[A-Za-z_][\w.-]*)=(.*)", re.DOTALL)


def names_of(command: Sequence[str]) -> tuple[ManifestName, ManifestName]:
    """The exact and the coarse name of the job that a command is."""
    coarse = [platform.machine(), *(f"{each} {version_of(each)}" for each in _COMPILERS)]
    arguments, is_value_of_varying = [], False
    for before, word in zip(("", *command), command, strict=False):
        if before in ("-m", "-c") or _is_script(word):
            coarse.append(word if before in ("-m", "-c") else _place(word))
            is_value_of_varying = False
        elif match := _OPTION.fullmatch(word):
            name, value = match.groups()
            arguments += [name, *_values(value, is_varying=_is_varying(name))]
            is_value_of_varying = False
        elif word.startswith("-") and not re.fullmatch(r"-[0-9.]+(e-?[0-9]+)?", word):
            arguments.append(word)
            is_value_of_varying = _is_varying(word)
        elif before:  # not the program that runs the script
            arguments += _values(word, is_varying=is_value_of_varying)
            is_value_of_varying = False
    return _name([*coarse, "--", *arguments]), _name(coarse)


def _name(words: Sequence[str]) -> ManifestName:
    told = "\0".join(words).encode("utf-8", "surrogateescape")
    return ManifestName(f"auto-{hashlib.sha256(told).hexdigest()[:16]}")


def _is_script(word: str) -> bool:
    return word.endswith((".py", ".sh")) and not word.startswith("-")


def _place(path: str) -> str:
    """A script and the directory that it is in, wherever that lies; numbers in it do not count."""
    script = Path(path)
    with suppress(OSError):  # there may be no working directory
        script = script.absolute()
    return f"{_without_numbers(script.parent.name)}/{script.name}"


def _values(value: str, *, is_varying: bool) -> Iterator[str]:
    """A value as far as it is the same in every run; of a path, what it leads to."""
    if is_varying or len(value) > _MAX_VALUE or _VARYING_VALUE.fullmatch(value):
        return
    yield _without_numbers(Path(value).name) if value.startswith(("/", "./", "../", "~")) else value


def _without_numbers(text: str) -> str:
    return re.sub(r"[0-9]+", "#", text)


def _is_varying(option: str) -> bool:
    words = frozenset(re.split(r"[^A-Za-z]+", option.lower()))
    return bool(words & _VARYING) and not words & _KEPT
