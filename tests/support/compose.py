"""Merged compose files, and the settings of the Dockerfile for every container.

Implements the parts of the compose specification that docker/ uses: interpolation, anchors, and the
merging of files.
"""

import json
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

DOCKER = Path(__file__).parents[2] / "docker"

_VARIABLE = re.compile(r"\$\{(?P<name>[A-Z0-9_]+)(?P<kind>:-|:\?|-)?(?P<rest>[^}]*)\}")
_REPLACED = {"command", "entrypoint", "test"}
"""Lists that a later file replaces. A later file extends other lists."""


def load(*names: str, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the services, networks and volumes of compose files, merged in order.

    Raises:
        KeyError: a required variable is missing.
    """
    merged: dict[str, Any] = {}
    for name in names:
        raw = yaml.safe_load((DOCKER / name).read_text())
        merged = _merged(merged, _interpolated(raw, variables))
    return merged


def variables_of(*names: str) -> set[str]:
    return {
        match["name"] for name in names for match in _VARIABLE.finditer((DOCKER / name).read_text())
    }


def copy_build_context(target: Path) -> None:
    """Copy the files that `docker build` receives, which .dockerignore names."""
    root = DOCKER.parent
    for line in (root / ".dockerignore").read_text().splitlines():
        if line.startswith("!"):
            path, copy = root / line[1:], target / line[1:]
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, copy, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(path, copy)


def example_variables() -> dict[str, str]:
    """Return the variables of `.env.example` with their values, commented defaults included."""
    lines = (DOCKER / ".env.example").read_text().splitlines()
    return dict(
        line.removeprefix("#").split("=", 1)
        for line in lines
        if re.match(r"#?[A-Z][A-Z0-9_]*=", line)
    )


class Image:
    """The last stage of docker/Dockerfile.

    Attributes:
        instructions: (name, arguments) of all stages, in order.
        environment: variables of ENV.
        entrypoint, command: in exec form.
        healthcheck: command of HEALTHCHECK.
        user: uid:gid.
    """

    def __init__(self) -> None:
        text = (DOCKER / "Dockerfile").read_text()
        joined = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
        lines = (line.partition(" ") for line in joined.splitlines() if line.strip())
        self.instructions = [(name, arguments.strip()) for name, _, arguments in lines]
        starts = [at for at, (name, _) in enumerate(self.instructions) if name == "FROM"]
        last = dict(self.instructions[starts[-1] :])
        self.environment: dict[str, str] = dict(
            pair.split("=", 1) for pair in shlex.split(last["ENV"])
        )
        self.entrypoint = json.loads(last["ENTRYPOINT"])
        self.command = json.loads(last["CMD"])
        self.healthcheck = json.loads(last["HEALTHCHECK"].partition(" CMD ")[2])
        self.user = last["USER"]


def _interpolated(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: _interpolated(each, variables) for name, each in value.items()}
    if isinstance(value, list):
        return [_interpolated(each, variables) for each in value]
    if not isinstance(value, str):
        return value

    def replaced(match: re.Match[str]) -> str:
        if match["kind"] == "-":  # only an unset variable gets the default
            return variables.get(match["name"], match["rest"])
        found = variables.get(match["name"]) or ""
        if not found and match["kind"] == ":?":
            raise KeyError(f"{match['name']}: {match['rest']}")
        return found or (match["rest"] if match["kind"] == ":-" else "")

    return _VARIABLE.sub(replaced, value).replace("$$", "$")


def _merged(base: Any, over: Any, *, name: str = "") -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        both = {key: _merged(base[key], over[key], name=key) for key in base.keys() & over.keys()}
        return {**base, **over, **both}
    if isinstance(base, list) and isinstance(over, list) and name not in _REPLACED:
        if name == "volumes":
            targets = {_target(each) for each in over}
            base = [each for each in base if _target(each) not in targets]
        return [*base, *over]
    return over


def _target(volume: str) -> str:
    return volume.split(":")[1]
