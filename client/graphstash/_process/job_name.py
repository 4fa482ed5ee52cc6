"""Derive a job name from the command, so that two runs of one command share a manifest.

Values that affect artifacts, such as the model and the batch size, should be part of the name.
Values that only differ between runs should not: seeds, ports, output directories, experiment names.
No rule separates the two for every script, so a job has two names, made from:

    coarse   processor architecture, compiler versions, scripts and modules (`python -m`)
    exact    the same, and the arguments without values that usually vary

The next run uses the manifest of the exact name, or else the manifest of the coarse name. Either
manifest may list artifacts that this run does not need. It downloads them in the background, at
most `GRAPHSTASH_PREFETCH_LIMIT` bytes.
"""

import hashlib
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from graphstash.hooks.environment import version_of
from graphstash.hooks.registry import hook_specs
from graphstash_schema import ManifestName

__all__ = ["names_of"]

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
"""Words in the names of options whose values do not affect artifacts."""

_KEPT: Final = frozenset({"arch", "architecture", "config", "dataset", "model"})
"""Words that override `_VARYING`, for example in `--model_name_or_path`."""

_VARYING_VALUE: Final = re.compile(
    r"[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}[0-9a-fA-F-]*"  # UUIDs and hashes
    r"|[0-9]{4}-?[0-9]{2}-?[0-9]{2}.*"  # dates
    r"|[0-9]{6,}"  # job numbers and timestamps
    r"|[a-z0-9+]+://.*|[^/]*:[0-9]+"  # URLs, and hosts with ports
)

_MAX_VALUE: Final = 256
"""Maximum characters of a value. Longer values are data, such as a prompt."""

_OPTION: Final = re.compile(r"([+-]{0,2}[A-Za-z_][\w.-]*)=(.*)", re.DOTALL)


def names_of(command: Sequence[str]) -> tuple[ManifestName, ManifestName]:
    """Return the exact and the coarse name of the job that a command runs."""
    coarse = [platform.machine(), *_compilers()]
    arguments, is_next_varying = [], False
    for before, word in zip(("", *command), command, strict=False):
        if before in ("-m", "-c") or _is_script(word):
            coarse.append(word if before in ("-m", "-c") else _script_name(word))
            is_next_varying = False
        elif match := _OPTION.fullmatch(word):
            name, value = match.groups()
            arguments += [name, *_values(value, is_varying=_is_varying(name))]
            is_next_varying = False
        elif word.startswith("-") and not re.fullmatch(r"-[0-9.]+(e-?[0-9]+)?", word):
            arguments.append(word)
            is_next_varying = _is_varying(word)
        elif before:  # the first word is the program, e.g. python
            arguments += _values(word, is_varying=is_next_varying)
            is_next_varying = False
    return _name([*coarse, "--", *arguments]), _name(coarse)


def _compilers() -> list[str]:
    """Return the name and version of each installed compiler that has a hook."""
    specs = hook_specs().values()
    names = sorted({name for spec in specs for name in (*spec.distributions, *spec.runtimes)})
    return [f"{name} {version}" for name in names if (version := version_of(name))]


def _name(words: Sequence[str]) -> ManifestName:
    encoded = "\0".join(words).encode("utf-8", "surrogateescape")
    return ManifestName(f"auto-{hashlib.sha256(encoded).hexdigest()[:16]}")


def _is_script(word: str) -> bool:
    return word.endswith((".py", ".sh")) and not word.startswith("-")


def _script_name(path: str) -> str:
    """Return a script's directory name, with numbers masked, and its file name."""
    script = Path(path)
    with suppress(OSError):  # the working directory may not exist
        script = script.absolute()
    return f"{_without_numbers(script.parent.name)}/{script.name}"


def _values(value: str, *, is_varying: bool) -> Iterator[str]:
    """Yield a value unless it varies between runs; of a path, yield only the last component."""
    if is_varying or len(value) > _MAX_VALUE or _VARYING_VALUE.fullmatch(value):
        return
    yield _without_numbers(Path(value).name) if value.startswith(("/", "./", "../", "~")) else value


def _without_numbers(text: str) -> str:
    return re.sub(r"[0-9]+", "#", text)


def _is_varying(option: str) -> bool:
    words = frozenset(re.split(r"[^A-Za-z]+", option.lower()))
    return bool(words & _VARYING) and not words & _KEPT
