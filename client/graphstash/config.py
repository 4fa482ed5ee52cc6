"""ClientConfig: all settings of a training job.

Each field is read from `GRAPHSTASH_<FIELD IN CAPITALS>`, for example `GRAPHSTASH_URL`. Arguments of
`graphstash.install` override the environment. So do the options of `graphstash run`, for the fields
that have an `Option`. The environment overrides the user's config file (`graphstash init`). The
help and the reference show the docstring below each field.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Literal, Self
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
from graphstash._user_file import UserFile, read_user_file
from graphstash.errors import ConfigError
from graphstash_schema import ManifestName, Namespace
from graphstash_schema.names import line_of
from graphstash_schema.option import Option
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
"""Prefix of the URL of a Unix socket."""

MAX_READ_NAMESPACES: Final = 8
"""Maximum number of `read_namespaces`: a miss sends one request to each."""

TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]{1,8192}=*")
"""Valid tokens for `Authorization: Bearer` (RFC 6750)."""

_URL = re.compile(r"https?://[^/\s]+(/[^\s]*)?|unix:/[^\x00-\x1f]+")


class SignaturePolicy(StrEnum):
    """Which artifacts may reach a compiler."""

    REQUIRE = "require"
    """Artifacts that a trusted key signed, or that this user compiled on this host."""
    PREFER = "prefer"
    """Also unsigned artifacts, which are counted. A bad signature is refused, and so is one by an
    unknown or revoked key."""
    OFF = "off"
    """All artifacts, without a signature check."""

    def is_stricter_than(self, other: "SignaturePolicy") -> bool:
        """Return whether this policy refuses artifacts that the other policy accepts."""
        strictest_first = list(SignaturePolicy)
        return strictest_first.index(self) < strictest_first.index(other)


def default_cache_dir() -> Path:
    """Return the default local tier: `$XDG_CACHE_HOME/graphstash` or `~/.cache/graphstash`."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "graphstash"
    except RuntimeError:  # a container user without a home directory
        from tempfile import gettempdir  # imported here because it is slow

        return Path(gettempdir()) / f"graphstash-{os.getuid()}"


def find_own_server() -> str:
    """Return the URL of this user's server on this host, or "" if there is none. Each connection
    checks that only this user can have created the socket.
    """
    path = own_socket_path(os.environ)
    try:
        return f"{UNIX}{path}" if path is not None and path.is_socket() else ""
    except OSError:
        return ""


def is_on_this_host(url: str) -> bool:
    """Return whether jobs reach the server without a network."""
    import ipaddress

    host = urlsplit(url).hostname or ""
    try:
        return url.startswith(UNIX) or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def github_token_request() -> tuple[str, str] | None:
    """Return the URL and bearer token with which a GitHub Actions job requests a JWT, or None in
    other jobs and without `permissions: id-token: write`.
    """
    url, token = (os.environ.get(f"ACTIONS_ID_TOKEN_REQUEST_{each}") for each in ("URL", "TOKEN"))
    return (url, token) if url and token else None


def holder_name() -> str:
    """Return a readable lease holder, `user@host:pid`, of at most 128 characters."""
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container user without a passwd entry
        user = str(os.getuid())
    return line_of(f"{user}@{socket.gethostname()}:{os.getpid()}", most=128)


def netrc_path() -> Path | None:
    """Return `$NETRC` or `~/.netrc`, or None for a user without a home directory."""
    try:
        return Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    except RuntimeError:
        return None


