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
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

from graphstash._rules import (
    Rule,
    Secret,
    choice,
    flag,
    listed,
    number,
    path,
    secret,
    setting,
    size,
    text,
    whole,
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


def netrc_path() -> Path | None:
    """`$NETRC`, or `~/.netrc`; None for a user without a home."""
    try:
        return Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    except RuntimeError:
        return None


def _checked_url(value: str) -> str:
    if value in ("", NO_SERVER):
        return ""
    try:
        well_formed = _URL.fullmatch(value) is not None and urlsplit(value).port != 0
    except ValueError:  # a port that is not a number, or out of range
        well_formed = False
    if "@" in value and not value.startswith(UNIX):
        raise ValueError("the URL must not contain credentials; set GRAPHSTASH_TOKEN instead")
    if not well_formed:
        raise ValueError(
            "expected http://host:port, https://host:port, unix:/path/of/a/socket or none"
        )
    return value.rstrip("/")


def _checked_token(value: str) -> str:
    token = value.strip()
    if TOKEN.fullmatch(token) is None:
        raise ValueError("expected a token without spaces, of at most 8192 characters")
    return token


# In each group of settings, the docstring below a field is its description.


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Which server, which namespaces, and how long a call may take."""

    url: str = setting(find_own_server, text(_checked_url))
    """Base URL of the server, or `unix:<path>` of its socket. By default the server that this user
    runs on this host (`graphstash serve`). Without one, or with `none`, the job shares nothing and
    has its local tier only."""
    namespace: Namespace = setting(Namespace("default"), text(Namespace))
    """Namespace that artifacts are published to, and read from."""
    read_namespaces: tuple[Namespace, ...] = setting(
        (), listed(Namespace, most=MAX_READ_NAMESPACES)
    )
    """Namespaces to read from before `namespace`, in this order."""
    max_artifact: int = setting(DEFAULT_MAX_ARTIFACT_BYTES, size(above=0))
    """Largest artifact to fetch or publish, before and after compression."""
    connect_seconds: float = setting(0.5, number(above=0, most=60))
    """Timeout for a connection."""
    first_byte_seconds: float = setting(2.0, number(above=0, most=300))
    """Timeout for the next byte of an answer."""
    fetch_seconds: float = setting(60.0, number(above=0, most=3600))
    """Timeout for a whole fetch. Where the compile time is known and shorter, it is the timeout,
    but never less than first_byte_seconds."""


@dataclass(frozen=True, kw_only=True)
class CredentialSettings:
    """What identifies the job to the server, and the server to the job."""

    token: Secret | None = setting(None, secret(_checked_token))
    """Bearer token for the server."""
    token_file: Path | None = setting(None, path())
    """File that holds the token; read again when it changes."""
    ca_file: Path | None = setting(None, path())
    """CA bundle (PEM) used instead of the system's."""
    client_cert: Path | None = setting(None, path())
    """Client certificate (PEM) for mTLS."""
    client_key: Path | None = setting(None, path())
    """Private key of the client certificate; by default in the same file."""


@dataclass(frozen=True, kw_only=True)
class SignatureSettings:
    """Whose artifacts the job uses, and how it signs its own."""

    signing_key: Path | None = setting(None, path())
    """Private key (Ed25519, PEM, mode 0600) that signs published artifacts."""
    trusted_keys: Path | None = setting(None, path())
    """Path of the trusted-keys file, which `graphstash keys trust` writes."""
    signatures: SignaturePolicy | None = setting(None, choice(SignaturePolicy, SignaturePolicy))
    """Which artifacts may reach a compiler: signed ones only (require), also unsigned ones
    (prefer), or all without a check (off). By default require with trusted_keys, else off."""


@dataclass(frozen=True, kw_only=True)
class SharingSettings:
    """What the job shares, and how long it waits for others and for its own uploads."""

    enabled: bool = setting(True, flag())
    """Turn off to install no hooks."""
    hooks: tuple[str, ...] = setting(("torch_xla", "pjrt", "jax", "inductor", "triton"), listed())
    """Compilers that get their hook."""
    read_only: bool = setting(False, flag())
    """Fetch artifacts, but neither publish any nor take leases."""
    job: ManifestName | None = setting(None, text(ManifestName))
    """Name under which the server remembers the artifacts of this job, so that the next run fetches
    them at its start. By default a name that follows from the command, the script and the versions
    of the compilers: `auto-<16 hex digits>`."""
    prefetch_limit: int = setting(2 * 1024**3, size())
    """Most bytes that a run downloads to this host before they are needed, those first that took
    longest to compile for their size. 0 downloads none, and remembers nothing for a job without a
    name."""
    fail_on_miss: bool = setting(False, flag())
    """End the job before it compiles anything: with exit status 86 when nobody has the artifact,
    with 75 when the cache could not help, so that nothing is compiled either way."""
    max_compile_seconds: float = setting(0.0, number(most=1e7))
    """End the job with exit status 86 when the compilations of its processes on this host have
    taken that long in all, or one that runs would pass it. 0 is no limit."""
    report_runs: bool = setting(True, flag())
    """Tell the server, when a process ends that used the cache, what it counted and what it
    compiled: the script's name, never its arguments."""
    wait_seconds: float = setting(1200.0, number(most=86400))
    """How long the job may wait in vain for others that compile the same graphs, in all; half of it
    for one holder. Waits that brought the artifact may take twice as long in addition. 0 never
    waits."""
    lease_seconds: float = setting(
        DEFAULT_LEASE_SECONDS, number(least=MIN_LEASE_SECONDS, most=MAX_LEASE_SECONDS)
    )
    """How long a lease outlives a killed holder."""
    publish_queue: int = setting(64, whole(least=1, most=4096))
    """How many artifacts may wait for their upload; more are dropped."""
    drain_seconds: float = setting(20.0, number(most=3600))
    """How long the end of a job may wait for its uploads."""
    torch_xla_mode: str = setting("auto", choice(str, ("auto", "exact", "hint")))
    """How the torch_xla hook learns what is compiled: exact catches torch_xla's own look-up, hint
    predicts it, auto takes exact where it can."""


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """What the job keeps and says on this host."""

    cache_dir: Path = setting(default_cache_dir, path())
    """Directory of the local tier."""
    local_limit: int = setting(10 * 1024**3, size())
    """Size limit of the local tier; the least recently used artifacts are deleted. 0 keeps nothing
    between jobs."""
    offline_seconds: float = setting(24 * 3600.0, number(most=1e7))
    """How long copies on this host's disk that came from the server may be used while it does not
    answer, since this host last reached it: a withdrawal cannot be noticed meanwhile. 0 uses none
    then."""
    summary: bool = setting(True, flag())
    """Print one line on standard error when the job ends."""
    explain: bool = setting(False, flag())
    """Say on standard error, when the job ends, why it compiled what it compiled."""
    stats_file: Path | None = setting(None, path())
    """File that gets one line of JSON with the statistics of each process."""
    tracing: bool = setting(False, flag())
    """Send OpenTelemetry traces of look-ups, compilations and uploads: to the tracer provider of
    the job's own program where it has one, else with OTLP over HTTP, as the variables OTEL_* say.
    Needs graphstash[tracing]."""


@dataclass(frozen=True, kw_only=True)
class ClientConfig(
    ServerSettings, CredentialSettings, SignatureSettings, SharingSettings, HostSettings
):
    """Settings of one training job: all groups, with flat names; see each field.

    Attributes:
        given: which of them somebody chose; the others have their defaults.

    Raises:
        ConfigError: names each setting that cannot be used, its value unless that is a secret, and
            what would be accepted.
    """

    given: frozenset[str] = field(default=frozenset(), repr=False, compare=False)

    def __post_init__(self) -> None:
        wrong = []
        for name, rule in self.rules().items():
            value = getattr(self, name)
            if value is None:
                continue
            try:
                object.__setattr__(self, name, rule.read(value))
            except (TypeError, ValueError) as error:
                hide = rule.is_secret or (name == "url" and "@" in str(value))
                shown = "***" if hide else value
                wrong.append(f"{ENVIRONMENT_PREFIX}{name.upper()}={shown!r}: {error}")
        if wrong:
            raise ConfigError("; ".join(wrong))
        if self.client_key and not self.client_cert:
            raise ConfigError("GRAPHSTASH_CLIENT_KEY needs GRAPHSTASH_CLIENT_CERT")
        if self.signature_policy is not SignaturePolicy.OFF and not self.trusted_keys:
            policy = self.signature_policy
            raise ConfigError(f"GRAPHSTASH_SIGNATURES={policy} needs GRAPHSTASH_TRUSTED_KEYS")

    @classmethod
    def rules(cls) -> Mapping[str, Rule]:
        """Every setting, and what it accepts."""
        return {each.name: each.metadata["rule"] for each in fields(cls) if each.metadata}

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
        known = cls.rules()
        values: dict[str, Any] = {
            name: source[variable]
            for name in known
            if source.get(variable := ENVIRONMENT_PREFIX + name.upper())
        }
        values |= {name: value for name, value in overrides.items() if value is not None}
        if unknown := sorted(set(values) - set(known)):
            raise ConfigError(f"jobs have no such settings: {', '.join(unknown)}")
        return cls(**values, given=frozenset(values))
