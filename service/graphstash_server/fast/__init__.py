"""The fast path: GET and HEAD of an artifact without a framework.

A job requests each of its graphs once, so these two calls are nearly all of a server's load.
Routing, middlewares and models would cost ten times as much as the response itself. A connection
offers every request to this package first:

    answers       parses a request and renders the response that `reading` decides
    connection    offers the requests before they are parsed, and writes the responses: small ones
                  in one piece, files by sendfile(2)

The fast path leaves unusual requests to the application and counts them by reason. Unusual are
other paths, headers that `reading.headers` does not know, and heads in several pieces. So are
requests during another response, or whose caller or policy must be looked up. The application also
uses `reading`, so both paths give the same response (tests/service/test_fast_path.py compares
them).
"""

__all__: list[str] = []
