"""ClientConfig: every setting of a training job, and the only reader of its environment.

Each field is read from `GRAPHSTASH_<FIELD IN CAPITALS>`, e.g. `GRAPHSTASH_URL`. Arguments of
`graphstash.install` and options of `graphstash run` win over the environment.
"""

import getpass
import os
import re
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Self
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from graphstash._errors import ConfigError
from graphstash_schema import ManifestName, Namespace
from graphstash_schema.protocol import (
    DEFAULT_LEASE_SECONDS,
    DEFAULT_MAX_ARTIFACT_BYTES,
    MAX_LEASE_SECONDS,
    MIN_LEASE_SECONDS,
)

__all__ = ["DEFAULT_URL", "ENVIRONMENT_PREFIX", "ClientConfig", "default_cache_dir", "holder_name"]

ENVIRONMENT_PREFIX: Final = "GRAPHSTASH_"

DEFAULT_URL: Final = "http://127.0.0.1:8077"
"""Where `graphstash serve` listens unless told otherwise."""

_URL = re.compile(r"https?://[^/\s]+(/[^\s]*)?")


def default_cache_dir() -> Path:
    """The local tier's place: `$XDG_CACHE_HOME/graphstash`, or `~/.cache/graphstash`."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "graphstash"
    except RuntimeError:  # a container's user without a home
        return Path(tempfile.gettempdir()) / f"graphstash-{os.getuid()}"


def holder_name() -> str:
    """Who holds a lease, for people: `user@host:pid`, at most 128 characters."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a passwd entry
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}:{os.getpid()}"[:128]


def _hooks(value: object) -> object:
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(",") if name.strip())
    return value


class ClientConfig(BaseModel):
    """Settings of one training job; see each field."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(default=DEFAULT_URL, description="the server's base URL")
    namespace: Namespace = Field(
        default=Namespace("default"), description="where artifacts are read and written"
    )
    job: ManifestName | None = Field(
        default=None,
        description="name of the manifest that remembers this job's artifacts and fetches them "
        "beforehand; unset means none",
    )
    enabled: bool = Field(default=True, description="off: hooks are not installed at all")
    read_only: bool = Field(default=False, description="on: nothing is published, no lease taken")
    hooks: Annotated[tuple[str, ...], BeforeValidator(_hooks)] = Field(
        default=("torch_xla", "pjrt", "jax", "inductor", "triton"),
        description="which compilers get their hook, comma-separated",
    )
    cache_dir: Path = Field(
        default_factory=default_cache_dir, description="directory of the local tier"
    )
    local_limit: ByteSize = Field(
        default=ByteSize(10 * 1024**3),
        ge=0,
        description="size of the local tier, e.g. 10GiB; the least recently used artifacts go; "
        "0 keeps nothing between jobs",
    )
    max_artifact: ByteSize = Field(
        default=ByteSize(DEFAULT_MAX_ARTIFACT_BYTES),
        gt=0,
        description="largest artifact, before and after compression, that is fetched or published",
    )
    connect_seconds: float = Field(default=0.5, gt=0, le=60, description="time to get a connection")
    first_byte_seconds: float = Field(
        default=2.0, gt=0, le=300, description="time to wait for the next byte of an answer"
    )
    fetch_seconds: float = Field(
        default=60.0,
        gt=0,
        le=3600,
        description="longest fetch; a shorter known compile time bounds it further, but never "
        "below first_byte_seconds",
    )
    wait_seconds: float = Field(
        default=1200.0,
        ge=0,
        le=86400,
        description="compile budget: how long to wait for a colleague who compiles the same "
        "graph; 0 never waits",
    )
    lease_seconds: float = Field(
        default=DEFAULT_LEASE_SECONDS,
        ge=MIN_LEASE_SECONDS,
        le=MAX_LEASE_SECONDS,
        description="how long a lease outlives a killed holder",
    )
    publish_queue: int = Field(
        default=64, ge=1, le=4096, description="artifacts that may wait for their upload"
    )
    drain_seconds: float = Field(
        default=20.0, ge=0, le=3600, description="longest wait for uploads when the job ends"
    )
    torch_xla_mode: str = Field(
        default="auto",
        pattern="^(auto|exact|hint)$",
        description="how the torch_xla hook learns what is compiled; auto takes exact where it can",
    )
    summary: bool = Field(default=True, description="one line on standard error when the job ends")
    stats_file: Path | None = Field(
        default=None, description="file that gets one JSON line of statistics per process"
    )

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        try:
            well_formed = _URL.fullmatch(value) is not None and urlsplit(value).port != 0
        except ValueError:  # a port that is no number, or out of range
            well_formed = False
        if not well_formed:
            raise ValueError("expected http://host:port or https://host:port")
        return value.rstrip("/")

    @field_validator("cache_dir", "stats_file")
    @classmethod
    def _expand(cls, value: Path | None, _info: ValidationInfo) -> Path | None:
        try:
            return None if value is None else value.expanduser().absolute()
        except RuntimeError as error:
            raise ValueError(str(error)) from None

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        """Reads the environment; `overrides` that are not None win.

        Raises:
            ConfigError: names the setting, its value and what would be accepted.
        """
        source = os.environ if environ is None else environ
        values: dict[str, Any] = {
            name: source[variable]
            for name in cls.model_fields
            if (variable := ENVIRONMENT_PREFIX + name.upper()) in source and source[variable]
        }
        values |= {name: value for name, value in overrides.items() if value is not None}
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            lines = []
            for problem in error.errors(include_url=False):
                name = str(problem["loc"][0]) if problem["loc"] else "settings"
                variable = ENVIRONMENT_PREFIX + name.upper()
                told = problem["msg"].removeprefix("Value error, ")
                lines.append(f"{variable}={problem['input']!r}: {told}")
            raise ConfigError("; ".join(lines)) from None
