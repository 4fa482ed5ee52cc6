"""ClientConfig: every setting of a training job, and the only reader of its environment.

Each field is read from `GRAPHSTASH_<FIELD IN CAPITALS>`, e.g. `GRAPHSTASH_URL`. Arguments of
`graphstash.install` take precedence over the environment, as do the options of `graphstash run`
for the few fields that have one.
"""

import getpass
import ipaddress
import os
import re
import socket
import tempfile
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from graphstash.errors import ConfigError
from graphstash_schema import ManifestName, Namespace
from graphstash_schema.names import line_of
from graphstash_schema.own_files import own_socket_path
from graphstash_schema.protocol import (
    DEFAULT_LEASE_SECONDS,
    DEFAULT_MAX_ARTIFACT_BYTES,
    MAX_LEASE_SECONDS,
    MIN_LEASE_SECONDS,
)
from graphstash_schema.settings import why_refused

__all__ = [
    "ENVIRONMENT_PREFIX",
    "MAX_READ_NAMESPACES",
    "NO_SERVER",
    "TOKEN",
    "UNIX",
    "ClientConfig",
    "CredentialSettings",
    "HostSettings",
    "ServerSettings",
    "SharingSettings",
    "SignaturePolicy",
    "SignatureSettings",
    "default_cache_dir",
    "find_own_server",
    "github_token_request",
    "holder_name",
    "is_on_this_host",
    "netrc_path",
]

ENVIRONMENT_PREFIX: Final = "GRAPHSTASH_"

NO_SERVER: Final = "none"
"""Value of GRAPHSTASH_URL for a job that shares nothing."""

UNIX: Final = "unix:"
"""What begins the URL of a socket."""

MAX_READ_NAMESPACES: Final = 8
"""Limit of namespaces that a job reads from: a miss sends one request for each."""

TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]{1,8192}=*")
"""A valid value for `Authorization: Bearer` (RFC 6750)."""

_URL = re.compile(r"https?://[^/\s]+(/[^\s]*)?|unix:/[^\x00-\x1f]+")

_SECRET: Final = frozenset({"token"})


class SignaturePolicy(StrEnum):
    """Which artifacts may reach a compiler."""

    REQUIRE = "require"
    """Signed by a trusted key, or compiled by this user on this host."""
    PREFER = "prefer"
    """Also unsigned ones, which are counted; a bad signature is refused."""
    OFF = "off"
    """All artifacts; signatures are not checked."""

    def is_stricter_than(self, other: "SignaturePolicy") -> bool:
        """Whether it refuses artifacts that the other one accepts."""
        strictest_first = list(SignaturePolicy)
        return strictest_first.index(self) < strictest_first.index(other)


def default_cache_dir() -> Path:
    """The local tier's place: `$XDG_CACHE_HOME/graphstash`, or `~/.cache/graphstash`."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "graphstash"
    except RuntimeError:  # a container's user without a home
        return Path(tempfile.gettempdir()) / f"graphstash-{os.getuid()}"


def find_own_server() -> str:
    """The URL of the server that this user runs on this host; empty when there is none.

    Whether nobody else can have put it there is checked again with every connection.
    """
    path = own_socket_path(os.environ)
    try:
        return f"{UNIX}{path}" if path is not None and path.is_socket() else ""
    except OSError:
        return ""


def is_on_this_host(url: str) -> bool:
    """Whether no network lies between a job and the server."""
    host = urlsplit(url).hostname or ""
    try:
        return url.startswith(UNIX) or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def github_token_request() -> tuple[str, str] | None:
    """Where a job of GitHub Actions gets a JWT, and the bearer token for that; None elsewhere, and
    in a job without `permissions: id-token: write`.
    """
    url, token = (os.environ.get(f"ACTIONS_ID_TOKEN_REQUEST_{each}") for each in ("URL", "TOKEN"))
    return (url, token) if url and token else None


def holder_name() -> str:
    """The holder of a lease, for people: `user@host:pid`, at most 128 characters."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a passwd entry
        user = str(os.getuid())
    return line_of(f"{user}@{socket.gethostname()}:{os.getpid()}", most=128)


