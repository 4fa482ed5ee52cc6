"""The doctor's findings about the local tier and its disk."""

import os
import time
from pathlib import Path

from graphstash._cli.doctor.findings import State
from graphstash._cli.doctor.local import file_system_of
from support.doctor import diagnose, expect


def test_unwritable_tier_is_a_failure_and_one_larger_than_its_disk_a_warning(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file where the directory should be")
    found, advice = "uses a temporary directory instead", "GRAPHSTASH_CACHE_DIR"
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    for unusable in ("cache", "link"):
        findings = diagnose(cache_dir=tmp_path / unusable)
        expect(findings, "local tier", State.FAIL, found=found, advice=advice)
    findings = diagnose(cache_dir=tmp_path, local_limit="900TiB")
    advice = "set GRAPHSTASH_LOCAL_LIMIT to"
    expect(findings, "local tier", State.WARN, found="of 900.0 TiB", advice=advice)
    other = os.geteuid() + 4242
    monkeypatch.setattr("os.geteuid", lambda: other)
    found, advice = "belongs to another user", "GRAPHSTASH_CACHE_DIR"
    expect(diagnose(cache_dir=tmp_path), "local tier", State.FAIL, found=found, advice=advice)


def test_tier_contents_are_summed_and_stale_files_reported(tmp_path):
    for name, size in (("v1/a/b/c/dd/e", 3072), ("tmp/old", 2048), ("tmp/new", 1024)):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(size))
    os.utime(tmp_path / "tmp/old", times=(time.time() - 90_000,) * 2)
    findings = diagnose(cache_dir=tmp_path)
    expect(findings, "local tier", State.OK, found="holds 3.0 KiB of 10.0 GiB")
    found, advice = "1 temporary file of processes that died (2.0 KiB", f"find {tmp_path / 'tmp'}"
    expect(findings, "local tier", State.WARN, found=found, advice=advice)


def test_network_disk_is_detected_from_mounts(tmp_path, monkeypatch):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "2 1 0:40 / /home\\040of\\040all rw,relatime shared:1 - nfs4 files:/home rw\n"
        "3 2 0:41 / /home\\040of\\040all/me/local rw - xfs /dev/sdb1 rw\n"
    )
    assert file_system_of(Path("/home of all/me/.cache"), mounts=mounts) == "nfs4"
    assert file_system_of(Path("/home of all/me/local/x"), mounts=mounts) == "xfs"
    assert file_system_of(Path("/homestead"), mounts=mounts) == "ext4"
    with mounts.open("a") as file:
        file.write("4 1 0:42 / / rw - overlay overlay rw\n")  # hides the first mount
    assert file_system_of(Path("/homestead"), mounts=mounts) == "overlay"
    mounts.write_text("1 0 8:1 / / rw - nfs4 files:/ rw\n")
    monkeypatch.setitem(file_system_of.__kwdefaults__, "mounts", mounts)
    findings = diagnose(cache_dir=tmp_path)
    expect(findings, "local tier", State.WARN, found="(nfs4)", advice="a disk of this host")
