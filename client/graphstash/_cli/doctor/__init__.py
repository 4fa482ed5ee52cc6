"""`graphstash doctor`: check everything between a job and its cache, and suggest fixes.

    command     the command line, and the order of the topics
    findings    what a check found, and how to fix it
    settings    the environment, and the keys that sign and verify artifacts
    server      name, connection, certificate, protocol, clock, readiness
    access      what the token grants; with `--probe` a lease
    local       this host's disk, and its last run
    compilers   their versions; with `--probe` a Python under `graphstash run` that imports them
    witness     what runs in that Python

A topic is a generator of findings. It returns what later topics need, or None. Every wait in a
topic has a limit. A topic yields findings for problems instead of raising exceptions.
"""
