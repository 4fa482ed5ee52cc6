"""`python -m graphstash` is the `graphstash` command."""

from graphstash._cli.main import main

main()
