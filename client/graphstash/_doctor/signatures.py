"""Signatures: the keys that decide what may reach a compiler."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

from graphstash._config import ClientConfig, SignaturePolicy
from graphstash._doctor.findings import Finding, fail, ok, plural, warn
from graphstash._errors import ConfigError
from graphstash._keys import SigningKey, check_available
from graphstash._trust import TrustedKey, TrustedKeys

__all__ = ["check_signatures"]

_EXPIRES_SOON: Final = timedelta(days=14)

_OFF_RATHER: Final = "jobs run without the cache until then, rather than with unchecked artifacts"


def check_signatures(config: ClientConfig) -> Iterator[Finding]:
    """The policy, the trusted keys and this job's own key."""
    policy = config.signature_policy
    if policy is SignaturePolicy.OFF and config.signing_key is None:
        yield ok("signatures", "not asked for (GRAPHSTASH_TRUSTED_KEYS, GRAPHSTASH_SIGNING_KEY)")
        return
    try:
        check_available()
    except ConfigError as error:
        yield fail("signatures", str(error), f"install it into this Python; {_OFF_RATHER}")
        return
    trusted = None
    if config.trusted_keys is not None:
        try:
            trusted = TrustedKeys.read(config.trusted_keys)
        except ConfigError as error:
            yield fail(
                "signatures",
                str(error),
                f"repair the file, or make it anew by `graphstash keys trust`; {_OFF_RATHER}",
            )
            return
        yield from _check_trusted(config, trusted)
    if config.signing_key is not None:
        yield from _check_own(config, trusted)


def _check_trusted(config: ClientConfig, trusted: TrustedKeys) -> Iterator[Finding]:
    policy, at = config.signature_policy, datetime.now(UTC)
    revoked = {each.key_id for each in trusted.revoked}
    live = [key for key in trusted.keys if key.key_id not in revoked]
    yield ok(
        "signatures",
        f"policy {policy}; {config.trusted_keys} has {plural(len(live), 'trusted key')} and "
        f"{len(revoked)} revoked",
    )
    for namespace in config.readable:
        if policy is SignaturePolicy.OFF or any(key.counts(namespace, at=at) for key in live):
            continue
        found = f"no trusted key counts in {namespace!r}"
        advice = f"`graphstash keys trust <public key> --namespace {namespace}`"
        if policy is SignaturePolicy.REQUIRE:
            yield fail("signatures", f"{found}: nothing of the server can be used", advice)
        else:
            yield warn("signatures", f"{found}: only unsigned artifacts can be used", advice)
    for key in live:
        yield from _check_end(key, at)


def _check_end(key: TrustedKey, at: datetime) -> Iterator[Finding]:
    if key.not_after is None or key.not_after - at > _EXPIRES_SOON:
        return
    name = key.name or key.key_id
    what = "counts no more since" if key.not_after < at else "counts only until"
    yield warn(
        "signatures",
        f"the trusted key {name!r} {what} {key.not_after:%Y-%m-%d %H:%M} UTC",
        "sign with a new one and trust it beside this one (`graphstash keys generate`, `keys "
        "trust`)",
    )


def _check_own(config: ClientConfig, trusted: TrustedKeys | None) -> Iterator[Finding]:
    if config.signing_key is None:
        return
    try:
        own = SigningKey.load(config.signing_key).key_id
    except ConfigError as error:
        yield fail("signing key", str(error), f"mend what it names; {_OFF_RATHER}")
        return
    if trusted is None:
        yield ok("signing key", f"{config.signing_key} signs as {own}")
        return
    for each in trusted.revoked:
        if each.key_id == own:
            yield fail(
                "signing key",
                f"{own} was revoked on {each.at:%Y-%m-%d}: nobody uses what it signs",
                "`graphstash keys generate`, and set GRAPHSTASH_SIGNING_KEY to the new one",
            )
            return
    at = datetime.now(UTC)
    if any(key.key_id == own and key.counts(config.namespace, at=at) for key in trusted.keys):
        yield ok("signing key", f"{config.signing_key} signs as {own}, trusted here")
    else:
        yield warn(
            "signing key",
            f"{own} is not trusted in {config.namespace!r} by {config.trusted_keys}: others who "
            "trust the same keys do not use what this job publishes",
            f"`graphstash keys trust` with the line that `graphstash keys show "
            f"{config.signing_key}` prints",
        )
