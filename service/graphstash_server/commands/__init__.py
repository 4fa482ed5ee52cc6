"""Commands that administer a server.

Each command reads the same settings as `graphstash serve` and works on the same database and store,
also while servers run. Heavy imports happen only when a command runs, because the client's command
line loads these modules to list them.
"""

__all__: list[str] = []
