"""`make bench-tuning` on a small generated table."""

import gzip
import json

import pytest

pytestmark = pytest.mark.extended


def table(folder):
    """Write an invented kernel: 60 of 64 tilings work, and a tiling of 16 x 16 is the fastest."""
    rows = [
        f"{m},{n},{v},{'invalid' if v > m else abs(m - 16) + abs(n - 16) + 4 / v + 1}"
        for m in (4, 8, 16, 32)
        for n in (4, 8, 16, 32)
        for v in (1, 2, 4, 8)
    ]
    with gzip.open(folder / "made.csv.gz", "wt") as out:
        out.write("\n".join(["M,N,V,milliseconds", *rows]) + "\n")


def bench(folder, *options):
    from benchmarks.tuning import run  # imports scipy and matplotlib

    run.main(["--directory", str(folder / "out"), "--seeds", "2", "--lattices", *options])


def test_benchmark_replays_tables(tmp_path):
    table(tmp_path)
    bench(tmp_path, "--tables", str(tmp_path), "--arms", "random", "g-bfs", "hyperopt")
    report = json.loads((tmp_path / "out" / "bench-tuning.json").read_text())
    assert report["problems"]["made"]["size"] == 64
    rows = report["problems"]["made"]["rows"]
    assert set(rows) == {"random", "g-bfs", "hyperopt"}
    assert all(cells["5.0% (4)"]["min"] >= 1 for cells in rows.values())
    assert "## made" in (tmp_path / "out" / "bench-tuning.md").read_text()
    assert (tmp_path / "out" / "bench-tuning.png").stat().st_size > 1000
