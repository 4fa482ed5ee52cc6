"""Signatures: signs the artifacts that this job publishes, and checks those that it uses.

A signature is over a statement that is built here, from what was asked for and from the bytes that
came (`graphstash_schema.signature`): moved to another key or another namespace, cut or packed to
unfold to another size, an artifact does not fit it. It is checked before a decompressor sees a
byte.
"""

import base64
import binascii
import hmac
from collections.abc import Callable
from typing import TYPE_CHECKING

from graphstash._trust.provenance import Provenance, SignedSubject
from graphstash._trust.signing_keys import SigningKey, check_available, is_signed_by
from graphstash.config import ClientConfig, SignaturePolicy
from graphstash.errors import ConfigError, Reason, VerificationError
from graphstash_schema import ArtifactSignature

if TYPE_CHECKING:
    from graphstash._trust.trusted_keys import TrustStore

__all__ = ["Signatures"]


class Signatures:
    """Signs and checks by the settings of one job; safe for many threads.

    Args:
        config: policy and keys.
        secret: returns the secret that marks this user's own artifacts, or None.

    Attributes:
        policy: which artifacts may be used.

    Raises:
        ConfigError: on construction, when a file cannot be used or `cryptography` is missing. Then
            nothing may be fetched: to go on unchecked is not what was asked for.
    """

    def __init__(self, config: ClientConfig, *, secret: Callable[[], bytes | None]) -> None:
        self.policy = config.signature_policy
        self._secret = secret
        self._signer = SigningKey.load(config.signing_key) if config.signing_key else None
        self._trusted: "TrustStore | None" = None  # noqa: UP037 - imported below, or never
        if self.policy is not SignaturePolicy.OFF:
            check_available()
            if config.trusted_keys is None:
                raise ConfigError(
                    f"GRAPHSTASH_SIGNATURES={self.policy} needs GRAPHSTASH_TRUSTED_KEYS"
                )
            from graphstash._trust.trusted_keys import TrustStore  # only where keys are trusted

            self._trusted = TrustStore(config.trusted_keys)

    def prove(self, subject: SignedSubject) -> Provenance:
        """The provenance of an artifact that this job has compiled."""
        signature = code = None
        if self._signer is not None:
            value = self._signer.sign(subject.statement(self._signer.key_id))
            signature = ArtifactSignature(
                key_id=self._signer.key_id,
                value=base64.urlsafe_b64encode(value).rstrip(b"=").decode(),
            )
        if self._trusted is not None and (secret := self._secret()):
            code = subject.code(secret)
        return Provenance(signature=signature, code=code)

    def check(self, subject: SignedSubject, proof: Provenance) -> bool:
        """Checks whether an artifact may be used.

        Returns:
            True if it is signed by a trusted key or is this user's own; False if it is unsigned and
            the policy allows that.

        Raises:
            VerificationError: it may not.
            LocalTierError: the trusted keys cannot be read now.
        """
        if self._trusted is None:
            return False
        if self._is_own(subject, proof):
            return True
        if proof.signature is not None:
            self._check_signature(self._trusted, subject, proof.signature)
            return True
        if self.policy is SignaturePolicy.REQUIRE:
            raise VerificationError(
                Reason.UNSIGNED,
                f"{subject.key} in {subject.namespace!r} is not signed, and "
                "GRAPHSTASH_SIGNATURES=require",
            )
        return False

    def _is_own(self, subject: SignedSubject, proof: Provenance) -> bool:
        if proof.code is None or (secret := self._secret()) is None:
            return False
        return hmac.compare_digest(proof.code, subject.code(secret))

    @staticmethod
    def _check_signature(
        trusted: "TrustStore", subject: SignedSubject, signature: ArtifactSignature
    ) -> None:
        key_id = signature.key_id
        what = f"{subject.key} in {subject.namespace!r} is signed by key {key_id}"
        if revoked := trusted.revoked(key_id):
            raise VerificationError(
                Reason.REVOKED_KEY, f"{what}, revoked on {revoked.at:%Y-%m-%d}: {revoked.reason}"
            )
        public = trusted.public_key(key_id, subject.namespace)
        if public is None:
            raise VerificationError(
                Reason.UNKNOWN_KEY,
                f"{what}, which is not trusted for this namespace; see `graphstash keys list`",
            )
        try:
            value = base64.b64decode(signature.value + "==", altchars=b"-_", validate=True)
        except binascii.Error:
            value = b""
        if not is_signed_by(public, value, subject.statement(key_id)):
            raise VerificationError(
                Reason.BAD_SIGNATURE,
                f"{what}, but the signature is of other bytes, another key or another namespace",
            )
