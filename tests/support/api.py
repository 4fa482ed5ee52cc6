"""A plain HTTP client of one namespace of one server."""

import hashlib
from typing import Any

import httpx

from graphstash_schema import ArtifactMetadata, Digest, Namespace

DEVICE = "cpu-x86_64-0123456789abcdef"


def digest_header(blob: bytes) -> dict[str, str]:
    """Return the header that the server requires of an upload."""
    return {"Repr-Digest": Digest.of(blob).repr_digest}


class Api:
    """A client of one namespace.

    Attributes:
        url: address of the server.
        namespace: the namespace of all paths.
        http: client for requests that have no method here.
    """

    def __init__(self, url: str, namespace: str = "team", token: str | None = None) -> None:
        self.url = url
        self.namespace = Namespace(namespace)
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        # Without TLS there is nothing to verify, and loading the authorities takes 20 ms.
        self.http = httpx.Client(
            base_url=url, headers=headers, timeout=60, trust_env=False, verify=False
        )

    def path(self, number: int = 0) -> str:
        return f"/v1/{self.namespace}/artifacts/jax/{DEVICE}/{self.fingerprint(number)}"

    def lease_path(self, number: int = 0) -> str:
        return f"/v1/{self.namespace}/leases/jax/{DEVICE}/{self.fingerprint(number)}"

    def key(self, number: int = 0) -> dict[str, str]:
        return {"kind": "jax", "device_type": DEVICE, "fingerprint": self.fingerprint(number)}

    def fingerprint(self, number: int) -> str:
        return hashlib.sha256(str(number).encode()).hexdigest()

    def put(
        self, blob: bytes, number: int = 0, *, seconds: float | None = None, **headers: str
    ) -> httpx.Response:
        sent = digest_header(blob)
        if seconds is not None:
            metadata = ArtifactMetadata(compile_seconds=seconds, raw_size_bytes=len(blob))
            sent["Graphstash-Metadata"] = metadata.to_header()
        return self.http.put(self.path(number), content=blob, headers=sent | _dashed(headers))

    def get(self, number: int = 0, **headers: str) -> httpx.Response:
        return self.http.get(self.path(number), headers=_dashed(headers))

    def head(self, number: int = 0, **headers: str) -> httpx.Response:
        return self.http.head(self.path(number), headers=_dashed(headers))

    def delete(self, number: int = 0) -> httpx.Response:
        return self.http.delete(self.path(number))

    def call(self, verb: str, body: object, **headers: str) -> httpx.Response:
        """Post to `artifacts:<verb>`."""
        path = f"/v1/{self.namespace}/artifacts:{verb}"
        return self.http.post(path, json=body, headers=_dashed(headers))

    def acquire(
        self, number: int = 0, *, wait: int | None = None, **request: Any
    ) -> httpx.Response:
        headers = {} if wait is None else {"Prefer": f"wait={wait}"}
        return self.http.post(self.lease_path(number), json=request, headers=headers)

    def renew(self, token: str, number: int = 0, **request: Any) -> httpx.Response:
        headers = {"Graphstash-Lease": token}
        return self.http.put(self.lease_path(number), json=request, headers=headers)

    def release(self, token: str, outcome: str, number: int = 0) -> httpx.Response:
        return self.http.delete(
            self.lease_path(number),
            params={"outcome": outcome},
            headers={"Graphstash-Lease": token},
        )

    def report(
        self, blob: bytes, number: int = 0, *, reason: str = "corrupt", **headers: str
    ) -> httpx.Response:
        """Report that an artifact is wrong. Default: its bytes are no envelope."""
        report = {"key": self.key(number), "digest": str(Digest.of(blob)), "reason": reason}
        return self.call("report", report, **headers)

    def withhold(self, blob: bytes, number: int = 0) -> None:
        answer = self.report(blob, number)
        assert answer.json()["withheld"], answer.text

    def stats(self) -> dict[str, Any]:
        stats = self.http.get("/v1/stats").json()
        found = [each for each in stats["namespaces"] if each["namespace"] == self.namespace]
        return found[0] if found else {}

    def close(self) -> None:
        self.http.close()


class OwnKeysApi(Api):
    """A namespace with unique fingerprints, for calls that search all namespaces."""

    def fingerprint(self, number: int) -> str:
        return f"{self.namespace.encode().hex()}{number:02x}".ljust(64, "0")


def _dashed(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


def assert_problem(answer: httpx.Response, status: int, code: str, *named: str) -> dict[str, Any]:
    """Check that an answer is a complete problem document whose sentence names things."""
    problem: dict[str, Any] = answer.json()
    assert (answer.status_code, problem["code"]) == (status, code), problem
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["graphstash-protocol"] == "1"
    assert problem["status"] == status
    assert problem["type"] == f"urn:graphstash:error:{code}"
    assert problem["instance"] == f"urn:graphstash:request:{answer.headers['x-request-id']}"
    for name in named:
        assert name in problem["detail"]
    return problem
