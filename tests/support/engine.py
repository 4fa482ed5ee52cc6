"""A container engine: the image and the compose files for real, as docker/README.md starts them."""

import json
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Self

from support.compose import DOCKER, copy_build_context
from support.ports import reserved_port
from support.processes import captured

__all__ = ["Project", "bridge_address", "guide"]

_DEADLINE_SECONDS = 600

_OVERRIDES = re.compile("GRAPHSTASH_|AWS_|COMPOSE_")
"""Variables of a shell that Compose prefers to docker/.env."""


def bridge_address() -> str:
    """The address under which containers reach this host."""
    inspect = ["docker", "network", "inspect", "bridge", "--format", "{{json .IPAM.Config}}"]
    done = captured(inspect, check=True)
    (config, *_) = json.loads(done.stdout)
    first = next(IPv4Network(config["Subnet"]).hosts())  # where the engine does not name it
    return str(config.get("Gateway") or first)


def guide(heading: str = "") -> list[str]:
    """The blocks of bash below a heading of docker/README.md, or above the first one."""
    text = (DOCKER / "README.md").read_text()
    if heading:
        text = text[text.index(f"\n## {heading}\n") + 4 :]
    return re.findall(r"^```sh\n(.*?)^```$", text.partition("\n## ")[0], re.MULTILINE | re.DOTALL)


class Project:
    """What docker/README.md starts, beside any deployment of this host; a context manager.

    Names that belong to one host (project, volumes, tags, port and subnet) are the test's own, and
    everything is removed at the end. The rest of the commands and files stays as it stands.

    Attributes:
        directory: the checkout in which commands run.
        files: the compose files, in order.
        port: where nginx is published on loopback.
    """

    def __init__(self, directory: Path) -> None:
        self.name = f"graphstash-test-{secrets.token_hex(4)}"
        self.directory = directory
        self.files = ["docker/compose.yaml"]
        self.port = reserved_port()
        self._subnet = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(256)}"

    def __enter__(self) -> Self:
        copy_build_context(self.directory)
        shutil.copytree(
            DOCKER, self.directory / "docker", dirs_exist_ok=True, ignore=lambda *_: [".env"]
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.sh("dc down --volumes --remove-orphans --timeout 5", check=False)
        tags = self.sh(f"docker image ls --quiet {self.name}", check=False).stdout.split()
        subprocess.run(["docker", "image", "rm", "--force", *tags], check=False)

    def set(self, **variables: str) -> None:
        """Adds variables to docker/.env; the last value of a name counts."""
        with (self.directory / "docker" / ".env").open("a") as file:
            file.writelines(f"{name}={value}\n" for name, value in variables.items())

    def set_names(self) -> None:
        """In docker/.env: what must not be the same in two deployments of a host."""
        self.set(
            GRAPHSTASH_PUBLISHED_PORT=str(self.port),
            GRAPHSTASH_SUBNET=self._subnet,
            GRAPHSTASH_IMAGE=f"{self.name}:0.1.0",
        )

    def sh(self, script: str, *, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Runs lines of the guide, in which `dc` stands for compose with the files of now.

        Raises:
            AssertionError: with what they printed, when one of them failed.
        """
        names = {
            "graphstash:0.": f"{self.name}:0.",
            "graphstash_data": f"{self.name}_data",
            "docker compose --file docker/compose.yaml": "dc",
        }
        for name, own in names.items():
            script = script.replace(name, own)
        compose = ["docker", "compose", "--project-name", self.name]
        for file in self.files:
            compose += ["--file", file]
        done = captured(
            ["bash", "-euc", f'dc() {{ {" ".join(compose)} "$@"; }}\n{script}'],
            cwd=self.directory,
            env={name: value for name, value in os.environ.items() if not _OVERRIDES.match(name)},
            stdin=subprocess.DEVNULL,
            timeout=_DEADLINE_SECONDS,
        )
        if check and done.returncode:
            logs = self.sh("dc ps --all; dc logs --tail 30", check=False)
            raise AssertionError(f"{script}\n{done.stdout}{done.stderr}\n{logs.stdout}")
        return done

    def containers(self) -> dict[str, dict[str, Any]]:
        """Service -> its container, as `docker inspect` describes it."""
        ids = self.sh("dc ps --all --quiet").stdout.split()
        found = json.loads(self._docker("inspect", *ids))
        label = "com.docker.compose.service"
        return {each["Config"]["Labels"][label]: each for each in found}

    def log(self, service: str) -> list[str]:
        """What a service has written to its standard output since its container was made."""
        return self._docker("logs", self.containers()[service]["Id"]).splitlines()

    @staticmethod
    def _docker(*arguments: str) -> str:
        command: Sequence[str] = ["docker", *arguments]
        return captured(command, check=True).stdout
