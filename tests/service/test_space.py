"""No room: uploads get 507 before or within the body, and reads continue."""

import sys

from graphstash_server.testing import LiveServer

BLOB = bytes(range(256)) * 400  # 102,400 bytes
LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
from graphstash_server.__main__ import main
main()
"""


def test_upload_into_reserved_disk_space_is_refused(tmp_path, connect, problem, stored_files):
    with LiveServer(tmp_path, min_free_bytes="1000TiB", log_level="error") as server:
        api = connect(server.url)

        problem(api.put(BLOB), 507, "insufficient_storage", "102400 bytes")

        assert stored_files(tmp_path) == []
        ready = api.http.get("/readyz")
        assert (ready.status_code, ready.json()["blob_store"]) == (200, "read only: no space left")


def test_full_disk_refuses_uploads_and_rows_and_serves_reads(start, connect, problem, stored_files):
    """The process may write files of at most 400 kB. The kernel then reports a full disk. The
    database's log cannot grow, which is an I/O error for SQLite.
    """
    server = start("--log-level", "error", command=(sys.executable, "-c", LIMITED))
    api = connect(server.url)
    api.put(BLOB, 1)
    before = stored_files(server.data_dir)

    for size_bytes in (500_000, 3_000_000):  # one chunk, and several
        problem(api.put(bytes(size_bytes), 2), 507, "insufficient_storage", "no room")
        assert api.get(2).status_code == 404
    assert stored_files(server.data_dir) == before
    assert api.put(BLOB + b"x", 3).status_code == 201

    number = 100
    while (answer := api.acquire(number := number + 1, holder="x" * 128)).status_code == 201:
        assert number < 2000
    assert answer.json()["code"] in {"unavailable", "insufficient_storage"}
    assert answer.headers["content-type"] == "application/problem+json"
    assert api.get(1).content == BLOB
    assert api.get(5000).status_code == 404
    assert api.http.get("/healthz").status_code == 200
