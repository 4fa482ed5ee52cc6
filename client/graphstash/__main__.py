"""Entry point of the `graphstash` command and of `python -m graphstash`.

The full command line is imported only when needed: the usual command is `run`, which must start its
job quickly.
"""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the `graphstash` command."""
    if sys.argv[1:2] == ["--version"]:
        from graphstash import __version__
        from graphstash._cli.pipe import piped

        with piped():
            print(f"graphstash {__version__}")
        return
    if sys.argv[1:2] == ["run"]:
        from graphstash._cli import launcher

        if (launch := launcher.read(sys.argv[2:])) is not None:
            try:
                launch.start()
            except launcher.CannotRunError as error:
                from graphstash_schema.exit_status import error_line

                print(error_line(str(error)), file=sys.stderr)
                sys.exit(error.status)
    from graphstash._cli.main import main as command_line

    command_line()


if __name__ == "__main__":
    main()
