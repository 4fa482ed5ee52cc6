"""Settings of a server. Only this module reads `GRAPHSTASH_*` variables.

The environment variable `GRAPHSTASH_<FIELD>` sets a field. A field with an `Option` is also an
option of `serve`, which takes precedence. Sizes accept `10GiB`, `500MB` or plain bytes. The
docstring below a field is its description in the reference and its help on the command line.
"""

import ipaddress
import logging
import os
import re
import socket
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from graphstash_schema import MIN_EXCHANGED_SECONDS, misspelling
from graphstash_schema.option import Option
from graphstash_schema.own_files import own_socket_path
from graphstash_schema.protocol import DEFAULT_MAX_ARTIFACT_BYTES
from graphstash_schema.settings import why_refused
from graphstash_server.claims import ClaimRule, IssuerUrl, KeysUrl, TrustedIssuer
from graphstash_server.errors import StartError

__all__ = [
    "ENV_PREFIX",
    "AccessSettings",
    "DatabaseSettings",
    "LimitSettings",
    "ListenSettings",
    "MaintenanceSettings",
    "Settings",
    "StoreSettings",
    "TlsSettings",
    "UpstreamSettings",
    "is_loopback",
    "load_settings",
    "user_data_dir",
    "warn_of_misspelled",
]

_LOGGER = logging.getLogger(__name__)

ENV_PREFIX = "GRAPHSTASH_"

_MIB = 1024**2
_MAX_WORKERS = 64
_SECRET = {"database_url", "upstream_token"}
_KEY_PREFIX = r"^$|^[A-Za-z0-9!_.*'()/-]+/$"


def user_data_dir() -> Path:
    """Return the default data directory."""
    import platformdirs

    return Path(platformdirs.user_data_dir("graphstash", appauthor=False))


class _Group(BaseModel):
    """A group of related fields. Code that needs only these fields accepts the group."""

    model_config = ConfigDict(frozen=True, validate_default=True, defer_build=True)


class ListenSettings(_Group):
    """Where and how a server listens, and what it logs."""

    host: Annotated[str, Option()] = Field("127.0.0.1", min_length=1)
    """Address to listen on. Loopback by default, because write access to the cache allows running
    code in every job that reads it. Change it deliberately."""
    port: Annotated[int, Option()] = Field(8077, ge=0, le=65535)
    """TCP port, 0 to 65535; 0 takes a free one."""
    workers: Annotated[int, Option()] = Field(1, ge=1, le=_MAX_WORKERS)
    """Processes that serve the port, 1 to 64. Default: 1, which is enough for a team. More
    processes use more cores, and if one crashes, the others keep serving."""
    max_connections: int = Field(16_384, ge=1, le=1_000_000)
    """Limit for the connections of one process, 1 to 1000000. Beyond it, idle connections are
    closed, or new ones wait and are then answered with 503. Default: 16384, all processes of a
    large job. The hard limit of open files may lower it: four files per connection, five with
    TLS, and 256."""
    header_seconds: float = Field(10.0, gt=0, le=3600)
    """Seconds within which a request's headers must arrive, up to 3600; also the idle timeout of a
    new connection, and up to 60, the time limit of its TLS handshake. Default: 10."""
    upload_idle_seconds: float = Field(30.0, gt=0, le=3600)
    """Seconds that an upload may send nothing, up to 3600. Default: 30, longer than a network
    hiccup and shorter than a training job's patience."""
    shutdown_seconds: int = Field(20, ge=0, le=3600)
    """Seconds that requests in progress may take to end at shutdown, 0 to 3600. Default: 20, below
    the 30 after which container runtimes kill."""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Option()] = "info"
    """Minimum severity of log messages."""
    log_format: Literal["text", "json"] = "text"
    """Log format: `text`, lines for people, or `json`, one object per line with the IDs of the
    request. Default: `text`."""
    metrics: Literal["off", "loopback", "token", "open"] = "token"
    """Who may read `GET /metrics`, which names namespaces. `off`: no caller. `loopback`: callers on
    this host without a proxy in between. `token`: callers with a token that has a grant on `*`,
    such as `read:*`. `open`: every caller that reaches the port. Default: `token`."""
    tracing: bool = False
    """Send OpenTelemetry traces of requests with OTLP over HTTP, as the OTEL_* variables configure.
    Off by default. Requires graphstash[tracing]."""
    access_log: Annotated[bool, Option({"--access-log": True, "--no-access-log": False})] = False
    """Log every request. Off by default, because it slows down small hits."""


