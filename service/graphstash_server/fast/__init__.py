"""The fast path: GET and HEAD of an artifact without a framework.

These calls are nearly all of a server's load, and a framework would cost ten times as much as the
response itself. A connection offers every request to this package first:

    answers       parses a request and renders the response that `reading` decides
    connection    offers requests, and writes responses: small ones in one piece, files by
                  sendfile(2)

The application handles all other requests: other paths, heads in several pieces, requests during
another response, and, counted by reason, requests with unknown headers, those that may be
redirected, and those whose caller or policy must be looked up. Both paths use `reading`, so their
responses are equal (tests/service/test_fast_path.py).
"""

__all__: list[str] = []
