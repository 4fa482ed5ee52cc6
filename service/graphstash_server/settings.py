"""Settings: everything that can be configured, and the only reader of the environment.

Every field is set by the environment variable `GRAPHSTASH_<FIELD>` or by the option of `serve` with
the same name; the option wins. Sizes take `10GiB`, `500MB` or plain bytes.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import platformdirs
from pydantic import (
    ByteSize,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from graphstash_schema.protocol import DEFAULT_MAX_ARTIFACT_BYTES
from graphstash_server.claims import ClaimRule
from graphstash_server.errors import StartError

__all__ = ["ENV_PREFIX", "Settings", "load_settings"]

ENV_PREFIX = "GRAPHSTASH_"

_MIB = 1024**2
_MAX_WORKERS = 64


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
    workers: int = Field(
        default=1,
        ge=1,
        le=_MAX_WORKERS,
        description=f"Processes that serve the port, 1 to {_MAX_WORKERS}. 1 by default: it serves "
        "a team; more are for more cores, and a crash of one leaves the others serving.",
    )
    tls_cert_file: Path | None = Field(
        default=None,
        description="PEM file with the server's certificate and its chain: the port speaks HTTPS, "
        "TLS 1.2 or later. Plain HTTP by default, for loopback or behind a proxy that ends TLS.",
    )
    tls_key_file: Path | None = Field(
        default=None, description="PEM file with the private key of the certificate."
    )
    tls_client_ca_file: Path | None = Field(
        default=None,
        description="PEM file with the authorities of clients: only who shows a certificate of "
        "theirs is let in (mTLS). By default nobody has to.",
    )
    max_connections: int = Field(
        default=2048,
        ge=1,
        le=1_000_000,
        description="Most connections of one process, 1 to 1000000; further ones are answered 503. "
        "2048 by default: a large job's hosts all at once.",
    )
    header_seconds: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        description="How long a request's headers may take to come in, in seconds, up to 3600; "
        "also how long a new connection may ask nothing. 10 by default.",
    )
    auth: Literal["none", "tokens"] = Field(
        default="none",
        description="Whom to serve: none asks nobody who they are, tokens lets in whoever shows a "
        "token that `graphstash token create` made, or one of an identity provider. None by "
        "default: on loopback, the host's own users are the limit.",
    )
    oidc_issuer: str | None = Field(
        default=None,
        pattern=r"^https://[^\s]+$|^http://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?(/[^\s]*)?$",
        description="Identity provider whose tokens (JWT) are taken, too, as in their claim iss: "
        "https://<host>/<path>. None by default.",
    )
    oidc_audience: str | None = Field(
        default=None,
        min_length=1,
        description="What the claim aud of such a token must be, or have in it: a name that no "
        "other service takes. Needed with an issuer.",
    )
    oidc_jwks_url: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s]+$",
        description="Where the provider's public keys are. By default its discovery document says "
        "so.",
    )
    oidc_rules: tuple[ClaimRule, ...] = Field(
        default=(),
        description="Which claims give which grants, as JSON: "
        '[{"claims": {"repository": "team/model", "ref": "refs/heads/main"}, '
        '"grants": ["write:trusted"]}]. `*` stands for any characters; all rules that fit add up. '
        "Needed with an issuer.",
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
        description="Where the metadata are: postgresql://<user>:<password>@<host>/<database> for "
        "a team, sqlite:///<path> for one host. By default a file in the data directory, which "
        "needs no set-up.",
    )
    database_connections: int = Field(
        default=5,
        ge=2,
        le=100,
        description="Most connections of one process to PostgreSQL, 2 to 100, and one more for "
        "notifications. 5 by default: two servers of four workers stay below PostgreSQL's 100.",
    )
    auto_migrate: bool = Field(
        default=True,
        description="Bring the database to this release's revision at the start. Where `graphstash "
        "migrate` does that as a step of its own, false: the server refuses to start before it.",
    )
    blob_store: Literal["disk", "s3"] = Field(
        default="disk",
        description="Where the blobs are: disk, in the data directory, or s3, in a bucket that any "
        "number of servers may share. Disk by default: it needs nothing else.",
    )
    s3_bucket: str = Field(
        default="",
        validate_default=True,
        description="Bucket of the blobs; it must exist. Credentials come the usual AWS way "
        "(AWS_ACCESS_KEY_ID, a profile, the host's role), never from a setting of ours.",
    )
    s3_prefix: str = Field(
        default="",
        pattern=r"^$|^[A-Za-z0-9!_.*'()/-]+/$",
        description="What the names of all objects begin with; ends with a slash. Empty by "
        "default: the bucket is for the cache alone.",
    )
    s3_endpoint_url: str | None = Field(
        default=None,
        pattern=r"^https?://[^/\s]+/?$",
        description="Where the S3 is, e.g. http://seaweedfs:8333. AWS by default.",
    )
    s3_region: str | None = Field(
        default=None,
        min_length=1,
        description="Region of the bucket. By default what the AWS configuration says.",
    )
    s3_addressing: Literal["auto", "path", "virtual"] = Field(
        default="auto",
        description="Whether the bucket is named in the path or in the host name; auto lets boto3 "
        "decide. Most servers other than AWS's want path.",
    )
    s3_redirect_bytes: ByteSize | None = Field(
        default=None,
        ge=0,
        description="Blobs of this size or more are fetched from the bucket itself, with a link "
        "that is good for 15 minutes. Never by default: clients have to be able to reach the "
        "endpoint.",
    )
    tier_limit_bytes: ByteSize = Field(
        default=ByteSize(10 * 1024 * _MIB),
        ge=0,
        description="Size of the disk tier in front of S3, in bytes; the least recently used blobs "
        "go. 10 GiB by default: the working set of a team; 0 for none.",
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
        "answered 507 when nothing more can be evicted. By default the disk is the limit.",
    )
    soft_limit_bytes: ByteSize | None = Field(
        default=None,
        gt=0,
        description="Bytes of all artifacts above which the least valuable ones are evicted, above "
        "0 and at most the store limit. Nine tenths of the store limit by default.",
    )
    namespace_limit_bytes: ByteSize | None = Field(
        default=None,
        gt=0,
        description="Most bytes of the artifacts of one namespace, above 0; eviction begins at "
        "nine tenths of it. No limit by default.",
    )
    namespace_limits: dict[str, Annotated[ByteSize, Field(gt=0)]] = Field(
        default_factory=dict,
        description="Limits of single namespaces, by pattern, as JSON: "
        '{"ci-*": "10GiB", "research": "200GiB"}. The first pattern that fits counts.',
    )
    retain_days: float | None = Field(
        default=None,
        gt=0,
        description="Evict artifacts that nobody used for so many days, above 0, whatever room "
        "there is. They stay by default.",
    )
    retain_toolchains: int | None = Field(
        default=None,
        ge=1,
        description="Evict artifacts of all but so many toolchains, 1 or more, of each namespace "
        "and kind; the most recently used ones stay. All stay by default.",
    )
    audit_days: float = Field(
        default=90.0,
        gt=0,
        le=36_500,
        description="How long the audit log is kept, in days, above 0 and up to 36500. 90 by "
        "default: longer than it takes until somebody asks who it was.",
    )
    maintenance_seconds: float = Field(
        default=60.0,
        gt=0,
        le=3600,
        description="Time between two rounds of maintenance, in seconds, up to 3600. 60 by "
        "default; an upload that passes a soft limit starts one at once.",
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

    @field_validator("workers", mode="wrap")
    @classmethod
    def _name_the_whole_range(cls, given: object, parse: ValidatorFunctionWrapHandler) -> Any:
        try:
            return parse(given)
        except ValidationError:
            raise PydanticCustomError(
                "workers", f"it takes a whole number from 1 to {_MAX_WORKERS}"
            ) from None

    @field_validator("database_url")
    @classmethod
    def _name_the_driver(cls, url: str) -> str:
        scheme, _, rest = url.partition("://")
        if scheme in ("postgres", "postgresql", "postgresql+asyncpg") and rest:
            # The driver's word for what every other tool calls sslmode.
            return f"postgresql+asyncpg://{rest.replace('sslmode=', 'ssl=')}"
        if scheme in ("sqlite", "sqlite+aiosqlite") and rest.startswith("/") and rest != "/":
            return f"sqlite+aiosqlite://{rest}"
        if url:
            raise PydanticCustomError(
                "database_url",
                "it takes postgresql://<user>:<password>@<host>/<database> or sqlite:///<path>",
            )
        return url

    @field_validator("s3_bucket")
    @classmethod
    def _need_a_bucket(cls, value: str, info: ValidationInfo) -> str:
        if not value and info.data.get("blob_store") == "s3":
            raise ValueError("blob_store is s3, which needs the name of a bucket")
        return value

    @model_validator(mode="after")
    def _place_the_database(self) -> Self:
        if not self.database_url:
            path = self.data_dir.absolute() / "graphstash.sqlite3"
            object.__setattr__(self, "database_url", f"sqlite+aiosqlite:///{path}")
        return self

    @model_validator(mode="after")
    def _complete_tls(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise PydanticCustomError(
                "tls", "GRAPHSTASH_TLS_CERT_FILE and GRAPHSTASH_TLS_KEY_FILE need each other"
            )
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise PydanticCustomError(
                "tls",
                "GRAPHSTASH_TLS_CLIENT_CA_FILE needs GRAPHSTASH_TLS_CERT_FILE: clients show a "
                "certificate over TLS only",
            )
        return self

    @model_validator(mode="after")
    def _order_the_limits(self) -> Self:
        soft, hard = self.soft_limit_bytes, self.store_limit_bytes
        if soft is not None and hard is not None and soft > hard:
            raise PydanticCustomError(
                "limits",
                f"GRAPHSTASH_SOFT_LIMIT_BYTES={soft} is above GRAPHSTASH_STORE_LIMIT_BYTES={hard}: "
                "eviction has to begin before uploads are refused",
            )
        return self

    @model_validator(mode="after")
    def _know_the_provider(self) -> Self:
        if self.oidc_issuer is None:
            if self.oidc_audience is not None or self.oidc_jwks_url is not None or self.oidc_rules:
                raise PydanticCustomError(
                    "oidc", "GRAPHSTASH_OIDC_* says something of a provider: set _OIDC_ISSUER, too"
                )
            return self
        if self.auth != "tokens" or self.oidc_audience is None or not self.oidc_rules:
            raise PydanticCustomError(
                "oidc",
                "GRAPHSTASH_OIDC_ISSUER needs GRAPHSTASH_AUTH=tokens, GRAPHSTASH_OIDC_AUDIENCE and "
                "GRAPHSTASH_OIDC_RULES: otherwise it would let in nobody, or whoever it knows",
            )
        return self

    @property
    def blob_dir(self) -> Path:
        """Where the disk store keeps blobs."""
        return self.data_dir / "blobs"

    @property
    def spool_dir(self) -> Path:
        """Where large uploads wait until S3 has them."""
        return self.data_dir / "spool"

    @property
    def tier_dir(self) -> Path:
        """Where the disk tier in front of S3 keeps blobs."""
        return self.data_dir / "tier"


def load_settings(**options: Any) -> Settings:
    """Reads the environment; options that are not None win.

    Raises:
        StartError: for a value that is out of form or range, naming variable, value and range.
    """
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return Settings(**given)
    except SettingsError as error:
        raise StartError(f"{_named_in(error)} is not valid: it takes JSON") from None
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False):
            if not problem["loc"]:
                lines.append(problem["msg"])
                continue
            name = str(problem["loc"][0])
            source = f"--{name.replace('_', '-')}" if name in given else f"{ENV_PREFIX}{name}"
            shown = source if name in given else source.upper()
            value = "..." if name == "database_url" else problem["input"]  # it has a password
            lines.append(f"{shown}={value!s} is not valid: {problem['msg']}")
        raise StartError("; ".join(lines)) from None


def _named_in(error: SettingsError) -> str:
    """The variable that could not be read: pydantic-settings has its field in the message only."""
    found = re.search(r'field "(\w+)"', str(error))
    return f"{ENV_PREFIX}{found[1].upper()}" if found else str(error)
