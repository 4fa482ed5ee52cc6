"""Traces of a team on a server: artifacts, hits, misses, a manifest, runs and a herd."""

import hashlib
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

from graphstash_schema import ArtifactKey, ArtifactMetadata, Digest, Namespace
from graphstash_schema.explanation import SCHEDULE_PART, SPEEDUP_PART, make_description

JOB = "pretrain-7b"
LABEL = "jit(train_step)"
CAUSE = "XLA_FLAGS: --a=2 here, --a=1 in the artifact that ana@node04 made 2 h ago"

_DEVICES = {
    **dict.fromkeys(("jax", "triton", "schedule"), "cuda-sm_90"),
    "torch_xla": "tpu-v5e-2x4",
}


def key_of(number: int, kind: str = "jax") -> ArtifactKey:
    fingerprint = hashlib.sha256(f"dashboard {number}".encode()).hexdigest()
    return ArtifactKey.parse(kind, _DEVICES[kind], fingerprint)


class Team:
    """A team that uses one namespace of a server, with a token if the server requires one."""

    def __init__(self, url: str, namespace: str, token: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.namespace = Namespace(namespace)
        self.http = httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False)

    def put(
        self,
        number: int = 0,
        *,
        kind: str = "jax",
        label: str = LABEL,
        seconds: float = 40.0,
        parts: dict[str, str] | None = None,
        toolchain: str = "jax 0.10.2",
        producer: str = "ana@node04:4711",
        is_described: bool = True,
    ) -> ArtifactKey:
        key = key_of(number, kind)
        blob = f"blob {self.namespace} {number}".encode() * 1000
        parts = {"program": "hlo train_step", "env.XLA_FLAGS": "--a=1", **(parts or {})}
        metadata = ArtifactMetadata(
            compile_seconds=seconds,
            raw_size_bytes=5 * len(blob),
            toolchain=toolchain,
            producer=producer,
            parts=parts,
        )
        headers = {
            "Repr-Digest": Digest.of(blob).repr_digest,
            "Graphstash-Metadata": metadata.to_header(),
        }
        self._ok(self.http.put(key.artifact_path(self.namespace), content=blob, headers=headers))
        if is_described:
            description = make_description(key, label, parts).model_dump(mode="json")
            path = f"/v1/{self.namespace}/artifacts:describe"
            self._ok(self.http.post(path, json={"artifacts": [description]}))
        return key

    def tune(self, number: int, label: str, schedule: str = "", speedup: str = "") -> ArtifactKey:
        found = {SCHEDULE_PART: schedule, SPEEDUP_PART: speedup}
        parts = {name: text for name, text in found.items() if text}
        return self.put(number, kind="schedule", label=label, parts=parts, toolchain="triton 3.3.0")

    def get(self, key: ArtifactKey, *, times: int = 1) -> None:
        for _ in range(times):
            path = key.artifact_path(self.namespace)
            self.http.get(path, headers={"Graphstash-Job": JOB})

    def report(
        self,
        run: str,
        *misses: tuple[ArtifactKey, str, str],
        job: str = JOB,
        program: str = "train.py",
        producer: str = "ana@node04:4711",
        age: timedelta = timedelta(0),
        **times: float,
    ) -> None:
        """Report a run with misses (key, label, cause), and with the fields of `RunTimes`."""
        missed: list[dict[str, Any]] = [
            {"key": asdict(key), "label": label, "cause": cause, "seconds": 12.5}
            for key, label, cause in misses
        ]
        counts = {
            "kind": "jax",
            "device_type": _DEVICES["jax"],
            "hits_server": 5,
            "hits_prefetched": 40,
            "hits_host": 3,
            "misses": len(missed),
            "compile_seconds": 12.5 * len(missed),
            "saved_compile_seconds": 900.0,
        }
        body = {
            "job": job,
            "program": program,
            "producer": producer,
            "started_at": (datetime.now(UTC) - age).isoformat(),
            "seconds": 3600.0,
            "saved_wall_seconds": 120.0,
            "counts": [counts],
            "misses": missed,
        }
        path = f"/v1/{self.namespace}/runs/{run}/p0"
        self._ok(self.http.put(path, json=body, params=times))

    def hold(self, number: int, holder: str = "ben@node11:99") -> None:
        path = key_of(number).lease_path(self.namespace)
        self._ok(self.http.post(path, json={"holder": holder, "ttl_seconds": 600}))

    def work(self) -> ArtifactKey:
        """Do all work of the team, and return the artifact that most of it is about."""
        key = self.put(0)
        near = self.put(1, parts={"env.XLA_FLAGS": "--a=2"}, producer="ben@node11:99")
        self.put(2, kind="triton", label="_attn_fwd", toolchain="triton 3.3.0", seconds=3.5)
        self.put(3, kind="torch_xla", label="", toolchain="torch_xla 2.7.0", is_described=False)
        self.tune(4, "tuned matmul float16 nn 4096x4096", "block_m=128 block_n=64", "2.41")
        self.get(key, times=5)
        self.get(key_of(99))
        named = [asdict(key), asdict(near)]
        self._ok(self.http.put(f"/v1/{self.namespace}/manifests/{JOB}", json={"keys": named}))
        self.report("run-1", age=timedelta(hours=20), first_step_seconds=38.0)
        misses = (near, LABEL, CAUSE), (key_of(98), "jit(init)", "")
        self.report("run-2", *misses, first_step_seconds=64.0, last_program_seconds=61.0)
        self.hold(97)
        return key

    def close(self) -> None:
        self.http.close()

    @staticmethod
    def _ok(answer: httpx.Response) -> None:
        assert answer.is_success, answer.text
