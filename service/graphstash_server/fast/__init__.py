"""The fast path: GET and HEAD of an artifact without a framework.

A job asks for each of its graphs once, so these two calls are nearly all of a server's load, and
routing, middlewares and models would cost ten times what the answer itself does. A connection
offers every request to this room first:

    answers       parses a request and renders the answer that `reading` decides
    connection    offers the requests, before they are parsed, and writes the answers: small ones in
                  one piece, files by sendfile(2)

The room leaves unusual requests to the application: another path, a header that is not on its list
or comes twice, a head in several pieces, a caller or a policy that has to be looked up, a request
while another one is being answered. It counts these requests by reason. The application asks
`reading` for the answer, so both transports give the same one
(tests/service/test_fast_path.py compares them).
"""

__all__: list[str] = []
