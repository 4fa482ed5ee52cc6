"""`python -m graphstash` is the `graphstash` command."""

from graphstash._cli import main

main()