class TlsSettings(_Group):
    """TLS of the port itself, for a server without a proxy in front."""

    tls_cert_file: Path | None = None
    """PEM file with the server's certificate and its chain. The port then serves HTTPS with TLS 1.2
    or later. Default: plain HTTP, for loopback or behind a proxy that terminates TLS."""
    tls_key_file: Path | None = None
    """PEM file with the private key of the certificate."""
    tls_client_ca_file: Path | None = None
    """PEM file with the CAs of clients. The server then requires a client certificate issued by one
    of them (mTLS). Not required by default."""

    @model_validator(mode="after")
    def _complete_tls(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise PydanticCustomError(
                "tls", "set both GRAPHSTASH_TLS_CERT_FILE and GRAPHSTASH_TLS_KEY_FILE"
            )
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise PydanticCustomError(
                "tls",
                "GRAPHSTASH_TLS_CLIENT_CA_FILE needs GRAPHSTASH_TLS_CERT_FILE: clients present "
                "certificates over TLS only",
            )
        return self


class AccessSettings(_Group):
    """Who may use the server."""

    auth: Annotated[Literal["none", "tokens"], Option()] = "tokens"
    """Authentication: tokens (of `graphstash token create` or an OIDC provider), or none. On
    loopback, jobs of the user who runs the server need no token, because they use a socket that
    only this user can reach."""
    insecure: Annotated[bool, Option({"--insecure": True})] = False
    """For tests: require no token on any address, unless GRAPHSTASH_AUTH=tokens is set explicitly.
    Every caller that reaches the server can then run code in every job that reads the cache."""
    oidc_issuer: IssuerUrl | None = None
    """Identity provider whose tokens (JWT) are also accepted, as in their claim iss:
    https://<host>/<path>. None by default."""
    oidc_audience: str | None = Field(None, min_length=1)
    """Value that the claim aud of such a token must equal or contain. Use a name that no other
    service accepts. Required with an issuer."""
    oidc_jwks_url: KeysUrl | None = None
    """URL of the provider's public keys. Default: the URL in the discovery document."""
    oidc_rules: tuple[ClaimRule, ...] = ()
    """Which claims give which grants, as JSON: [{"claims": {"repository": "team/model", "ref":
    "refs/heads/main", "event_name": "push"}, "grants": ["write:trusted"]}]. `*` matches any
    characters. The grants of all matching rules are combined. Required with an issuer."""
    oidc_issuers: tuple[TrustedIssuer, ...] = ()
    """Several identity providers, as JSON: [{"name": "k8s", "issuer": "https://k8s.internal",
    "audience": "graphstash", "rules": [...]}]. Each may have a jwks_url, and a ca_file if no public
    CA issued its certificate. The server accepts GRAPHSTASH_OIDC_ISSUER in addition. None by
    default."""
    oidc_token_seconds: int = Field(21_600, ge=MIN_EXCHANGED_SECONDS, le=30 * 86_400)
    """Maximum lifetime of a token that a job gets in exchange for a JWT, in seconds, 60 to 2592000.
    Default: 21600, six hours, as long as a hosted job of GitHub."""

    @property
    def trusted_issuers(self) -> tuple[TrustedIssuer, ...]:
        """All identity providers whose tokens the server accepts."""
        if self.oidc_issuer is None or self.oidc_audience is None:
            return self.oidc_issuers
        single = TrustedIssuer(
            issuer=self.oidc_issuer,
            audience=self.oidc_audience,
            jwks_url=self.oidc_jwks_url,
            rules=self.oidc_rules,
        )
        return (single, *self.oidc_issuers)

    @property
    def is_open(self) -> bool:
        """Whether the server requires no token."""
        return self.auth == "none" or (self.insecure and "auth" not in self.model_fields_set)

    @model_validator(mode="after")
    def _require_complete_oidc(self) -> Self:
        if self.oidc_issuer is None:
            if self.oidc_audience is not None or self.oidc_jwks_url is not None or self.oidc_rules:
                raise PydanticCustomError(
                    "oidc",
                    "GRAPHSTASH_OIDC_AUDIENCE, _JWKS_URL and _RULES need GRAPHSTASH_OIDC_ISSUER",
                )
        elif self.oidc_audience is None or not self.oidc_rules:
            raise PydanticCustomError(
                "oidc",
                "GRAPHSTASH_OIDC_ISSUER needs GRAPHSTASH_OIDC_AUDIENCE and GRAPHSTASH_OIDC_RULES: "
                "without them it would grant nothing",
            )
        if self.trusted_issuers and self.is_open:
            raise PydanticCustomError("oidc", "GRAPHSTASH_OIDC_* needs GRAPHSTASH_AUTH=tokens")
        for what in ("issuer", "name"):
            values = [getattr(each, what) for each in self.trusted_issuers]
            if len(set(values)) < len(values):
                raise PydanticCustomError(
                    "oidc",
                    "GRAPHSTASH_OIDC_ISSUERS: two issuers have the same {what}: give each its own",
                    {"what": what},
                )
        return self


class DatabaseSettings(_Group):
    """Location of the data, and database of the metadata."""

    data_dir: Annotated[Path, Option()] = Field(default_factory=user_data_dir)
    """Directory of the database and the blobs. Default: the platform's directory for user data."""
    database_url: str = ""
    """Database of the metadata: postgresql://<user>:<password>@<host>/<database> for a team,
    sqlite:///<path> for one host. Default: a SQLite file in the data directory, which needs no
    setup."""
    database_connections: int = Field(5, ge=2, le=100)
    """Limit for one process's connections to PostgreSQL, 2 to 100, plus one for notifications.
    Default: 5, so that two servers of four workers stay below PostgreSQL's 100."""
    auto_migrate: bool = True
    """Upgrade the database to this release's revision at the start. If false, the server refuses to
    start until `graphstash migrate` has upgraded it in a separate step."""
    flush_seconds: float = Field(1.0, gt=0, le=60)
    """Seconds between two writes of the usage counters to the database, up to 60. Default: 1. A
    crash can lose that much of them."""

    @field_validator("database_url")
    @classmethod
    def _with_driver(cls, url: str) -> str:
        scheme, _, rest = url.partition("://")
        if scheme in ("postgres", "postgresql", "postgresql+asyncpg") and rest:
            # asyncpg calls the option `ssl`.
            return f"postgresql+asyncpg://{rest.replace('sslmode=', 'ssl=')}"
        if scheme in ("sqlite", "sqlite+aiosqlite") and rest.startswith("/") and rest != "/":
            return f"sqlite+aiosqlite://{rest}"
        if url:
            raise PydanticCustomError(
                "database_url",
                "it takes postgresql://<user>:<password>@<host>/<database> or sqlite:///<path>",
            )
        return url

    @model_validator(mode="after")
    def _default_database(self) -> Self:
        if not self.database_url:
            object.__setattr__(self, "database_url", self._default_url)
        return self

    @property
    def has_default_database(self) -> bool:
        """Whether the database is the SQLite file in the data directory."""
        return self.database_url == self._default_url

    @property
    def _default_url(self) -> str:
        return f"sqlite+aiosqlite:///{self.data_dir.absolute() / 'graphstash.sqlite3'}"


class StoreSettings(_Group):
    """Location of the blobs."""

    blob_store: Literal["disk", "s3", "gcs", "azure"] = "disk"
    """Where the blobs are: disk, in the data directory, or a bucket that any number of servers can
    share: s3, gcs (Google Cloud Storage) or azure (Azure Blob Storage). Default: disk, because it
    needs nothing else."""
    s3_bucket: str = ""
    """Bucket of the blobs, which must exist. Credentials come from the usual AWS sources
    (AWS_ACCESS_KEY_ID, a profile, the host's role), never from a graphstash setting."""
    s3_prefix: str = Field("", pattern=_KEY_PREFIX)
    """Prefix of all object names, ending with a slash. Empty by default, for a bucket that only the
    cache uses."""
    s3_endpoint_url: str | None = Field(None, pattern=r"^https?://[^/\s]+/?$")
    """URL of the S3 server, e.g. http://seaweedfs:8333. Default: AWS."""
    s3_region: str | None = Field(None, min_length=1)
    """Region of the bucket. Default: the region of the AWS configuration."""
    s3_addressing: Literal["auto", "path", "virtual"] = "auto"
    """Whether requests name the bucket in the path or in the host name. auto lets boto3 decide.
    Most servers other than AWS need path."""
    s3_redirect_bytes: ByteSize | None = Field(None, ge=0)
    """Size from which clients download blobs directly from the bucket, with a link that is valid
    for 15 minutes. Never by default, because clients must be able to reach the endpoint."""
    gcs_bucket: str = ""
    """Bucket of the blobs, which must exist. Credentials are Google's application default
    credentials (the host's or pod's service account, GOOGLE_APPLICATION_CREDENTIALS)."""
    gcs_prefix: str = Field("", pattern=_KEY_PREFIX)
    """Prefix of all object names, ending with a slash. Empty by default."""
    azure_container: str = ""
    """Container of the blobs, which must exist. Account and credentials come from
    AZURE_STORAGE_ACCOUNT_NAME and the other variables of Azure, or the host's managed identity."""
    azure_prefix: str = Field("", pattern=_KEY_PREFIX)
    """Prefix of all blob names, ending with a slash. Empty by default."""
    tier_limit_bytes: ByteSize = Field(ByteSize(10 * 1024 * _MIB), ge=0)
    """Size of the disk tier in front of a bucket, in bytes. The server evicts the least recently
    used blobs. Default: 10 GiB, the working set of a team. 0 disables the tier."""
    min_free_bytes: Annotated[ByteSize, Option()] = Field(ByteSize(256 * _MIB), ge=0)
    """Free space that uploads leave on the disk, in bytes, 0 or more. Default: 256 MiB, so that the
    database can always grow and shrink."""

    @field_validator("s3_bucket", "gcs_bucket", "azure_container")
    @classmethod
    def _require_bucket(cls, value: str, info: ValidationInfo) -> str:
        kind, _, container = str(info.field_name).partition("_")
        if not value and info.data.get("blob_store") == kind:
            raise ValueError(f"blob_store is {kind}, which needs the name of a {container}")
        return value


class LimitSettings(_Group):
    """How much may be stored."""

    max_artifact_bytes: Annotated[ByteSize, Option()] = Field(
        ByteSize(DEFAULT_MAX_ARTIFACT_BYTES), gt=0
    )
    """Largest artifact accepted, in bytes, above 0. Default: 4 GiB, because executables of large
    models reach hundreds of megabytes."""
    store_limit_bytes: Annotated[ByteSize | None, Option()] = Field(None, gt=0)
    """Limit for all artifacts with their metadata, and all manifests, in bytes, above 0. If
    eviction cannot make room, the server answers a PUT with 507. Default: the size of the disk."""
    soft_limit_bytes: ByteSize | None = Field(None, gt=0)
    """Bytes of all artifacts above which the server evicts the least valuable ones, above 0 and at
    most the store limit. Default: nine tenths of the store limit."""
    namespace_limit_bytes: ByteSize | None = Field(None, gt=0)
    """Limit for the artifacts of one namespace with their metadata, and its manifests, in bytes,
    above 0. Eviction begins at nine tenths of it. No limit by default."""
    namespace_limits: dict[str, Annotated[ByteSize, Field(gt=0)]] = Field(default_factory=dict)
    """Limits of single namespaces, by pattern, as JSON: {"ci-*": "10GiB", "research": "200GiB"}.
    The first matching pattern applies instead of GRAPHSTASH_NAMESPACE_LIMIT_BYTES."""

    @model_validator(mode="after")
    def _require_ordered_limits(self) -> Self:
        soft, hard = self.soft_limit_bytes, self.store_limit_bytes
        if soft is not None and hard is not None and soft > hard:
            raise PydanticCustomError(
                "limits",
                f"GRAPHSTASH_SOFT_LIMIT_BYTES={soft} is above GRAPHSTASH_STORE_LIMIT_BYTES={hard}: "
                "eviction has to begin before uploads are refused",
            )
        return self


class MaintenanceSettings(_Group):
    """Background work of a server, and retention periods."""

    retain_days: float | None = Field(None, gt=0, le=365_000)
    """Evict artifacts that were not used for this many days, above 0 and up to 365000, even if
    there is room. By default the server keeps them."""
    retain_toolchains: int | None = Field(None, ge=1)
    """Keep only the N most recently used toolchains, 1 or more, of each namespace and artifact
    kind, and evict the artifacts of the others. By default the server keeps all."""
    audit_days: float = Field(90.0, gt=0, le=36_500)
    """Days for which the audit log is kept, above 0 and up to 36500. Default: 90, because questions
    about a change often come weeks later."""
    maintenance_seconds: float = Field(60.0, gt=0, le=3600)
    """Seconds between two rounds of maintenance, up to 3600. Default: 60. An upload that exceeds a
    soft limit starts a round at once."""


class UpstreamSettings(_Group):
    """The server that owns the namespaces, if this server serves a region."""

    upstream_url: str | None = Field(None, pattern=r"^https?://[^/\s]+/?$")
    """URL of the upstream, e.g. https://graphstash.example.com. This server then fetches artifacts
    from there on a miss, keeps them, and sends leases and new artifacts there. None by default."""
    upstream_token: SecretStr | None = None
    """Token of the upstream with which this server reads and writes there. It needs a grant for
    each namespace of the region, such as write:*, and for a trusted namespace one that names it."""
    upstream_ca_file: Path | None = None
    """PEM file with the CAs of the upstream's certificate. Default: the system's CAs."""
    upstream_answer_seconds: float = Field(3.0, gt=0, le=60)
    """Seconds that this server waits for the beginning of an answer of the upstream, above 0 and up
    to 60. Then it does without the upstream until the upstream answers a probe. Default: 3, twenty
    round trips to the other side of the earth."""
    upstream_offline_seconds: float = Field(43_200, ge=0, le=30 * 86_400)
    """Seconds for which a region accepts a token after the upstream last confirmed it, while the
    upstream does not answer, 0 to 2592000. Default: 43200, a night. Such a token may have been
    revoked meanwhile."""

    @model_validator(mode="after")
    def _require_upstream(self) -> Self:
        if self.upstream_url is None and self.upstream_token is not None:
            raise PydanticCustomError(
                "upstream", "GRAPHSTASH_UPSTREAM_TOKEN needs GRAPHSTASH_UPSTREAM_URL"
            )
        return self


class Settings(
    ListenSettings,
    TlsSettings,
    AccessSettings,
    UpstreamSettings,
    DatabaseSettings,
    StoreSettings,
    LimitSettings,
    MaintenanceSettings,
):
    """Settings of one server."""

    @model_validator(mode="after")
    def _require_tokens_in_a_region(self) -> Self:
        if self.upstream_url is not None and self.is_open:
            raise PydanticCustomError(
                "upstream",
                "GRAPHSTASH_UPSTREAM_URL needs GRAPHSTASH_AUTH=tokens: otherwise each caller would "
                "have the rights of GRAPHSTASH_UPSTREAM_TOKEN",
            )
        return self

    @property
    def own_socket(self) -> Path | None:
        """Socket for the jobs of this user. None if the server uses TLS, requires no token, or
        listens beyond loopback, and for a user without a home directory.
        """
        if self.is_open or self.tls_cert_file is not None or not is_loopback(self.host):
            return None
        return own_socket_path(os.environ)

    @property
    def blob_dir(self) -> Path:
        """Directory of the disk store's blobs."""
        return self.data_dir / "blobs"

    @property
    def spool_dir(self) -> Path:
        """Directory of large uploads until the bucket has stored them."""
        return self.data_dir / "spool"

    @property
    def tier_dir(self) -> Path:
        """Directory of the disk tier in front of a bucket."""
        return self.data_dir / "tier"


def load_settings(**options: Any) -> Settings:
    """Read the settings from the environment. Options that are not None take precedence.

    Raises:
        StartError: a value is malformed or out of range. The message names the variable, its
            value and the range.
    """
    # Imported late: `serve` declares its options from this module without the server's packages.
    from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsError

    given = {name: value for name, value in options.items() if value is not None}
    environment = EnvSettingsSource(
        cast("type[BaseSettings]", Settings), env_prefix=ENV_PREFIX, env_ignore_empty=True
    )
    try:
        return Settings(**{**environment(), **given})
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
            value = "..." if name in _SECRET else problem["input"]
            why = why_refused(problem, Settings.model_fields.get(name))
            lines.append(f"{shown}={value!s} is not valid: {why}")
        raise StartError("; ".join(lines)) from None


def warn_of_misspelled() -> None:
    """Log a warning about environment variables that look like misspelled settings."""
    unknown = misspelling.unknown_variables(
        os.environ, prefix=ENV_PREFIX, settings=Settings.model_fields
    )
    if warning := misspelling.warning_of(unknown):
        _LOGGER.warning("%s", warning)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address resolves to loopback addresses only."""
    try:
        resolved = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: not a valid host name
        return False
    return all(
        ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
        for *_, address in resolved
    )


def _named_in(error: Exception) -> str:
    """Return the name of the malformed variable, which only the error's message contains."""
    found = re.search(r'field "(\w+)"', str(error))
    return f"{ENV_PREFIX}{found[1].upper()}" if found else str(error)
