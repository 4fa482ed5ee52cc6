"""Compares rows, blobs, counters and files of a deployment, without its own code."""

import hashlib
import time
from collections import Counter
from pathlib import Path

import httpx

from chaos.caller import artifact_path
from chaos.cluster import KEEP, TIER_BYTES, TIGHT, TIGHT_BYTES, Cluster

_TIER_SLACK = 1.25
"""Each process counts for itself between two looks at the directory, see `TierBudget`."""

_BUSY_SECONDS = 60.0
"""Seconds after which an artifact counts as lost if the server still answers 503."""


def read_everything(cluster: Cluster, known: dict[int, str]) -> list[str]:
    """Read every known artifact through a server, and return what is wrong. Print how many answers
    had each status.
    """
    wrong = []
    seen: Counter[int] = Counter()
    with httpx.Client(timeout=60, trust_env=False) as http:
        for number, digest in sorted(known.items()):
            url = cluster.url(number % 2) + artifact_path(KEEP, number)
            deadline = time.monotonic() + _BUSY_SECONDS
            while True:
                answer = http.get(url)
                seen[answer.status_code] += 1
                pause = float(answer.headers.get("retry-after", "inf"))
                if answer.status_code != 503 or time.monotonic() + pause > deadline:
                    break
                time.sleep(pause)
            if answer.status_code != 200:
                wrong.append(f"key {number} was acknowledged: {answer.status_code} {answer.text}")
            elif f"sha256:{hashlib.sha256(answer.content).hexdigest()}" != digest:
                wrong.append(f"key {number} has other bytes than those of {digest}")
    print(f"answers to the last reads, by status: {dict(seen)}")
    return wrong


def find_discrepancies(cluster: Cluster) -> list[str]:
    """Return what is wrong. Call this after a `graphstash gc`, while no client uploads."""
    rows = {
        row["sha256"]: row["size_bytes"]
        for row in cluster.query("SELECT DISTINCT sha256, size_bytes FROM artifacts")
    }
    blobs = _objects(cluster) if cluster.bucket else _files(cluster)
    wrong = [f"no artifact has the blob {name}" for name in sorted(blobs.keys() - rows.keys())]
    wrong += [f"the blob {name} is lost" for name in sorted(rows.keys() - blobs.keys())]
    wrong += [
        f"the blob {name} has {blobs[name]} bytes, its artifacts say {rows[name]}"
        for name in sorted(rows.keys() & blobs.keys())
        if blobs[name] != rows[name]
    ]
    return wrong + _miscounted(cluster) + _left_over(cluster)


def files_below(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def _miscounted(cluster):
    counted = {
        row["namespace"]: (row["artifacts"], row["size_bytes"])
        for row in cluster.query("SELECT namespace, artifacts, size_bytes FROM usage")
    }
    stored = {
        row["namespace"]: (row["artifacts"], int(row["size_bytes"]))
        for row in cluster.query(
            "SELECT namespace, count(*) AS artifacts, sum(size_bytes) AS size_bytes "
            "FROM artifacts GROUP BY namespace"
        )
    }
    wrong = [
        f"{name}: {counted.get(name)} is counted and {stored.get(name, (0, 0))} is stored"
        for name in sorted(counted.keys() | stored.keys())
        if counted.get(name) != stored.get(name, (0, 0))
    ]
    if stored.get(TIGHT, (0, 0))[1] > TIGHT_BYTES:
        wrong.append(f"{stored[TIGHT]} is stored and the limit is {TIGHT_BYTES}")
    return wrong


def _left_over(cluster):
    """Return the files that only a running transfer may have."""
    wrong = []
    for data_dir in cluster.data_dirs:
        for part in ("spool", "tier/tmp", "blobs/tmp"):
            wrong += [f"{path} is left over" for path in files_below(data_dir / part)]
        tier_bytes = sum(path.stat().st_size for path in files_below(data_dir / "tier"))
        if tier_bytes > TIER_BYTES * _TIER_SLACK:
            wrong.append(f"the tier of {data_dir.name} has {tier_bytes} bytes")
    if cluster.bucket:
        uploads = cluster.s3.client.list_multipart_uploads(Bucket=cluster.bucket)
        wrong += [f"an upload in parts is left over: {each}" for each in uploads.get("Uploads", ())]
    return wrong


def _objects(cluster):
    pages = cluster.s3.client.get_paginator("list_objects_v2").paginate(Bucket=cluster.bucket)
    return {
        found["Key"].rpartition("/")[2].partition(".")[0]: found["Size"]
        for page in pages
        for found in page.get("Contents", ())
    }


def _files(cluster):
    return {
        path.name: path.stat().st_size
        for path in files_below(cluster.data_dirs[0] / "blobs" / "sha256")
    }
