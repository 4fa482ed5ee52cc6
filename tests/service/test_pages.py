"""What the pages of the dashboard say, to whom, and what they cost."""

import html
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from functools import partial

import httpx
import pytest

from graphstash_schema.names import printable
from graphstash_server import app
from graphstash_server.pages import audit, routes, tuning, visitor
from graphstash_server.pages.rendering import asset
from graphstash_server.services.artifacts import catalog
from graphstash_server.testing import LiveServer
from support.dashboard import CAUSE, JOB, LABEL, Team, key_of
from support.sessions import HTML
from support.statements import recorded
from support.waiting import until


def artifact_page(namespace, key):
    return f"/artifacts/{namespace}/{key}"


def withhold(team, key):
    digest = team.http.head(key.artifact_path(team.namespace)).headers["etag"].strip('"')
    report = {"key": asdict(key), "digest": digest, "reason": "corrupt"}
    answer = team.http.post(f"/v1/{team.namespace}/artifacts:report", json=report)
    assert answer.json()["withheld"]


def text_of(page):
    """What a page says, without its markup."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


@pytest.fixture(scope="module")
def used(guarded, new_namespace):
    """A team whose work tests only look at."""
    team = Team(guarded.url, new_namespace(), guarded.admin)
    team.day = datetime.now(UTC).date()
    team.key = team.work()
    yield team
    team.close()


@pytest.fixture
def reader(browse, used):
    """Pages as somebody sees them who may read what the team has used; its counts are there."""
    client = browse(f"read:{used.namespace}")
    until(lambda: "5 hits" in text_of(client.get("/").text))
    return client


@pytest.fixture
def foreign(guarded, namespace):
    """A namespace beside it, that nobody else may see."""
    team = Team(guarded.url, f"{namespace}-foreign", guarded.admin)
    team.put(0, label="a secret label", producer="a secret producer", toolchain="secret 1.0")
    team.tune(4, "tuned secret float16 - 1", "secret=1", "3")
    team.report("secret-run", (key_of(5), "a secret miss", ""), job="secret-job")
    team.hold(50, holder="a secret holder")
    yield team
    team.close()


def test_overview_shows_savings_space_runs_and_the_history_by_every_group(reader, browse, used):
    path = f"/?namespace={used.namespace}"
    page = text_of(browse(f"write:{used.namespace}").get(path).text)
    when = "today" if datetime.now(UTC).date() == used.day else "ever"
    assert f"Saved {when} 3 min 20 s" in page  # five hits of 40 s
    assert "83.3 % of look-ups" in page  # and one miss
    assert "There is no limit." in page or "No: " in page
    for text in (LABEL, CAUSE, "ana@node04:4711", "triton 3.3.0", "ben@node11:99", "Database ok"):
        assert text in page, text

    groups = {"namespace": used.namespace, "kind": "jax", "device_type": "cuda-sm_90", "job": JOB}
    for by, group in groups.items():
        for step in ("day", "hour"):
            page = reader.get(f"{path}&by={by}&step={step}").text
            table = page.partition('aria-label="Hit rate by group"')[2].partition("</table>")[0]
            assert group in text_of(table), (by, step)
            assert "<svg" in page


def test_artifact_page_shows_details_and_explains_against_another(reader, used):
    key, namespace = used.key, used.namespace
    path = artifact_page(namespace, key)
    page = text_of(reader.get(path).text)
    for text in (LABEL, str(key), "40 s", "jax 0.10.2", JOB, "not signed", "same program"):
        assert text in page, text
    assert "XLA FLAGS: --a=1 here, --a=2 there" in page or "XLA_FLAGS: --a=1 here" in page

    for against in (key_of(1).fingerprint, f"{namespace}/{key_of(1)}"):
        answer = reader.get(path, params={"against": against})
        explained = answer.text.partition('id="explain"')[2].partition("</section>")[0]
        assert "--a=1 here, --a=2 there" in text_of(explained)
    undescribed = f"{namespace}/{key_of(3, 'torch_xla')}"
    answer = reader.get(path, params={"against": undescribed})
    assert answer.status_code == 200  # by the parts in its metadata
    for wrong in ("x", "a/b", key_of(77).fingerprint, f"{namespace}-foreign/{key}"):
        answer = reader.get(path, params={"against": wrong})
        assert answer.status_code in (400, 404)
        assert "<h1>" in answer.text


def test_job_page_compares_runs_and_run_page_lists_causes(reader, used):
    namespace = used.namespace
    job = reader.get(f"/jobs/{namespace}/{JOB}").text
    run = text_of(reader.get(f"/runs/{namespace}/run-2").text)

    links = set(re.findall(r'href="([^"]+)"', job))
    assert {f"/runs/{namespace}/run-{number}" for number in (1, 2)} <= links
    assert "2 artifacts in its manifest" in text_of(job)
    assert "latest run compiled 2 programs. The 1 run before compiled at most 0: see why" in (
        text_of(job).replace(" .", ".").replace(" :", ":")
    )
    assert "Hit rate of each of the last 2 runs" in job
    assert "Time to the first step of each of the last 2 runs" in job
    slower = "The latest run made its first step after 1 min 4 s, 26 s later than the run before"
    assert f"{slower} (38 s): see why" in text_of(job)
    assert "First step after 1 min 4 s" in run
    for number in (1, 2):
        used.report(f"hits-{number}", job="hits")
    job = reader.get(f"/jobs/{namespace}/hits").text
    assert "Hit rate of each of the last 2 runs" in job
    assert "Programs compiled in each" not in job
    assert "Time to the" not in job
    for text in (CAUSE, "cause unknown", "jit(init)", "2 of 50 programs", "2 misses"):
        assert text in run, text


def test_job_page_compares_last_programs_of_runs_without_training_loop(reader, used):
    for number, seconds in enumerate((9.0, 40.0, 10.0, 10.9)):
        age = timedelta(hours=4 - number)
        used.report(f"loop-{number}", job="loop", age=age, last_program_seconds=seconds)
    path = f"/jobs/{used.namespace}/loop"
    job = text_of(reader.get(path).text)
    assert "had its last program after 11 s; the median of the 3 runs before: 10 s." in job
    assert "Time to the last program of each of the last 4 runs" in reader.get(path).text
    used.report("loop-4", job="loop")  # of an earlier release
    assert "had its last program" not in text_of(reader.get(path).text)


def test_search_finds_by_label_fingerprint_user_and_toolchain(reader, used):
    key = used.key

    def found(text):
        page = reader.get("/search", params={"q": text}).text
        return set(re.findall(r'href="(/artifacts/[^"]+)"', page))

    page = artifact_page(used.namespace, key)
    for text in (LABEL, key.fingerprint[:6], key.fingerprint, "ana@NODE04", "JAX 0.10", "train_s"):
        assert page in found(text), text
    assert found("no such thing") == found("x") == found("\0\0") == set()
    assert found("%") == found("_") == set()
    assert reader.get("/search", params={"q": "x" * 300}).status_code == 400


def test_tuning_page_shows_schedules_in_order_of_kernels(team, browse, namespace, monkeypatch):
    schedules = {
        "tuned matmul float16 nn 128": ("tile=8", "2.5"),
        "tuned attention bfloat16 - 64x128": ("tile=4 warps=2", "1"),
        "tuned matmul float16 nn 64": ("", ""),
        "tuned softmax float32 - 1": ("tile=1", "-1"),
        "tuned sum float32 - 1": ("tile=2", "nan"),
        "tuned sum float32 - 2": ("tile=2", "fast"),
        "Helion kernel add.py:3": ("", ""),
        "measured matmul float16 nn 128": ("", ""),
        "untuned": ("", ""),
    }
    for number, (label, (schedule, speedup)) in enumerate(schedules.items(), 20):
        team.tune(number, label, schedule, speedup)
    reader = browse(f"read:{namespace}")

    details = f" cuda-sm_90 triton 3.3.0 {namespace} ana@node04:4711 "

    def rows(**asked):
        page = text_of(reader.get("/tuning", params=asked).text)
        page = page.partition("Found by Found ")[2].replace("\N{EN DASH}", "none")
        return [
            each.split("ago ")[-1].removeprefix("just now ") for each in page.split(details)[:-1]
        ]

    found = rows()
    assert found == [
        "Helion kernel add.py:3 none not said",
        "attention bfloat16 - 64x128 1.00 times tile=4 warps=2",
        "matmul float16 nn 128 2.50 times tile=8",
        "matmul float16 nn 64 none not said",
        "softmax float32 - 1 none tile=1",
        "sum float32 - 1 none tile=2",
        "sum float32 - 2 none tile=2",
    ]
    assert rows(q="matmul float16 nn 1") == rows(q="matmul float16 nn 128") == found[2:3]
    assert rows(q="%") == rows(q="at_ention") == rows(q="zzz") == []
    assert rows(namespace=namespace, q="s") == found[4:]
    for name in ("add", "Helion", "Helion kernel add.py", "Helion kernel "):
        assert rows(q=name) == found[:1], name
    assert rows(q="Helion kernel sub") == rows(q="elion") == rows(q="tuned") == []
    for wrong in ({"q": "x" * 200}, {"q": "\0"}, {"namespace": "A B"}):
        assert reader.get("/tuning", params=wrong).status_code == 400, wrong
    more = "There may be more"
    assert more not in reader.get("/tuning").text
    for number in range(30, 36):
        team.tune(number, f"tuned z float32 - {number}")
    monkeypatch.setattr(tuning, "_MAX_ROWS", 10)
    assert len(rows()) == 11  # ten of each prefix
    assert more in reader.get("/tuning").text


def test_withheld_artifacts_hide_no_others(team, browse, namespace, monkeypatch):
    monkeypatch.setattr(tuning, "_MAX_ROWS", 10)
    monkeypatch.setattr(catalog, "_MAX_FOUND", 2)
    monkeypatch.setattr(catalog, "MAX_SEARCHED", 1)
    reader = browse(f"read:{namespace}")
    for number in range(100, 110):
        withhold(team, team.tune(number, "tuned a"))
    kept = artifact_page(namespace, team.tune(110, "tuned a"))
    team.put(0)  # the only one that the search finds by other text
    page = reader.get("/tuning").text
    assert kept in page
    assert "There may be more" not in page
    assert kept in reader.get("/search?q=tuned+a").text


def test_pages_say_that_they_search_only_the_largest_namespaces(
    used, team, browse, namespace, monkeypatch
):
    team.tune(100, "tuned small")
    reader = browse(f"read:{namespace}", f"read:{used.namespace}")
    notice = "Only the namespaces with the most artifacts are searched"
    for path in ("/tuning?q=small", "/search?q=tuned+small"):
        page = reader.get(path).text
        assert artifact_page(namespace, key_of(100, "schedule")) in page
        assert notice not in page
    monkeypatch.setattr(visitor, "_MAX_LISTED", 1)
    for path in ("/tuning?q=small", "/search?q=tuned+small", "/tuning", "/search?q=small"):
        assert notice in text_of(reader.get(path).text), path
        page = reader.get(path, params={"q": "tuned small", "namespace": namespace}).text
        assert notice not in page, path


def test_pages_show_only_what_the_token_may_read(used, foreign, browse):
    namespace = used.namespace
    client = browse(f"admin:{namespace}")
    pages = [
        *("/", "/?by=namespace", "/?by=job&step=hour", "/search?q=secret"),
        *(f"/search?q={key_of(0).fingerprint}", "/tuning"),
        artifact_page(namespace, used.key),
        f"/jobs/{namespace}/{JOB}",
        f"/runs/{namespace}/run-2",
    ]
    for path in pages:
        page = client.get(path).text.replace("q=secret", "").replace('value="secret"', "")
        page = page.replace("“secret”", "")
        assert "secret" not in page, path
        assert foreign.namespace not in page, path
    there, absent = (artifact_page(foreign.namespace, key_of(number)) for number in (0, 9))
    for path in (
        *(there, absent, f"/jobs/{foreign.namespace}/secret-job"),
        f"/tuning?namespace={foreign.namespace}",
        f"/runs/{foreign.namespace}/secret-run",
        *(f"/?namespace={foreign.namespace}", "/?namespace=no-such-namespace"),
    ):
        answer = client.get(path)
        assert answer.status_code == 404
        assert "secret" not in text_of(answer.text).replace(path, "")

    # Whether something exists does not show.
    texts = [text_of(client.get(path).text).partition("Request")[0] for path in (there, absent)]
    assert texts[0] == texts[1]


def test_reader_is_shown_no_holders_quarantine_or_totals(used, browse):
    reader, writer, owner = (
        text_of(browse(grant).get("/").text)
        for grant in (f"read:{used.namespace}", f"write:{used.namespace}", "admin:*")
    )

    assert "ben@node11:99 0" not in reader
    assert "ben@node11:99 0" in writer
    for text in ("Quarantine", "This process has run"):
        assert text not in reader + writer
        assert text in owner


def test_anonymous_pages_need_no_sign_in_and_read_statistics_once(
    guarded, team, foreign, browse, namespace
):
    key = team.put(0)
    anonymous = browse()

    def statements(path):
        with recorded("usage.evicted_bytes", of_servers=True) as statements:
            answer = anonymous.get(path)
        assert answer.status_code == 200
        return [each.sql[:6] for each in statements if each.sql.startswith("SELECT")]

    for path in ("/", "/?by=job", "/search", "/search?q=a*+%22b%22", "/tuning?q=x&next=/docs"):
        page = html.unescape(anonymous.get(path).text)
        assert "Token" in page
        assert f'name="next" value="{path}"' in page
    assert anonymous.get(artifact_page(namespace, key)).status_code == 401
    assert statements("/") == statements("/search?q=train") == statements("/tuning") == []

    guarded.set_policy(namespace, anonymous_read=True)
    page = anonymous.get(artifact_page(namespace, key))
    assert page.status_code == 200
    assert LABEL in page.text
    overview = anonymous.get("/").text
    assert namespace in overview
    assert foreign.namespace not in overview
    assert "secret" not in overview
    assert anonymous.get(artifact_page(foreign.namespace, key_of(0))).status_code == 401
    assert statements("/") == statements("/search?q=train") == ["SELECT"]


def test_a_withheld_artifact_is_on_no_page_but_in_the_quarantine(team, browse, namespace):
    key = team.put(0, label="a withheld label")
    withhold(team, key)
    client = browse(f"admin:{namespace}")

    assert client.get(artifact_page(namespace, key)).status_code == 404
    assert "/artifacts/" not in client.get("/search?q=a+withheld+label").text
    page = text_of(client.get(f"/?namespace={namespace}").text)
    assert "a withheld label" not in page
    assert f"{key.fingerprint[:12]} {namespace} jax corrupt" in page


HOSTILE = '"><script>document.title=1</script><img src=x onerror=y>\u202e\u2066{{7*7}}'


def test_text_of_callers_is_escaped(team, browse, namespace):
    team.tune(4, "tuned " + HOSTILE, HOSTILE, HOSTILE)
    hostile = {"label": HOSTILE, "producer": HOSTILE, "toolchain": HOSTILE}
    key = team.put(0, **hostile, parts={"note": "\x1b[2J\r\n" + HOSTILE})
    team.put(1, label=HOSTILE, parts={"note": "other " + HOSTILE})
    team.report("run-1", (key, HOSTILE, HOSTILE), program=HOSTILE, producer=HOSTILE)
    team.hold(9, holder=HOSTILE)
    client = browse(f"admin:{namespace}")
    own = artifact_page(namespace, key)
    for path in (
        *(f"/?namespace={namespace}", own, f"/jobs/{namespace}/{JOB}", f"/runs/{namespace}/run-1"),
        *("/search?q=document.title", "/search?q=%3Cscript%3E", "/?by=%3Cscript%3E"),
        *(
            f"{own}?against=%3Cscript%3E",
            f"/tuning?namespace={namespace}",
            "/tuning?q=%3Cscript%3E",
        ),
    ):
        page = client.get(path).text
        assert not set("\u202e\u2066\x1b\r") & set(page), path
        assert page.count("<script") == 1, path
        assert f"<script>{asset('times.js')[0].decode().strip()}</script>" in page, path
        assert "<img src=x" not in page, path
        assert "{{7*7}}" not in page or "49" not in page.partition("{{7*7}}")[0][-5:]
    shown = html.escape(printable(HOSTILE, most=1000)).replace("&#34;", "&quot;")
    page = client.get(own).text.replace("&#34;", "&quot;").replace("&#39;", "&#x27;")
    assert shown in page


def test_a_refusal_is_a_page_for_browsers_and_a_problem_for_programs(guarded, problem, namespace):
    for path in (artifact_page(namespace, key_of(0)), f"/jobs/{namespace}/x"):
        problem(httpx.get(guarded.url + path), 401, "unauthenticated")
        page = httpx.get(guarded.url + path, headers=HTML)
        assert page.status_code == 401
        assert page.headers["content-type"].startswith("text/html")
    response = httpx.get(guarded.url + f"/v1/{namespace}/artifacts/x/y/z", headers=HTML)
    assert response.headers["content-type"] == "application/problem+json"

    for path in ("/nothing", "/<b>x</b>"):
        page = httpx.get(guarded.url + path, headers=HTML)
        assert page.status_code == 404
        assert page.headers["content-type"].startswith("text/html")
        assert "Unknown path" in text_of(page.text)
        assert "<b>" not in page.text
        problem(httpx.get(guarded.url + path), 404, "unknown_path")
    problem(httpx.get(guarded.url + "/v1/nothing", headers=HTML), 404, "unknown_path")
    bad = {**HTML, "Authorization": "Bearer gst_x"}
    problem(httpx.get(guarded.url + "/nothing", headers=bad), 401, "unauthenticated")


def test_head_of_page_answers_with_headers_of_get(reader, used):
    for path in (
        *("/", "/search?q=train", "/tuning", "/sign-in", "/docs", "/nothing"),
        artifact_page(used.namespace, used.key),
        f"/jobs/{used.namespace}/{JOB}",
        f"/runs/{used.namespace}/run-2",
        asset("style.css")[1],
    ):
        head, get = reader.head(path), reader.get(path)
        assert (head.status_code, head.content) == (get.status_code, b""), path
        for name in ("content-type", "content-security-policy", "cache-control"):
            assert head.headers.get(name) == get.headers.get(name), path


def test_audit_page_shows_administrators_who_changed_what(team, browse, namespace, monkeypatch):
    key = team.put(0)
    team.http.delete(key.artifact_path(team.namespace)).raise_for_status()
    owner = browse("admin:*")

    def rows(**asked):
        page = owner.get("/audit", params={"namespace": namespace, **asked})
        assert page.status_code == 200
        return [text_of(each) for each in re.findall(r"</time></td>.*?</tr>", page.text)]

    deleted, put = rows()
    assert f"delete {namespace} {key}" in deleted
    assert f"put {namespace} {key}" in put
    assert rows(action="delete") == [deleted]
    assert rows(action="evict") == rows(before="1") == rows(who="nobody") == []
    assert f'href="{artifact_page(namespace, key)}"' in owner.get("/audit").text
    assert len(rows(who=" token:")) == 2
    places = ({"before": place} for place in ("x", "-1", "0" * 19 + "1" + "9" * 30))
    for wrong in ({"action": "x"}, *places, {"namespace": "A B"}):
        assert owner.get("/audit", params=wrong).status_code == 400, wrong
    monkeypatch.setattr(audit, "_MAX_ROWS", 1)
    assert rows() == [deleted]
    page = owner.get(f"/audit?namespace={namespace}").text
    (earlier,) = re.findall(r"/audit\?before=(\d+)&amp;", page)
    assert rows(before=earlier) == [put]
    monkeypatch.setattr(audit, "MAX_AUDIT_ENTRIES", 1)
    page = text_of(owner.get(f"/audit?namespace={namespace}&action=put").text)
    assert "The 1 latest entries have none of these." in page
    assert "Earlier entries" in page
    assert "No such entry" not in page
    assert browse(f"admin:{namespace}").get("/audit").status_code == 403
    assert browse().get("/audit").status_code == 401
    assert 'href="/audit"' not in browse(f"admin:{namespace}").get("/").text
    assert 'href="/audit"' in owner.get("/").text


def test_page_view_is_no_use_and_counts_towards_rate_limit(guarded, team, browse):
    namespace, key = team.namespace, team.work()
    client = browse(f"admin:{namespace}")
    until(lambda: "5 hits" in text_of(client.get("/").text))
    before = team.http.head(key.artifact_path(namespace)).headers
    page = artifact_page(namespace, key)
    for path in ("/", page, "/search?q=train", f"/jobs/{namespace}/{JOB}"):
        assert client.get(path).status_code == 200
    after = team.http.head(key.artifact_path(namespace)).headers
    stats = team.http.get("/v1/stats").json()["namespaces"]
    (own,) = (each for each in stats if each["namespace"] == namespace)
    assert before["etag"] == after["etag"]
    assert (own["hits"], own["misses"]) == (5, 1)

    guarded.set_policy(namespace, requests_per_second=0.001)
    assert 429 in {client.get(page).status_code for _ in range(3)}


def test_overview_of_an_empty_namespace_says_what_to_do(browse, namespace):
    page = text_of(browse(f"read:{namespace}").get("/").text)
    for text in (
        *("No hit in the last 30 days", "No run has reported yet", "Nothing is stored yet"),
        "Saved ever 0 s",
    ):
        assert text in page


def test_reference_has_every_call_and_is_rendered_once_in_a_thread(tmp_path, monkeypatch):
    makers = []

    def made_by(make):
        def record(*given, **asked):
            makers.append((make.__name__, threading.current_thread().name))
            return make(*given, **asked)

        return record

    for module, name in ((app, "get_openapi"), (routes, "reference_of")):
        monkeypatch.setattr(module, name, made_by(getattr(module, name)))
    with LiveServer(tmp_path, log_level="error") as server, ThreadPoolExecutor(8) as readers:
        paths = [server.url + path for path in 4 * ("/docs", "/openapi.json")]
        answers = list(readers.map(partial(httpx.get, timeout=60, trust_env=False), paths))
    assert len({answer.content for answer in answers}) == 2
    assert sorted(name for name, _ in makers) == ["get_openapi", "reference_of"]
    assert "live-server" not in {thread for _, thread in makers}

    page, document = text_of(answers[0].text), answers[1].json()
    for path, methods in document["paths"].items():
        assert all(f"{method.upper()} {path}" in page for method in methods), path
    assert [name for name in document["components"]["schemas"] if name not in page] == []
