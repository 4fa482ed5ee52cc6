"""`graphstash doctor` in this process or in its own, and a proxy that changes answers."""

import http.server
import os
import subprocess
import sys
import threading
from contextlib import contextmanager

import httpx

from graphstash._doctor.examination import examine

__all__ = ["CANARY", "altering", "diagnose", "doctor", "line"]

CANARY = "gst_canarycanaryabcd_" + "CANARY0" * 6 + "x"
"""A token that no server knows, and that must not be shown."""


def diagnose(url="http://127.0.0.1:9", *, probe=False, **settings):
    """What the doctor finds with these settings; names in lower case."""
    environ = {"GRAPHSTASH_URL": url, "GRAPHSTASH_CONNECT_SECONDS": "5"}
    environ |= {f"GRAPHSTASH_{name.upper()}": str(value) for name, value in settings.items()}
    return list(examine(environ, {}, with_probe=probe))


def line(findings, name, state=None):
    """The one finding of a name, or the one of a name and a state."""
    found = [each for each in findings if each.name == name and state in (None, each.state)]
    assert len(found) == 1, findings
    return found[0]


def doctor(*arguments, **variables):
    return subprocess.run(
        [sys.executable, "-m", "graphstash", "doctor", *map(str, arguments)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@contextmanager
def altering(upstream, status=None, body=None, *, at="", **headers):
    """A proxy that passes GETs on and changes every answer, or those of one path."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            answer = httpx.get(f"{upstream}{self.path}", trust_env=False)
            is_altered = self.path.startswith(at)
            told = {name.title(): value for name, value in answer.headers.items()}
            content = answer.content
            if is_altered:
                content = body or content
                told["Content-Length"] = str(len(content))
                told |= {name.replace("_", "-").title(): headers[name] for name in headers}
            self.send_response_only(status if status and is_altered else answer.status_code)
            for name, value in told.items():
                if value is not None:
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{proxy.server_port}"
        proxy.shutdown()
        thread.join()
