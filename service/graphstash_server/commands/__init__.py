"""Commands that administer a server.

They read the settings of `graphstash serve` and work on its database and store, also while servers
run. Functions do the slow imports, because every `graphstash` command loads these modules.
"""

__all__: list[str] = []
