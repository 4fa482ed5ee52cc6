"""Settings: everything that can be configured, and the only reader of the environment.

Every field is set by the environment variable `GRAPHSTASH_<FIELD>` or by the option of `serve` with
the same name; the option wins. Sizes take `10GiB`, `500MB` or plain bytes.
"""

from pathlib import Path
from typing import Any, Literal, Self

import platformdirs
from pydantic import ByteSize, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from graphstash_schema.protocol import DEFAULT_MAX_ARTIFACT_BYTES
from graphstash_server.errors import StartError

__all__ = ["ENV_PREFIX", "Settings", "load_settings"]

ENV_PREFIX = "GRAPHSTASH_"

_MIB = 1024**2


class Settings(BaseSettings):
    """One server's settings."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="ignore", env_ignore_empty=True
    )

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address to listen on. Loopback by default: whoever can write to the cache can "
        "run code in every job that reads it, so reaching further is a decision.",
    )
    port: int = Field(
        default=8077, ge=0, le=65535, description="TCP port, 0 to 65535; 0 takes a free one."
    )
    insecure: bool = Field(
        default=False,
        description="Listen beyond loopback although nobody has to show who they are.",
    )
    data_dir: Path = Field(
        default_factory=lambda: Path(platformdirs.user_data_dir("graphstash", appauthor=False)),
        description="Directory of the database and the blobs; by default where the platform keeps "
        "a user's data.",
    )
    database_url: str = Field(
        default="",
        pattern=r"^$|^sqlite\+aiosqlite:///.",
        description="SQLAlchemy URL of the database, sqlite+aiosqlite:///<path>. By default a file "
        "in the data directory, which needs no set-up.",
    )
    max_artifact_bytes: ByteSize = Field(
        default=ByteSize(DEFAULT_MAX_ARTIFACT_BYTES),
        gt=0,
        description="Largest artifact taken, in bytes, above 0. 4 GiB by default: executables of "
        "large models reach hundreds of megabytes.",
    )
    store_limit_bytes: ByteSize | None = Field(
        default=None,
        gt=0,
        description="Most bytes that all artifacts together may have, above 0; a PUT beyond it is "
        "answered 507. No limit by default: the disk's head-room is the limit then.",
    )
    min_free_bytes: ByteSize = Field(
        default=ByteSize(256 * _MIB),
        ge=0,
        description="Head-room that uploads leave on the disk, in bytes, 0 or more. 256 MiB by "
        "default: the database can always grow and shrink again.",
    )
    upload_idle_seconds: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="How long an upload may send nothing, in seconds, up to 3600. 30 by default: "
        "longer than a network hiccup, shorter than a training job's patience.",
    )
    flush_seconds: float = Field(
        default=1.0,
        gt=0,
        le=60,
        description="How often the usage counters are written to the database, in seconds, up to "
        "60. 1 by default: what a crash can lose of them.",
    )
    shutdown_seconds: int = Field(
        default=20,
        ge=0,
        le=3600,
        description="How long requests under way may take to end at shutdown, in seconds, 0 to "
        "3600. 20 by default: below the 30 after which container runtimes kill.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe message that is logged."
    )
    access_log: bool = Field(
        default=False,
        description="Log every request. Off by default: it costs a quarter of the small hits.",
    )

    @model_validator(mode="after")
    def _place_the_database(self) -> Self:
        if not self.database_url:
            path = self.data_dir.absolute() / "graphstash.sqlite3"
            object.__setattr__(self, "database_url", f"sqlite+aiosqlite:///{path}")
        return self

    @property
    def blob_dir(self) -> Path:
        """Where the disk store keeps blobs."""
        return self.data_dir / "blobs"


def load_settings(**options: Any) -> Settings:
    """Reads the environment; options that are not None win.

    Raises:
        StartError: for a value that is out of form or range, naming variable, value and range.
    """
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False):
            name = str(problem["loc"][0]) if problem["loc"] else ""
            source = f"--{name.replace('_', '-')}" if name in given else f"{ENV_PREFIX}{name}"
            shown = source if name in given else source.upper()
            lines.append(f"{shown}={problem['input']!s} is not valid: {problem['msg']}")
        raise StartError("; ".join(lines)) from None
