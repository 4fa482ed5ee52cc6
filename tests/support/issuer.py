"""A little identity provider: keys of its own, a discovery document, and tokens of any kind."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import get_default_algorithms

__all__ = ["Issuer", "new_key"]

_CURVES = {"ES256": ec.SECP256R1, "ES384": ec.SECP384R1}


def new_key(algorithm="ES256", *, bits=2048):
    """A private key for an algorithm."""
    if algorithm == "EdDSA":
        return ed25519.Ed25519PrivateKey.generate()
    if algorithm in _CURVES:
        return ec.generate_private_key(_CURVES[algorithm]())
    return rsa.generate_private_key(public_exponent=65537, key_size=bits)


class Issuer:
    """Serves on loopback; a context manager.

    Attributes:
        url: its name, as in `iss`.
        keys: key id -> (private key, algorithm); what is published.
        fetches: paths that were asked for, in order.
        answer: what is sent instead of the keys, as (status, bytes); None for the keys.
    """

    def __init__(self):
        self.keys = {}
        self.fetches = []
        self.answer = None
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                issuer.fetches.append(self.path)
                status, body = issuer._answer_of(self.path)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/realm"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def jwks_fetches(self):
        return [path for path in self.fetches if path.endswith("/jwks")]

    def _answer_of(self, path):
        if path.endswith("/.well-known/openid-configuration"):
            return 200, json.dumps({"issuer": self.url, "jwks_uri": self.url + "/jwks"}).encode()
        if self.answer is not None:
            return self.answer
        return 200, json.dumps({"keys": [self.jwk(key_id) for key_id in self.keys]}).encode()

    def add_key(self, key_id, algorithm="ES256", **options):
        self.keys[key_id] = (new_key(algorithm, **options), algorithm)

    def jwk(self, key_id):
        key, algorithm = self.keys[key_id]
        described = get_default_algorithms()[algorithm].to_jwk(key.public_key(), as_dict=True)
        return {**described, "kid": key_id, "alg": algorithm, "use": "sig"}

    def token(self, key_id, *, key=None, algorithm=None, headers=None, without=(), **claims):
        """Signs claims; those that are not given are good ones."""
        known = self.keys.get(key_id, (None, "ES256"))
        now = int(time.time())
        payload = {
            "iss": self.url,
            "aud": "graphstash",
            "sub": "repo:team/model",
            "iat": now,
            "nbf": now,
            "exp": now + 300,
            "repository": "team/model",
            "ref": "refs/heads/main",
            **claims,
        }
        for name in without:
            del payload[name]
        return jwt.encode(
            payload,
            key if key is not None else known[0],
            algorithm or known[1],
            headers={"kid": key_id, **(headers or {})},
        )

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
