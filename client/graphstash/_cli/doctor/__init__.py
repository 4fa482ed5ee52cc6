"""`graphstash doctor`: checks everything between a job and its cache, and suggests fixes.

    command     the command line, and the order of the topics
    findings    what a check found, and how to fix it
    settings    the environment, and the keys that sign and verify artifacts
    server      name, connection, certificate, protocol, clock, readiness
    access      what the token grants; with `--probe` a lease
    local       this host's disk
    compilers   their versions; with `--probe` a Python under `graphstash run` that imports them
    witness     what runs in that Python

A topic is a generator of findings; it returns what later topics need, or None. It never waits
without a limit, and raises no exception for what it finds.
"""