def _checked_url(value: str) -> str:
    if value in ("", NO_SERVER):
        return ""
    try:
        well_formed = _URL.fullmatch(value) is not None and urlsplit(value).port != 0
    except ValueError:  # the port is not a number, or out of range
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


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Server, namespaces and timeouts."""

    url: str = setting(find_own_server, text(_checked_url), Option())
    """Base URL of the server, or `unix:<path>` of its socket. Default: the address that `graphstash
    init` stored. If it stored no address, the server that this user runs on this host with
    `graphstash serve`. Without a server, or with the value `none`, a job uses only its local
    tier."""
    namespace: Namespace = setting(Namespace("default"), text(Namespace), Option())
    """Namespace to publish artifacts to and to read from."""
    read_namespaces: tuple[Namespace, ...] = setting(
        (), listed(Namespace, most=MAX_READ_NAMESPACES)
    )
    """Namespaces to read from before `namespace`, in this order."""
    max_artifact: int = setting(DEFAULT_MAX_ARTIFACT_BYTES, size(above=0))
    """Largest artifact to fetch or publish, before and after compression."""
    connect_seconds: float = setting(0.5, number(above=0, most=60))
    """Timeout for opening a connection."""
    first_byte_seconds: float = setting(2.0, number(above=0, most=300))
    """Timeout for the first byte of a response, and for each later read."""
    fetch_seconds: float = setting(60.0, number(above=0, most=3600))
    """Timeout for a whole fetch. A known compile time that is shorter replaces it, but the timeout
    is never below first_byte_seconds."""


@dataclass(frozen=True, kw_only=True)
class CredentialSettings:
    """Credentials and certificates."""

    token: Secret | None = setting(None, secret(_checked_token))
    """Bearer token for the server. Default: the one that `graphstash init` stored with the server's
    address."""
    token_file: Path | None = setting(None, path())
    """File that holds the token. The client reads it again when it changes."""
    ca_file: Path | None = setting(None, path())
    """CA bundle (PEM) that replaces the system's bundle. Redirects to storage accept both
    bundles."""
    client_cert: Path | None = setting(None, path())
    """Client certificate (PEM) for mTLS."""
    client_key: Path | None = setting(None, path())
    """Private key of the client certificate. Default: read from the certificate file."""


@dataclass(frozen=True, kw_only=True)
class SignatureSettings:
    """Signing, and checking signatures."""

    signing_key: Path | None = setting(None, path())
    """Private key (Ed25519, PEM, mode 0600) that signs published artifacts."""
    trusted_keys: Path | None = setting(None, path())
    """Path of the trusted-keys file, which `graphstash keys trust` writes."""
    signatures: SignaturePolicy | None = setting(None, choice(SignaturePolicy, SignaturePolicy))
    """Which artifacts may reach a compiler: only signed ones (require), also unsigned ones
    (prefer), or all without a check (off). Default: require with trusted_keys, otherwise off."""


@dataclass(frozen=True, kw_only=True)
class SharingSettings:
    """Sharing, waiting and uploading."""

    enabled: bool = setting(True, flag())
    """Whether to use the cache. If not, the job installs no hooks, and fetches, uploads and
    reports nothing."""
    hooks: tuple[str, ...] | None = setting(None, listed())
    """Compilers to hook. Default: all for which an installed package has a hook."""
    read_only: bool = setting(False, flag(), Option({"--read-only": True, "--read-write": False}))
    """Fetch artifacts, but do not publish and do not take leases."""
    job: ManifestName | None = setting(None, text(ManifestName), Option())
    """Name under which the server records this job's artifacts, so that the next run prefetches
    them. Default: two names `auto-<16 hex digits>`, one derived from the script, the processor
    architecture and the compiler versions, the other also from the arguments."""
    prefetch_limit: int = setting(2 * 1024**3, size())
    """Maximum bytes that a run prefetches to this host, and at most half of local_limit. Artifacts
    with the longest compile time per byte come first. 0 disables prefetching, and records nothing
    for a job without a name."""
    fail_on_miss: bool = setting(False, flag(), Option({"--fail-on-miss": True}))
    """End the job before it compiles anything: with exit status 86 if the artifact does not exist,
    with 75 if the cache failed."""
    max_compile_seconds: float = setting(0.0, number(most=1e7), Option())
    """Total compile seconds of the job's processes on this host. When they are used up, or when a
    running compilation exceeds them, the job ends with exit status 86. 0 means no limit."""
    report_runs: bool = setting(True, flag())
    """Report counts and compiled artifacts to the server when a process that used the cache ends.
    The report names the script, never its arguments."""
    wait_seconds: float = setting(1200.0, number(most=86400))
    """Maximum total seconds of unsuccessful waits for other jobs that compile the same graphs, at
    most half of them for one lease holder. Waits that bring an artifact may take up to twice as
    long in addition. 0 never waits."""
    lease_seconds: float = setting(
        DEFAULT_LEASE_SECONDS, number(least=MIN_LEASE_SECONDS, most=MAX_LEASE_SECONDS)
    )
    """Seconds until the lease of a killed holder expires."""
    unsent_limit: int = setting(1024**3, size())
    """Maximum bytes of artifacts that a run publishes for earlier runs on this host, which could
    not publish them, for example because the server was down. 0 disables this."""
    publish_queue: int = setting(64, whole(least=1, most=4096))
    """Number of artifacts that may wait for upload. Further artifacts are dropped."""
    drain_seconds: float = setting(20.0, number(most=3600))
    """Seconds that the end of a job may wait for its uploads."""
    torch_xla_mode: str = setting("auto", choice(str, ("auto", "exact", "hint")))
    """How the torch_xla hook finds an artifact: exact intercepts torch_xla's own look-up, hint
    predicts it, auto uses exact if possible. If exact is impossible, auto and exact use hint, and
    exact warns."""


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """Local tier, and output on this host."""

    cache_dir: Path = setting(default_cache_dir, path(), Option())
    """Directory of the local tier."""
    local_limit: int = setting(10 * 1024**3, size())
    """Size limit of the local tier, which evicts the least recently used artifacts. 0 keeps nothing
    between jobs."""
    offline_seconds: float = setting(24 * 3600.0, number(most=1e7))
    """Seconds since the server's last response for which the job may use local copies while the
    server does not answer. A withdrawal may stay undetected for that long. 0 uses no copies."""
    summary: bool = setting(
        True, flag(), Option({"--quiet": False, "-q": False}, help="Print no line at the end.")
    )
    """Print one line to standard error when the job ends."""
    explain: bool | Literal["live"] = setting(
        False,
        flag("live"),
        Option(
            {"--explain": True},
            help="Print to standard error, when the job ends, why it compiled. To log each miss "
            "when it happens, set `GRAPHSTASH_EXPLAIN=live` instead.",
        ),
    )
    """Print to standard error, when the job ends, why it compiled. With `live`, log each program
    that a process misses, with the cause: at most 36 lines, another 36 for failures of the cache,
    then a count."""
    stats_file: Path | None = setting(None, path(), Option())
    """File that receives one line of JSON with the statistics of each process."""
    tracing: bool = setting(False, flag())
    """Send OpenTelemetry traces of look-ups, compilations and uploads to the program's tracer
    provider. If the program has none, export them with OTLP over HTTP, configured by the variables
    OTEL_*. Needs graphstash[tracing]."""


@dataclass(frozen=True, kw_only=True)
class ClientConfig(
    ServerSettings, CredentialSettings, SignatureSettings, SharingSettings, HostSettings
):
    """Settings of one training job.

    Attributes:
        given: names of the settings that were set explicitly.
        of_file: names of those settings that the user's config file has set.
        file_problem: why the user's config file, or a part of it, is ignored; "" without a problem.

    Raises:
        ConfigError: a setting is invalid. The message names each invalid setting, its value unless
            it is secret, and the valid values.
    """

    given: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    of_file: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    file_problem: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        errors = []
        for name, rule in self.rules().items():
            value = getattr(self, name)
            if value is None:
                continue
            try:
                object.__setattr__(self, name, rule.read(value))
            except (TypeError, ValueError) as error:
                hide = rule.is_secret or (name == "url" and "@" in str(value))
                shown = "***" if hide else value
                errors.append(f"{ENVIRONMENT_PREFIX}{name.upper()}={shown!r}: {error}")
        if errors:
            raise ConfigError("; ".join(errors))
        if self.client_key and not self.client_cert:
            raise ConfigError("GRAPHSTASH_CLIENT_KEY needs GRAPHSTASH_CLIENT_CERT")
        if self.signature_policy is not SignaturePolicy.OFF and not self.trusted_keys:
            policy = self.signature_policy
            raise ConfigError(f"GRAPHSTASH_SIGNATURES={policy} needs GRAPHSTASH_TRUSTED_KEYS")

    @classmethod
    def rules(cls) -> Mapping[str, Rule]:
        """Return each setting's rule."""
        return {each.name: each.metadata["rule"] for each in fields(cls) if each.metadata}

    @classmethod
    def options(cls) -> Mapping[str, Option]:
        """Return the option of each setting that has one."""
        all_ = ((each.name, each.metadata.get("option")) for each in fields(cls))
        return {name: option for name, option in all_ if option is not None}

    def wants_hook(self, name: str) -> bool:
        """Return whether to install a hook when its compiler is imported."""
        return self.hooks is None or name in self.hooks

    @property
    def is_own_server(self) -> bool:
        """Whether the server is the one that this user runs on this host."""
        return bool(self.url) and self.url == find_own_server()

    @property
    def awaits_server(self) -> bool:
        """Whether the job would publish to this user's own server, but none is running."""
        return not (self.url or "url" in self.given or self.read_only)

    @property
    def token_source(self) -> str:
        """Where the token comes from, or "". netrc may still contain one."""
        if self.token is not None:
            return "`graphstash init`" if "token" in self.of_file else "GRAPHSTASH_TOKEN"
        return f"GRAPHSTASH_TOKEN_FILE={self.token_file}" if self.token_file else ""

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
        """Read the environment, and the config file of its user for settings that it does not set.

        `overrides` that are not None take precedence. A problem of the file only sets
        `file_problem`, so that the job still runs. Raises ConfigError like the constructor.
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
        file = read_user_file(source)
        stored, problem = _usable(file, values)
        values |= stored
        return cls(
            **values, given=frozenset(values), of_file=frozenset(stored), file_problem=problem
        )


def _usable(file: UserFile, values: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the file's settings that `values` do not override, and the file's problem. If the URL
    is not the file's, ignore the file, because its token is for its own server only.
    """
    known, checked = ClientConfig.rules(), {}
    for name, value in file.values.items():
        try:
            checked[name] = known[name].read(value)
        except ValueError as error:
            return {}, f"{name} in the file of `graphstash init` is invalid: {error}"
    if str(values.get("url", checked.get("url"))).rstrip("/") != checked.get("url"):
        return {}, file.problem
    left_out = {"url"} & set(values)
    if {"token", "token_file"} & set(values):
        left_out.add("token")
    return {name: each for name, each in checked.items() if name not in left_out}, file.problem
