"""The fast path: GET and HEAD of an artifact without a framework.

A job asks for each of its graphs once, so these two calls are nearly all of a server's load, and
routing, middlewares and models would cost ten times what the answer itself does. A connection
offers every request to this room first:

    answers       reads a request and makes its answer: at once, where everything is in memory
    connection    offers the requests, before they are parsed, and writes the answers: small ones in
                  one piece, files by sendfile(2)

It answers what it knows completely. Whatever is unusual (another path, a header that is not on its
list or comes twice, a head in several pieces, a caller or a policy that has to be looked up, a
request while another one is being answered) it leaves to the application, which gives the same
answer: rules and headers are those of `api`, and a suite of cases asks both ways and compares
(tests/service/test_fast_path.py). What it leaves is counted.
"""

__all__: list[str] = []
