"""A real browser with an administrator's rights runs no script of a page or an artifact."""

import dataclasses
import html

import pytest

from graphstash_schema import ArtifactMetadata
from support.browser import Browser
from support.guarded_server import artifact_path
from support.listener import Listener

_CALM = "calm"


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


@pytest.fixture
def spy():
    """A listener that records each request of a script that ran or a picture that loaded."""
    with Listener() as listener:
        yield listener


@pytest.fixture
def planted(fort, space, spy, key):
    """Markup in every field that other callers than the administrator fill."""
    script = f'<script>document.title="pwned";new Image().src="{spy.url}/s"</script>'
    image = f"<img src=x onerror=\"document.title='pwned'\"><img src={spy.url}/i>"
    link = '<a href="javascript:document.title=1">x</a>'
    page = f"<!doctype html><title>{_CALM}</title>{script}{image}{link}".encode()
    writer = fort.token(f"admin:{space}", description=f"{script}{image}"[:200])
    metadata = ArtifactMetadata(
        compile_seconds=1,
        raw_size_bytes=1,
        toolchain=f"{script}{image}",
        producer=image,
        parts={"program": f"{script}{image}"},
    )
    answer = fort.put(artifact_path(space), page, token=writer, metadata=metadata)
    assert answer.status_code == 201, answer.text
    holder = fort.http(writer)
    holder.post(key(1).lease_path(space), json={"holder": image[:128]})
    holder.post(key(1).lease_path(space), json={"holder": image[:128]})
    named = dataclasses.asdict(key())
    assert holder.put(f"/v1/{space}/manifests/script", json={"keys": [named]}).is_success
    fort.put(artifact_path(space, 2), b"wrong", token=writer, metadata=metadata)
    rows = fort.picture().rows["artifacts"]
    digest = next(r.sha256 for r in rows if r.namespace == space and r.size_bytes == 5)
    report = {"key": dataclasses.asdict(key(2)), "digest": f"sha256:{digest}"}
    answer = holder.post(f"/v1/{space}/artifacts:report", json=report | {"reason": "corrupt"})
    assert answer.json()["withheld"]
    return page


def test_pages_run_no_script_they_contain(fort, space, browser, middlebox, planted, spy, key):
    box = middlebox(token=fort.admin)
    markup = f'<script>document.title="pwned"</script><img src={spy.url}/path>'
    shown = (
        "/",
        "/docs",
        f"/?namespace={space}",
        f"/search?namespace={space}&q=script",
        f"/artifacts/{space}/{key()}",
        f"/jobs/{space}/script",
        "/v1/stats",
        "/openapi.json",
        "/v1/-/access",
        "/v1/-/tokens",
        "/v1/-/audit?limit=1000",
        "/v1/-/namespaces",
        "/v1/-/quarantine",
        f"/v1/{space}/manifests/script",
    )
    refused_pages = (
        f"/{markup}",
        f"/v1/{markup}/manifests/m",
        f"/v1/{space}/manifests/{markup}",
        f"/v1/-/audit?namespace={markup}",
        f"/v1/-/audit?limit={markup}",
        f"/v1/-/quarantine?namespace={markup}",
        f"/v1/-/namespaces/{markup}",
        artifact_path(space, 9),
        artifact_path(space, 2),
    )

    with fort.withstands() as refused:
        texts = ""
        for path in (*shown, *refused_pages):
            page = browser.open(box.url + path)
            assert page is not None, path
            assert not page[0] or page[0].endswith(" · graphstash"), path
            texts += page[1]
        # The browser saves the artifact and displays nothing.
        assert browser.open(box.url + artifact_path(space)) is None
        assert spy.heads == []
    # The administrator's lists contain the scripts as text.
    assert "<script>" in html.unescape(texts)
    assert refused.total() >= len(refused_pages)


def test_scripts_run_if_the_headers_of_the_server_are_removed(
    space, browser, middlebox, planted, fort, spy
):
    """Control: this browser runs the scripts. Only the headers of the server stop them."""

    def bare(request, answer):
        return dataclasses.replace(answer, headers={"content-type": "text/html"})

    box = middlebox(bare, token=fort.admin)
    assert browser.open(box.url + artifact_path(space))[0] == "pwned"
    assert any(head.startswith("GET /s ") for head in spy.heads)
    assert any(head.startswith("GET /i ") for head in spy.heads)
    # JSON escapes the quotes of the scripts, but the picture's address has no quotes.
    spy.heads.clear()
    browser.open(f"{box.url}/v1/-/tokens")
    assert any(head.startswith("GET /i") for head in spy.heads)


def test_page_of_another_site_cannot_frame_run_or_post(
    fort, space, browser, middlebox, planted, spy
):
    """The browser has the administrator's rights, as behind a proxy that adds a token."""
    box = middlebox(token=fort.admin)
    frames = "".join(
        f'<iframe src="{box.url}{path}"></iframe>'
        for path in ("/", "/v1/stats", artifact_path(space))
    )
    script = f'<script src="{box.url}{artifact_path(space)}"></script>'
    sends = (
        f'<script>fetch("{box.url}/v1/-/tokens", {{method: "POST", mode: "no-cors",'
        f' body: \'{{"description": "x", "grants": [{{"scope": "admin", "namespaces": "*"}}]}}\'}})'
        f'.catch(() => 0).finally(() => fetch("{box.url}/v1/-/tokens")'
        ".then(a => a.text()).then(() => document.title = 'read')"
        ".catch(() => document.title = 'refused'))</script>"
    )
    spy.status = 200
    spy.body = f"<!doctype html><title>{_CALM}</title>{frames}{script}{sends}"

    with fort.withstands() as refused:
        page = browser.open(f"{spy.url}/evil")
        title = browser.wait_for_title({"read", "refused"})
        assert page is not None
        assert title == "refused"
        # The browser loaded only the page: no frame ran a script, nor did the artifact run as one.
        assert [head.split()[1] for head in spy.heads if "favicon" not in head] == ["/evil"]
    assert refused["forbidden"] == 1
