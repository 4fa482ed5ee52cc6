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
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Self
from urllib.parse import urlsplit

from pydantic import (
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

from graphstash._errors import ConfigError
from graphstash_schema import ManifestName, Namespace
from graphstash_schema.names import line_of
from graphstash_schema.protocol import (
    DEFAULT_LEASE_SECONDS,
    DEFAULT_MAX_ARTIFACT_BYTES,
    MAX_LEASE_SECONDS,
    MIN_LEASE_SECONDS,
)

__all__ = [
    "DEFAULT_URL",
    "ENVIRONMENT_PREFIX",
    "MAX_READ_NAMESPACES",
    "TOKEN",
    "ClientConfig",
    "SignaturePolicy",
    "default_cache_dir",
    "default_trusted_keys",
    "holder_name",
    "netrc_path",
]

ENVIRONMENT_PREFIX: Final = "GRAPHSTASH_"

DEFAULT_URL: Final = "http://127.0.0.1:8077"
"""Where `graphstash serve` listens unless told otherwise."""

MAX_READ_NAMESPACES: Final = 8
"""Most namespaces that a job reads from: a miss asks for each of them."""

TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]{1,8192}=*")
"""What fits behind `Authorization: Bearer` (RFC 6750)."""

_URL = re.compile(r"https?://[^/\s]+(/[^\s]*)?")

_SECRET: Final = frozenset({"token"})


class SignaturePolicy(StrEnum):
    """Which artifacts may reach a compiler."""

    REQUIRE = "require"
    """Signed by a trusted key, or compiled by this user on this host."""
    PREFER = "prefer"
    """Also unsigned ones, which are counted; a bad signature is refused."""
    OFF = "off"
    """All: signatures are not looked at."""

    def is_stricter_than(self, other: "SignaturePolicy") -> bool:
        """Whether it refuses something that the other one lets through."""
        strictest_first = list(SignaturePolicy)
        return strictest_first.index(self) < strictest_first.index(other)


def default_cache_dir() -> Path:
    """The local tier's place: `$XDG_CACHE_HOME/graphstash`, or `~/.cache/graphstash`."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "graphstash"
    except RuntimeError:  # a container's user without a home
        return Path(tempfile.gettempdir()) / f"graphstash-{os.getuid()}"


def default_trusted_keys() -> Path:
    """Where `graphstash keys` writes: `$XDG_CONFIG_HOME/graphstash/trusted_keys.json`."""
    base = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config")
    try:
        return base.expanduser() / "graphstash" / "trusted_keys.json"
    except RuntimeError as error:  # a container's user without a home
        raise ConfigError(f"no place for the trusted keys: {error}; name the file") from None


def holder_name() -> str:
    """Who holds a lease, for people: `user@host:pid`, at most 128 characters."""
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


class ClientConfig(BaseModel):
    """Settings of one training job; see each field."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(default=DEFAULT_URL, description="the server's base URL")
    namespace: Namespace = Field(
        default=Namespace("default"), description="where artifacts are read and written"
    )
    token: SecretStr | None = Field(default=None, description="who we are to the server")
    token_file: Path | None = Field(default=None, description="has it; read again on a change")
    ca_file: Path | None = Field(
        default=None, description="who may vouch for the server (PEM), in place of the system's"
    )
    client_cert: Path | None = Field(default=None, description="our certificate (PEM), for mTLS")
    client_key: Path | None = Field(default=None, description="its key; unset: in the same file")
    signing_key: Path | None = Field(default=None, description="signs uploads (Ed25519, PEM)")
    trusted_keys: Path | None = Field(default=None, description="file of whose signatures count")
    signatures: SignaturePolicy | None = Field(
        default=None,
        description="require, prefer or off; unset: require where trusted_keys is given, else off",
    )
    read_namespaces: Annotated[tuple[Namespace, ...], BeforeValidator(_listed)] = Field(
        default=(),
        max_length=MAX_READ_NAMESPACES,
        description="where artifacts are looked for, in this order and comma-separated; then in "
        "`namespace`, the only one that is written to",
    )
    job: ManifestName | None = Field(
        default=None,
        description="name of the manifest that remembers this job's artifacts and fetches them "
        "beforehand; unset means none",
    )
    enabled: bool = Field(default=True, description="off: hooks are not installed at all")
    read_only: bool = Field(default=False, description="on: nothing is published, no lease taken")
    hooks: Annotated[tuple[str, ...], BeforeValidator(_listed)] = Field(
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
        if "@" in value:
            raise ValueError("no user and password in here: give GRAPHSTASH_TOKEN")
        if not well_formed:
            raise ValueError("expected http://host:port or https://host:port")
        return value.rstrip("/")

    @field_validator("token")
    @classmethod
    def _check_token(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None:
            return None
        token = SecretStr(value.get_secret_value().strip())
        if TOKEN.fullmatch(token.get_secret_value()) is None:
            raise ValueError("expected a token without spaces, of at most 8192 characters")
        return token

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.client_key and not self.client_cert:
            raise ValueError("GRAPHSTASH_CLIENT_KEY needs GRAPHSTASH_CLIENT_CERT")
        if self.signature_policy is not SignaturePolicy.OFF and not self.trusted_keys:
            policy = self.signature_policy
            raise ValueError(f"GRAPHSTASH_SIGNATURES={policy} needs GRAPHSTASH_TRUSTED_KEYS")
        return self

    @field_validator(
        *("cache_dir", "stats_file", "token_file", "ca_file", "client_cert", "client_key"),
        *("signing_key", "trusted_keys"),
    )
    @classmethod
    def _expand(cls, value: Path | None) -> Path | None:
        try:
            return None if value is None else value.expanduser().absolute()
        except RuntimeError as error:
            raise ValueError(str(error)) from None

    @property
    def readable(self) -> tuple[Namespace, ...]:
        """Every namespace that artifacts are looked for in, in order."""
        return tuple(dict.fromkeys((*self.read_namespaces, self.namespace)))

    @property
    def signature_policy(self) -> SignaturePolicy:
        """Which artifacts may reach a compiler."""
        if self.signatures is not None:
            return self.signatures
        return SignaturePolicy.REQUIRE if self.trusted_keys else SignaturePolicy.OFF

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        """Reads the environment; `overrides` that are not None win.

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
    told = str(problem["msg"]).removeprefix("Value error, ")
    if not problem["loc"]:  # about several settings, which it names
        return told
    name, value = str(problem["loc"][0]), problem["input"]
    is_unknown = problem["type"] == "extra_forbidden"  # a misspelt secret, perhaps
    if name in _SECRET or is_unknown or (name == "url" and "@" in str(value)):
        value = "***"
    return f"{ENVIRONMENT_PREFIX}{name.upper()}={value!r}: {told}"
