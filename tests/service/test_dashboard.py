"""The dashboard in a real browser: content, requests, accessibility and sessions."""

import re
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest
from axe_playwright_python.sync_playwright import Axe

from support.browser import chromium
from support.dashboard import CAUSE, JOB, Team, key_of
from support.listener import Listener
from support.tiers import most_extended
from support.tokens import Guarded
from support.waiting import until

NAMESPACE = "team"
HOSTILE = '"><script>document.title="pwned"</script><img src=x onerror=alert(1)>\u202etxet'
SIZES = {"desktop": (1280, 800), "phone": (360, 740)}


@pytest.fixture(scope="module")
def server(start_on_sqlite):
    """A guarded server with a team's work, and with hostile names from another caller."""
    return start_on_sqlite(_Worked, store_limit_bytes=256 * 1024)


class _Worked(Guarded):
    """Also create a reader's token."""

    def __enter__(self):
        super().__enter__()
        self.team = Team(self.url, NAMESPACE, self.admin)
        self.key = self.team.work()
        self.hostile = self.team.put(
            10, label=HOSTILE, producer=HOSTILE, toolchain=HOSTILE, parts={"note": HOSTILE}
        )
        self.team.tune(12, f"tuned {HOSTILE}", HOSTILE, HOSTILE)
        self.team.report("hostile-run", (self.hostile, HOSTILE, HOSTILE), program=HOSTILE)
        self.team.hold(11, holder=HOSTILE)
        self.reader = self.token(f"read:{NAMESPACE}", description=HOSTILE)
        stats = self.http(self.admin)
        until(lambda: stats.get("/v1/stats").json()["namespaces"][0]["hits"] == 5)
        return self

    def __exit__(self, *_):
        self.team.close()
        super().__exit__(*_)


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


class Tab:
    """A page in its own browser context. Records the console's messages and the requested URLs."""

    def __init__(self, browser, server, *, size="desktop", **options):
        self.server = server
        self.width, height = SIZES[size]
        viewport = {"width": self.width, "height": height}
        self.context = browser.new_context(viewport=viewport, **options)
        self.page = self.context.new_page()
        self.complaints = []
        self.asked = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def open(self, path):
        answer = self.page.goto(self.server.url + path)
        return answer.status

    def sign_in(self, token):
        self.open("/sign-in")
        self.page.fill("#token", token)
        self.page.click("main button")
        self.page.wait_for_url(self.server.url + "/")

    @property
    def text(self):
        return self.page.inner_text("body")


@pytest.fixture
def tab(browser, server):
    tabs = []

    def make(visited=server, **options):
        tabs.append(Tab(browser, visited, **options))
        return tabs[-1]

    yield make
    for each in tabs:
        each.context.close()


@pytest.fixture(scope="module")
def paths(server):
    """Path of every page, in each of its states."""
    return {
        "overview": "/",
        "overview of a namespace": f"/?namespace={NAMESPACE}&by=kind&step=hour",
        "artifact": f"/artifacts/{NAMESPACE}/{server.key}?against={key_of(1).fingerprint}",
        "artifact of a stranger": f"/artifacts/{NAMESPACE}/{server.hostile}",
        "artifact without a description": f"/artifacts/{NAMESPACE}/{key_of(3, 'torch_xla')}",
        "job": f"/jobs/{NAMESPACE}/{JOB}",
        "run": f"/runs/{NAMESPACE}/run-2",
        "run of a stranger": f"/runs/{NAMESPACE}/hostile-run",
        "run that missed nothing": f"/runs/{NAMESPACE}/run-1",
        "search": "/search",
        "search that finds": "/search?q=train",
        "search that finds nothing": "/search?q=nothing+at+all",
        "tuning": "/tuning",
        "audit": "/audit",
        "tokens": "/tokens",
        "reference": "/docs",
        "sign-in": "/sign-in",
        "refusal": f"/jobs/{NAMESPACE}/no-such-job",
    }


SHOWN_OFTEN = ("overview", "run", "artifact of a stranger")
"""Pages that `make test` opens. `make test-all` opens every page."""


@pytest.mark.parametrize("size", most_extended(list(SIZES), quick=["phone"]))
def test_every_page_is_accessible_fits_and_loads_nothing_from_elsewhere(
    server, tab, paths, size, is_extended
):
    """axe finds no violation, the page is no wider than the screen, and all requests go to this
    server. The console reports nothing, such as a violated Content-Security-Policy.
    """
    visit = tab(size=size, color_scheme="dark" if size == "phone" else "light")
    visit.sign_in(server.admin)
    for name in paths if is_extended else SHOWN_OFTEN:
        visit.complaints.clear()
        status = visit.open(paths[name])
        assert status == (404 if name == "refusal" else 200), name
        visit.page.evaluate("document.querySelectorAll('details').forEach(it => it.open = true)")
        found = Axe().run(visit.page)
        assert found.violations_count == 0, f"{name}\n{found.generate_report()}"
        wide = visit.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= visit.width, name
        expected = ["Failed to load resource"] if name == "refusal" else ["[DOM] Password forms"]
        complaints = [
            each for each in visit.complaints if not any(part in each for part in expected)
        ]
        assert complaints == [], name
        assert visit.page.title() != "pwned"
    assert all(url.startswith(server.url + "/") for url in visit.asked)


@pytest.mark.extended
def test_pages_of_empty_server_are_accessible(tmp_path, tab):
    with Guarded(tmp_path) as server:
        visit = tab(server)
        visit.sign_in(server.admin)
        assert "No run has reported yet" in visit.text
        assert Axe().run(visit.page).violations_count == 0
        assert visit.complaints == [each for each in visit.complaints if "[DOM]" in each]