def _listed(value: object) -> object:
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(",") if name.strip())
    return value


def netrc_path() -> Path | None:
    """`$NETRC`, or `~/.netrc`; None for a user without a home."""
    try:
        return Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    except RuntimeError:
        return None


def _expanded(value: Path) -> Path:
    try:
        return value.expanduser().absolute()
    except RuntimeError as error:  # a container's user without a home
        raise ValueError(str(error)) from None


_Path = Annotated[Path, AfterValidator(_expanded)]


class _Group(BaseModel):
    """Some of the settings; the docstring below a field is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ServerSettings(_Group):
    """Which server, which namespaces, and how long a call may take."""

    url: str = Field(default_factory=find_own_server)
    """Base URL of the server, or `unix:<path>` of its socket. By default the server that this user
    runs on this host (`graphstash serve`). Without one, or with `none`, the job shares nothing and
    has its local tier only."""
    namespace: Namespace = Namespace("default")
    """Namespace that artifacts are published to, and read from."""
    read_namespaces: Annotated[tuple[Namespace, ...], BeforeValidator(_listed)] = Field(
        default=(), max_length=MAX_READ_NAMESPACES
    )
    """Namespaces to read from before `namespace`, in this order."""
    max_artifact: ByteSize = Field(default=ByteSize(DEFAULT_MAX_ARTIFACT_BYTES), gt=0)
    """Largest artifact to fetch or publish, before and after compression."""
    connect_seconds: float = Field(default=0.5, gt=0, le=60)
    """Timeout for a connection."""
    first_byte_seconds: float = Field(default=2.0, gt=0, le=300)
    """Timeout for the next byte of an answer."""
    fetch_seconds: float = Field(default=60.0, gt=0, le=3600)
    """Timeout for a whole fetch. Where the compile time is known and shorter, it is the timeout,
    but never less than first_byte_seconds."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        try:
            well_formed = _URL.fullmatch(value) is not None and urlsplit(value).port != 0
        except ValueError:  # a port that is not a number, or out of range
            well_formed = False
        if "@" in value and not value.startswith(UNIX):
            raise ValueError("the URL must not contain credentials; set GRAPHSTASH_TOKEN instead")
        if value == NO_SERVER:
            return ""
        if not well_formed:
            raise ValueError(
                "expected http://host:port, https://host:port, unix:/path/of/a/socket or none"
            )
        return value.rstrip("/")


