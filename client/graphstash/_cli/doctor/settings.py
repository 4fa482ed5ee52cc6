"""Checks of the job's settings, and of the keys that sign and verify artifacts."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from graphstash._cli.doctor.findings import Finding, Topic, fail, ok, skipped, warn
from graphstash._cli.output import plural
from graphstash._http.tls import server_context
from graphstash._process.notices import unknown_hooks, unknown_variables, unusable_hooks
from graphstash._trust.signing_keys import SigningKey, check_available
from graphstash._trust.trusted_keys import TrustedKey, TrustedKeys
from graphstash._user_file import read_user_file, user_file_path
from graphstash.config import (
    ENVIRONMENT_PREFIX,
    ClientConfig,
    SignaturePolicy,
    is_on_this_host,
)
from graphstash.errors import ConfigError

__all__ = ["check_settings", "check_signatures"]

_EXPIRES_SOON: Final = timedelta(days=14)

_RISK: Final = "everyone who can write there can run code in this job"

_CACHE_OFF: Final = "until then jobs run without the cache rather than with unchecked artifacts"


def check_settings(
    environ: Mapping[str, str], overrides: Mapping[str, Any]
) -> Topic[ClientConfig | None]:
    """Load and check the settings as a job would. Return None if they are invalid."""
    yield from _unknown_variables(environ)
    try:
        config = ClientConfig.load(environ, **overrides)
        if config.ca_file or config.client_cert:
            server_context(config)
    except ConfigError as error:
        yield fail(
            "settings",
            f"{error}",
            "correct the variable, or unset it to use the default; until then jobs run without the "
            "cache",
        )
        return None
    yield ok("settings", _sources(config, environ, overrides))
    yield from _user_file(config, environ)
    yield from _consequences(config)
    return config


def _sources(config: ClientConfig, environ: Mapping[str, str], overrides: Mapping[str, Any]) -> str:
    """Return which settings are set, and where, by precedence. Leave out values, some secret."""
    options = {name for name, value in overrides.items() if value is not None}
    variables = {
        variable
        for name in ClientConfig.rules()
        if environ.get(variable := ENVIRONMENT_PREFIX + name.upper()) and name not in options
    }
    sources = []
    if options:
        declared = ClientConfig.options()
        spelled = (declared[name].spelled(name) for name in sorted(options))
        sources.append(f"{', '.join(spelled)} from the command line")
    if variables:
        sources.append(f"{', '.join(sorted(variables))} from the environment")
    if config.of_file:
        sources.append(f"{' and '.join(sorted(config.of_file))} from {user_file_path(environ)}")
    return "; then ".join(sources) or "all at their defaults"


def _user_file(config: ClientConfig, environ: Mapping[str, str]) -> Iterator[Finding]:
    if config.file_problem:
        yield warn("settings", config.file_problem, "run `graphstash init` to replace the file")
    unused = sorted(set(read_user_file(environ).values) - config.of_file)
    if unused and not config.file_problem:
        yield ok(
            "settings",
            f"not used: {' and '.join(unused)} from {user_file_path(environ)}, because the command "
            "line and the environment come first",
        )


def _unknown_variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    unknown = unknown_variables(environ)
    for variable, nearest in unknown.items():
        if nearest:
            yield warn(
                "settings", f"unknown setting {variable}, ignored", f"did you mean {nearest}?"
            )
    if others := [variable for variable, nearest in unknown.items() if nearest is None]:
        yield ok("settings", f"not settings of a job, perhaps of the server: {', '.join(others)}")


def _consequences(config: ClientConfig) -> Iterator[Finding]:
    if not config.enabled:
        yield warn(
            "settings",
            "the cache is disabled, and no hook is installed",
            "unset GRAPHSTASH_ENABLED",
        )
    if config.read_only:
        yield ok(
            "settings", "GRAPHSTASH_READ_ONLY: this job downloads artifacts and publishes none"
        )
    if (wrong := unknown_hooks(config)) is not None:
        yield fail("settings", *wrong)
    for broken in unusable_hooks(config):
        yield warn("settings", broken, "update or remove the package that registers it")


def check_signatures(config: ClientConfig) -> Topic[None]:
    """Check the policy and the keys, and list the keys that the job trusts in each namespace."""
    policy = config.signature_policy
    if policy is SignaturePolicy.OFF:
        yield from _check_writers(config)
    if policy is SignaturePolicy.OFF and config.signing_key is None:
        yield ok("signatures", "not configured (GRAPHSTASH_TRUSTED_KEYS, GRAPHSTASH_SIGNING_KEY)")
        return
    try:
        check_available()
    except ConfigError as error:
        yield fail("signatures", str(error), f"install it into this Python; {_CACHE_OFF}")
        return
    trusted = None
    if config.trusted_keys is not None:
        try:
            trusted = TrustedKeys.read(config.trusted_keys)
        except ConfigError as error:
            yield fail(
                "signatures",
                str(error),
                f"repair the file, or recreate it with `graphstash keys trust`; {_CACHE_OFF}",
            )
            return
        yield from _check_trusted(config, trusted)
    if config.signing_key is not None:
        yield from _check_signing_key(config, config.signing_key, trusted)


def _check_writers(config: ClientConfig) -> Iterator[Finding]:
    if not config.url:
        yield skipped("trust", "skipped: there is no server")
        return
    is_here = is_on_this_host(config.url)
    for namespace in config.readable:
        detail = f"{namespace!r}: signatures are not checked: {_RISK}"
        advice = "set GRAPHSTASH_TRUSTED_KEYS to accept signed artifacts only"
        yield ok("trust", detail) if is_here else warn("trust", detail, advice)


def _check_trusted(config: ClientConfig, trusted: TrustedKeys) -> Iterator[Finding]:
    policy, at = config.signature_policy, datetime.now(UTC)
    revoked = {each.key_id for each in trusted.revoked}
    live = [key for key in trusted.keys if key.key_id not in revoked]
    yield ok(
        "signatures",
        f"policy {policy}; {config.trusted_keys} has {plural(len(live), 'trusted key')} and "
        f"{plural(len(revoked), 'revoked key')}",
    )
    for namespace in config.readable:
        names = [key.name or key.key_id for key in live if key.accepts(namespace, at=at)]
        if policy is SignaturePolicy.OFF:
            continue
        if names:
            others = "" if policy is SignaturePolicy.REQUIRE else f", or unsigned: {_RISK}"
            yield ok("trust", f"{namespace!r}: signed by {', '.join(names)}{others}")
            continue
        found = f"no key is trusted for namespace {namespace!r}"
        advice = f"`graphstash keys trust <public key> --namespace {namespace}`"
        if policy is SignaturePolicy.REQUIRE:
            yield fail("signatures", f"{found}, so nothing from the server can be used", advice)
        else:
            yield warn("signatures", f"{found}, so only unsigned artifacts can be used", advice)
    for key in live:
        yield from _check_expiry(key, at)


def _check_expiry(key: TrustedKey, at: datetime) -> Iterator[Finding]:
    if key.not_after is None or key.not_after - at > _EXPIRES_SOON:
        return
    name = key.name or key.key_id
    what = "expired on" if key.not_after < at else "expires on"
    yield warn(
        "signatures",
        f"the trusted key {name!r} {what} {key.not_after:%Y-%m-%d %H:%M} UTC",
        "sign with a new key and trust it beside this one (`graphstash keys generate`, `keys "
        "trust`)",
    )


def _check_signing_key(
    config: ClientConfig, path: Path, trusted: TrustedKeys | None
) -> Iterator[Finding]:
    try:
        own = SigningKey.load(path).key_id
    except ConfigError as error:
        yield fail("signing key", str(error), f"fix the file; {_CACHE_OFF}")
        return
    if trusted is None:
        yield ok("signing key", f"{path} signs as {own}")
        return
    for each in trusted.revoked:
        if each.key_id == own:
            yield fail(
                "signing key",
                f"{own} was revoked on {each.at:%Y-%m-%d}: jobs that trust the same keys reject "
                "what it signs",
                "run `graphstash keys generate`, and set GRAPHSTASH_SIGNING_KEY to the new key",
            )
            return
    at = datetime.now(UTC)
    if any(key.key_id == own and key.accepts(config.namespace, at=at) for key in trusted.keys):
        yield ok("signing key", f"{path} signs as {own}, trusted here")
    else:
        yield warn(
            "signing key",
            f"{config.trusted_keys} does not trust {own} in {config.namespace!r}: jobs with the "
            "same trusted keys reject what this job publishes",
            f"run the line that `graphstash keys show {path}` prints",
        )