@pytest.mark.extended
def test_keyboard_alone_signs_in_and_reaches_causes_of_compilations(server, tab):
    visit = tab()
    visit.open("/sign-in")
    keyboard = visit.page.keyboard
    visit.page.wait_for_selector("#token:focus")  # browsers move the focus after the page is loaded
    keyboard.type("gst_wrong")
    keyboard.press("Enter")
    visit.page.wait_for_selector('[role="alert"]')
    assert visit.page.get_attribute("#token", "aria-invalid") == "true"
    assert Axe().run(visit.page).violations_count == 0
    visit.page.wait_for_selector("#token:focus")
    keyboard.type(server.reader)
    keyboard.press("Enter")
    visit.page.wait_for_url(server.url + "/")
    keyboard.press("Tab")
    assert visit.page.evaluate("document.activeElement.textContent") == "Skip to content"
    keyboard.press("Enter")

    _tab_to(visit.page, f'[href="/runs/{NAMESPACE}/run-2"]')
    outline = visit.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    keyboard.press("Enter")
    visit.page.wait_for_url(f"{server.url}/runs/{NAMESPACE}/run-2")
    assert CAUSE in visit.text


def _tab_to(page, selector):
    for _ in range(100):
        page.keyboard.press("Tab")
        if page.evaluate(f"document.activeElement.matches('{selector}')"):
            return
    raise AssertionError(f"{selector} cannot be reached")


def test_browser_keeps_session_from_scripts_and_other_sites(server, tab):
    visit = tab()
    visit.sign_in(server.reader)
    assert visit.page.evaluate("document.cookie") == ""
    # A link on another site (another name of this host) sends no cookie. Links on this site do.
    with Listener() as site:
        site.status = 200
        site.body = (
            f'<!doctype html><title>x</title><a href="{server.url}/jobs/{NAMESPACE}/{JOB}">x</a>'
        )
        visit.page.goto(site.url.replace("127.0.0.1", "localhost"))
        visit.page.click("a")
        visit.page.wait_for_url(f"{server.url}/jobs/**")
    assert "Sign in" in visit.page.title()
    visit.page.click("text=open the page again")
    assert visit.page.inner_text("h1") == f"Job {JOB}"
    # Forms on another site change no session.
    with Listener() as site:
        site.status = 200
        for action in ("sign-in", "sign-out"):
            form = f'<form method="post" action="{server.url}/{action}">'
            field = f'<input name="token" value="{server.admin}"><button>go</button></form>'
            site.body = f"<!doctype html><title>x</title>{form}{field}"
            visit.page.goto(site.url)
            visit.page.click("button")
            visit.page.wait_for_url(f"{server.url}/{action}")
            assert "Forbidden" in visit.text or "forbidden" in visit.text
            visit.open("/")
            assert "Sign out" in visit.text


@pytest.mark.extended
def test_times_are_in_the_readers_zone_with_utc_on_hover(server, tab):
    visit = tab(timezone_id="Asia/Kolkata", locale="en-GB")
    visit.sign_in(server.admin)
    for path in ("/", f"/runs/{NAMESPACE}/run-1", "/audit"):
        visit.open(path)
        times = visit.page.evaluate(
            "Array.from(document.querySelectorAll('time'), t => [t.dateTime, t.title, t.innerText])"
        )
        assert times
        for exact, title, shown in times:
            at = datetime.fromisoformat(exact)
            assert title == at.strftime("%Y-%m-%d %H:%M:%S UTC")
            there = at.astimezone(ZoneInfo("Asia/Kolkata"))
            assert re.fullmatch(
                rf"(\d+ \w+ \d+, )?{there:%H:%M} \((.+ ago|in .+|just now)\)", shown
            )
        assert "those of Asia/Calcutta, with UTC on hover" in visit.page.inner_text("footer")


@pytest.mark.extended
def test_wide_table_scrolls_inside_its_card_with_a_shadow(server, tab):
    visit = tab(size="phone")
    visit.sign_in(server.admin)
    for path in (f"/runs/{NAMESPACE}/run-2", f"/jobs/{NAMESPACE}/{JOB}"):
        visit.open(path)
        table = visit.page.locator(".scroll:has(table)").last
        assert table.evaluate("it => it.scrollWidth > it.clientWidth")
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= visit.width
        edge = {"x": table.bounding_box()["width"] - 3, "y": 5, "width": 2, "height": 2}
        hidden, end = _colour(table, edge), None
        table.evaluate("it => it.scrollLeft = it.scrollWidth")
        end = _colour(table, edge)
        assert hidden != end  # at the end, there is no shadow


def _colour(element, part):
    """Return a screenshot of a part of an element."""
    box = element.bounding_box()
    clip = {**part, "x": box["x"] + part["x"], "y": box["y"] + part["y"]}
    element.scroll_into_view_if_needed()
    return element.page.screenshot(clip=clip, full_page=True)


@pytest.mark.extended
def test_artifact_is_deleted_by_a_button_after_confirmation(server, tab):
    key = server.team.put(40, label="to be deleted")
    visit = tab()
    visit.sign_in(server.admin)
    assert re.search(r"No: .* of 256\.0 KiB", visit.text)  # whether the store is full
    visit.open(f"/artifacts/{NAMESPACE}/{key}")
    button = visit.page.get_by_role("button", name="Delete it for good")
    assert not button.is_visible()
    visit.page.get_by_text("Delete", exact=True).click()
    button.click()
    visit.page.wait_for_url(f"{server.url}/?namespace={NAMESPACE}#recent")
    assert "to be deleted" not in visit.text
    assert visit.open(f"/artifacts/{NAMESPACE}/{key}") == 404
    visit.open("/audit?action=delete")
    assert str(key) in visit.text