class CredentialSettings(_Group):
    """What identifies the job to the server, and the server to the job."""

    token: SecretStr | None = None
    """Bearer token for the server."""
    token_file: _Path | None = None
    """File that holds the token; read again when it changes."""
    ca_file: _Path | None = None
    """CA bundle (PEM) used instead of the system's."""
    client_cert: _Path | None = None
    """Client certificate (PEM) for mTLS."""
    client_key: _Path | None = None
    """Private key of the client certificate; by default in the same file."""

    @field_validator("token")
    @classmethod
    def _check_token(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None:
            return None
        token = SecretStr(value.get_secret_value().strip())
        if TOKEN.fullmatch(token.get_secret_value()) is None:
            raise ValueError("expected a token without spaces, of at most 8192 characters")
        return token


class SignatureSettings(_Group):
    """Whose artifacts the job uses, and how it signs its own."""

    signing_key: _Path | None = None
    """Private key (Ed25519, PEM, mode 0600) that signs published artifacts."""
    trusted_keys: _Path | None = None
    """Path of the trusted-keys file, which `graphstash keys trust` writes."""
    signatures: SignaturePolicy | None = None
    """Which artifacts may reach a compiler: signed ones only (require), also unsigned ones
    (prefer), or all without a check (off). By default require with trusted_keys, else off."""


class SharingSettings(_Group):
    """What the job shares, and how long it waits for others and for its own uploads."""

    enabled: bool = True
    """Turn off to install no hooks."""
    hooks: Annotated[tuple[str, ...], BeforeValidator(_listed)] = Field(
        default=("torch_xla", "pjrt", "jax", "inductor", "triton")
    )
    """Compilers that get their hook."""
    read_only: bool = False
    """Fetch artifacts, but neither publish any nor take leases."""
    job: ManifestName | None = None
    """Name under which the server remembers the artifacts of this job, so that the next run fetches
    them at its start."""
    wait_seconds: float = Field(default=1200.0, ge=0, le=86400)
    """How long the job may wait in vain for others that compile the same graphs, in all; half of it
    for one holder. Waits that brought the artifact may take twice as long in addition. 0 never
    waits."""
    lease_seconds: float = Field(
        default=DEFAULT_LEASE_SECONDS, ge=MIN_LEASE_SECONDS, le=MAX_LEASE_SECONDS
    )
    """How long a lease outlives a killed holder."""
    publish_queue: int = Field(default=64, ge=1, le=4096)
    """How many artifacts may wait for their upload; more are dropped."""
    drain_seconds: float = Field(default=20.0, ge=0, le=3600)
    """How long the end of a job may wait for its uploads."""
    torch_xla_mode: str = Field(default="auto", pattern="^(auto|exact|hint)$")
    """How the torch_xla hook learns what is compiled: exact catches torch_xla's own look-up, hint
    predicts it, auto takes exact where it can."""


class HostSettings(_Group):
    """What the job keeps and says on this host."""

    cache_dir: _Path = Field(default_factory=default_cache_dir)
    """Directory of the local tier."""
    local_limit: ByteSize = Field(default=ByteSize(10 * 1024**3), ge=0)
    """Size limit of the local tier; the least recently used artifacts are deleted. 0 keeps nothing
    between jobs."""
    summary: bool = True
    """Print one line on standard error when the job ends."""
    explain: bool = False
    """Say on standard error, when the job ends, why it compiled what it compiled."""
    stats_file: _Path | None = None
    """File that gets one line of JSON with the statistics of each process."""


class ClientConfig(
    ServerSettings, CredentialSettings, SignatureSettings, SharingSettings, HostSettings
):
    """Settings of one training job: all groups, with flat names; see each field."""

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.client_key and not self.client_cert:
            raise ValueError("GRAPHSTASH_CLIENT_KEY needs GRAPHSTASH_CLIENT_CERT")
        if self.signature_policy is not SignaturePolicy.OFF and not self.trusted_keys:
            policy = self.signature_policy
            raise ValueError(f"GRAPHSTASH_SIGNATURES={policy} needs GRAPHSTASH_TRUSTED_KEYS")
        return self

    @property
    def readable(self) -> tuple[Namespace, ...]:
        """The namespaces to read from, in order."""
        return tuple(dict.fromkeys((*self.read_namespaces, self.namespace)))

    @property
    def signature_policy(self) -> SignaturePolicy:
        """Which artifacts may reach a compiler."""
        if self.signatures is not None:
            return self.signatures
        return SignaturePolicy.REQUIRE if self.trusted_keys else SignaturePolicy.OFF

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        """Reads the environment; `overrides` that are not None take precedence.

        Raises:
            ConfigError: names the setting, its value unless that is a secret, and what would be
                accepted.
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
            told = "; ".join(map(_sentence, error.errors(include_url=False)))
        # Out here, because pydantic's error holds the secrets and would hang on to ours.
        raise ConfigError(told)


def _sentence(problem: Any) -> str:
    if not problem["loc"]:  # about several settings, which it names
        return str(problem["msg"]).removeprefix("Value error, ")
    name, value = str(problem["loc"][0]), problem["input"]
    field = ClientConfig.model_fields.get(name)
    # An unknown name is a misspelt secret, perhaps.
    if field is None or name in _SECRET or (name == "url" and "@" in str(value)):
        value = "***"
    return f"{ENVIRONMENT_PREFIX}{name.upper()}={value!r}: {why_refused(problem, field)}"
