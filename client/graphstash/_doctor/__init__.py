"""`graphstash doctor`: looks at everything that stands between a job and its cache, and says what
to do about what is wrong.

    command       the command line; the only part that prints
    examination   every topic in order; what depends on a failed one is not tried
    findings      what a check found, and what to do about it
    settings      what the environment sets, and what it seems to mean
    server        name, connection, protocol, readiness
    tls clock     the server's certificate, and its time beside this host's
    wire          one connection to the server, below what jobs see of it
    access        what the token lets this job do
    local         this host's disk
    signatures    the keys that decide what may reach a compiler
    compilers     which hooks have a compiler here, in versions that they know
    probe         with `--probe`: a real Python under `graphstash run`, and a lease
    witness       what runs in that Python

A topic is a generator of findings; its return value is what later topics build on, or None. It
never waits without a bound, and nothing that it finds is an exception.
"""
