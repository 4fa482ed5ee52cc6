"""A small identity provider with keys of its own, a discovery document, and any tokens."""

import json
import ssl
import time
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import get_default_algorithms

from support.http_server import Answer, HttpServer, Request

_CURVES: dict[str, ec.EllipticCurve] = {
    "ES256": ec.SECP256R1(),
    "ES384": ec.SECP384R1(),
    "ES512": ec.SECP521R1(),
}

PrivateKey = ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


def new_key(algorithm: str = "ES256", *, bits: int = 2048) -> PrivateKey:
    if algorithm == "EdDSA":
        return ed25519.Ed25519PrivateKey.generate()
    if algorithm in _CURVES:
        return ec.generate_private_key(_CURVES[algorithm])
    return rsa.generate_private_key(public_exponent=65537, key_size=bits)


class Issuer(HttpServer):
    """An issuer on loopback; a context manager.

    Attributes:
        url: its name, as in `iss`.
        keys: key id -> (private key, algorithm) of the published keys.
        fetches: requested paths, in order.
        answer: (status, bytes) sent instead of the keys; None for the keys.
        job: environment variables with which a job of GitHub Actions requests its JWT.
    """

    def __init__(self, *, context: ssl.SSLContext | None = None) -> None:
        """Start the issuer, with TLS if `context` is given."""
        super().__init__(context=context)
        self.keys: dict[str, tuple[PrivateKey, str]] = {}
        self.fetches: list[str] = []
        self.answer: tuple[int, bytes] | None = None
        self.url += "/realm"
        self.job = {
            "ACTIONS_ID_TOKEN_REQUEST_URL": f"{self.url}/jwt?api-version=2.0",
            "ACTIONS_ID_TOKEN_REQUEST_TOKEN": "of-the-runner",
        }

    def answer_to(self, request: Request) -> Answer:
        self.fetches.append(request.path)
        status, body = self._answer_of(request.path, request.headers.get("authorization"))
        return Answer(status, body=body)

    @property
    def jwks_fetches(self) -> list[str]:
        return [path for path in self.fetches if path.endswith("/jwks")]

    def _answer_of(self, path: str, authorization: str | None) -> tuple[int, bytes]:
        if urlsplit(path).path.endswith("/jwt"):
            asked = parse_qs(urlsplit(path).query)
            if authorization != "Bearer of-the-runner" or asked["api-version"] != ["2.0"]:
                return 401, b"{}"
            value = self.token(next(iter(self.keys)), aud=asked["audience"][0])
            return 200, json.dumps({"value": value}).encode()
        if path.endswith("/.well-known/openid-configuration"):
            return 200, json.dumps({"issuer": self.url, "jwks_uri": self.url + "/jwks"}).encode()
        if self.answer is not None:
            return self.answer
        return 200, json.dumps({"keys": [self.jwk(key_id) for key_id in self.keys]}).encode()

    def add_key(self, key_id: str, algorithm: str = "ES256", **options: int) -> None:
        self.keys[key_id] = (new_key(algorithm, **options), algorithm)

    def jwk(self, key_id: str) -> dict[str, Any]:
        key, algorithm = self.keys[key_id]
        described = get_default_algorithms()[algorithm].to_jwk(key.public_key(), as_dict=True)
        return {**described, "kid": key_id, "alg": algorithm, "use": "sig"}

    def token(
        self,
        key_id: str,
        *,
        key: Any = None,
        algorithm: str | None = None,
        headers: dict[str, Any] | None = None,
        without: Iterable[str] = (),
        **claims: object,
    ) -> str:
        """Sign claims. The other claims are valid."""
        known: tuple[Any, str] = self.keys.get(key_id, (None, "ES256"))
        now = int(time.time())
        times = {"iat": now, "nbf": now, "exp": now + 300}
        payload = {"iss": self.url, "aud": "graphstash", **times, **self._claims(), **claims}
        for name in without:
            del payload[name]
        return jwt.PyJWS().encode(  # which signs claims that `jwt.encode` refuses
            json.dumps(payload).encode(),
            key if key is not None else known[0],
            algorithm or known[1],
            headers={"kid": key_id, **(headers or {})},
        )

    def _claims(self) -> dict[str, object]:
        return {
            "sub": "repo:team/model",
            "repository": "team/model",
            "ref": "refs/heads/main",
            "event_name": "push",
        }


class Cluster(Issuer):
    """An issuer of tokens of service accounts, as Kubernetes."""

    def _claims(self) -> dict[str, object]:
        return {
            "aud": ["graphstash"],
            "sub": "system:serviceaccount:ci:trainer",
            "kubernetes.io": {
                "namespace": "ci",
                "pod": {"name": "train-0", "uid": "0b3a1b9c"},
                "serviceaccount": {"name": "trainer", "uid": "6f0c2d7e"},
            },
        }
