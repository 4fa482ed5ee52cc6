"""Commands that administer a server: each reads the same settings as `graphstash serve` and works
on the same database and store, also while servers run.

Everything heavy is imported when a command runs: the client's command line loads these modules only
to list them.
"""

__all__: list[str] = []
