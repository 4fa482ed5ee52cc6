"""Sign published artifacts and check the signatures of downloaded artifacts.

The signed statement contains the key, the namespace, the digest and both sizes of an artifact (see
`graphstash_schema.signature`). A check therefore fails if an artifact is moved to another key or
namespace, truncated, or repacked to decompress to another size. The check runs before the
decompressor reads any byte.
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import graphstash_schema as schema
from graphstash._trust.signing_keys import SigningKey, check_available, is_signed_by
from graphstash.config import ClientConfig, SignaturePolicy
from graphstash.errors import ConfigError, Reason, VerificationError
from graphstash_schema import ArtifactKey, Digest, Namespace

if TYPE_CHECKING:
    from graphstash._trust.proof import Provenance
    from graphstash._trust.trusted_keys import TrustStore
    from graphstash_schema import ArtifactSignature, SigningKeyId

__all__ = ["Signatures", "SignedSubject"]

_NO_KEY: Final = "0" * 32


@dataclass(frozen=True, slots=True)
class SignedSubject:
    """What a signature covers."""

    namespace: Namespace
    key: ArtifactKey
    digest: Digest
    raw_size_bytes: int

    def statement(self, key_id: "SigningKeyId") -> bytes:
        """Return the bytes that are signed."""
        return schema.statement_of(
            namespace=self.namespace,
            key=self.key,
            digest=self.digest,
            raw_size_bytes=self.raw_size_bytes,
            key_id=key_id,
        )

    def code(self, secret: bytes) -> str:
        """Return the HMAC of the statement without a key ID, as 64 hex digits."""
        statement = self.statement(schema.SigningKeyId(_NO_KEY))
        return hmac.new(secret, statement, hashlib.sha256).hexdigest()


class Signatures:
    """Signs and checks artifacts as the settings of a job require. Thread-safe.

    Args:
        config: policy and keys.
        secret: returns the secret with which this user authenticates their own artifacts, or None.

    Attributes:
        policy: which artifacts the job may use.

    Raises:
        ConfigError: a key file cannot be used, or `cryptography` is missing. The caller must then
            fetch nothing, because the user requested checks.
    """

    def __init__(self, config: ClientConfig, *, secret: Callable[[], bytes | None]) -> None:
        self.policy = config.signature_policy
        self._secret = secret
        self._signer = SigningKey.load(config.signing_key) if config.signing_key else None
        self._trusted: "TrustStore | None" = None  # noqa: UP037 - imported only if keys are trusted
        if self.policy is not SignaturePolicy.OFF:
            check_available()
            if config.trusted_keys is None:
                raise ConfigError(
                    f"GRAPHSTASH_SIGNATURES={self.policy} needs GRAPHSTASH_TRUSTED_KEYS"
                )
            from graphstash._trust.trusted_keys import TrustStore  # few jobs import it

            self._trusted = TrustStore(config.trusted_keys)

    @property
    def signing_key_id(self) -> "SigningKeyId | None":
        """Id of the key that signs what this job compiles. None if the job does not sign."""
        return None if self._signer is None else self._signer.key_id

    def prove(self, subject: SignedSubject) -> "Provenance":
        """Return the provenance of an artifact that this job has compiled."""
        from graphstash._trust.proof import Provenance

        signature = code = None
        if self._signer is not None:
            value = self._signer.sign(subject.statement(self._signer.key_id))
            signature = schema.ArtifactSignature(
                key_id=self._signer.key_id,
                value=base64.urlsafe_b64encode(value).rstrip(b"=").decode(),
            )
        if self._trusted is not None and (secret := self._secret()):
            code = subject.code(secret)
        return Provenance(signature=signature, code=code)

    def check(self, subject: SignedSubject, proof: "Provenance") -> bool:
        """Check whether the job may use an artifact.

        Returns:
            True if a trusted key signed the artifact, or this user compiled it. False if the policy
            is off, or allows unsigned artifacts and the artifact is unsigned.

        Raises:
            VerificationError: the job may not use the artifact.
            LocalTierError: the file of trusted keys has changed and cannot be used.
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

    def _is_own(self, subject: SignedSubject, proof: "Provenance") -> bool:
        if proof.code is None or (secret := self._secret()) is None:
            return False
        return hmac.compare_digest(proof.code, subject.code(secret))

    @staticmethod
    def _check_signature(
        trusted: "TrustStore", subject: SignedSubject, signature: "ArtifactSignature"
    ) -> None:
        key_id = signature.key_id
        what = f"{subject.key} in {subject.namespace!r} is signed by key {key_id}"
        if revoked := trusted.find_revocation(key_id):
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
