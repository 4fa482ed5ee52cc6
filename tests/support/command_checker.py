"""Check calls of a program in snippets that cannot run here.

    python command_checker.py <program> <arguments>

The real command line parses graphstash's own commands. Named files must exist in the page's
directory or in the repository, and named services in the compose files.
"""

import re
import sys
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]

_UNCHECKED = ("cat", "cp", "curl", "mkdir", "openssl", "scp", "sed", "ssh", "systemctl", "watch")
_WRAPPERS = ("env", "srun", "sudo", "time")
_LAUNCHERS = ("accelerate", "python", "torchrun")
PROGRAMS = (
    "docker",
    "graphstash",
    "helm",
    "kubectl",
    "make",
    "pip",
    *_UNCHECKED,
    *_WRAPPERS,
    *_LAUNCHERS,
)

_DOCKER_COMMANDS = ("build", "compose", "image", "pull", "push", "run", "tag", "volume")
_COMPOSE_COMMANDS = ("config", "cp", "down", "exec", "logs", "ps", "pull", "restart", "run", "up")
# Options of docker compose that take a value.
_WITH_VALUE = (
    "--file",
    "--volume",
    "-f",
    "--profile",
    "--env-file",
    "--project-name",
    "-p",
    "--scale",
    "--env",
)


def check(program, *arguments):
    """Exit with a message if this call cannot be right."""
    if program not in PROGRAMS:
        raise SystemExit(f"{program}: not a program that the checker knows")
    checks = {
        "graphstash": _graphstash,
        "docker": _docker,
        "helm": _helm,
        "kubectl": _kubectl,
        "make": _make,
    }
    if program in checks:
        checks[program](arguments)
    elif program == "pip" and arguments[:1] != ("install",):
        raise SystemExit("pip: only `pip install` is expected")
    elif program in _WRAPPERS:
        rest = list(arguments)
        while rest and (rest[0].startswith("-") or "=" in rest[0]):
            rest.pop(0)
        check(*rest)
    elif program in _LAUNCHERS:
        _launcher(program, arguments)


def _graphstash(arguments):
    from reference import command_line

    command, path, rest = command_line(), "graphstash", list(arguments)
    while hasattr(command, "commands"):
        if not rest or rest[0] not in command.commands:
            if rest and rest[0] in ("--version", "--help"):
                return
            raise SystemExit(f"{path} has no command {' '.join(rest[:1])!r}")
        path = f"{path} {rest[0]}"
        command = command.commands[rest.pop(0)]
    try:
        context = command.make_context(path, rest)
    except Exception as error:
        raise SystemExit(f"{path}: {getattr(error, 'message', '') or error}") from None
    if path == "graphstash run":
        check(*context.args)


def _docker(arguments):
    if not arguments or arguments[0] not in _DOCKER_COMMANDS:
        raise SystemExit(f"docker: unexpected command {' '.join(arguments[:1])!r}")
    if arguments[0] in ("build", "compose"):
        for option, value in pairwise(arguments):
            if option in ("--file", "-f", "--env-file"):
                _must_exist("docker", value)
    if arguments[0] == "compose":
        _compose(list(arguments[1:]))


def _compose(words):
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option in _WITH_VALUE:
            words.pop(0)
    if not words or words[0] not in _COMPOSE_COMMANDS:
        raise SystemExit(f"docker compose: unexpected command {' '.join(words[:1])!r}")
    command = words.pop(0)
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option in _WITH_VALUE:
            words.pop(0)
    if command not in ("exec", "run"):
        named, inner = [word for word in words if not word.startswith("-")], []
    else:
        named, inner = words[:1], words[1:]
    known = set()
    for path in (ROOT / "docker").glob("compose*.yaml"):
        known |= set(re.findall(r"^  ([\w-]+):$", path.read_text(), re.MULTILINE))
    if unknown := set(named) - known:
        raise SystemExit(f"docker compose {command}: no service {', '.join(sorted(unknown))}")
    if inner[:1] == ["graphstash"]:
        check(*inner)


def _kubectl(arguments):
    if "--" in arguments:
        check(*arguments[arguments.index("--") + 1 :])


def _helm(arguments):
    if arguments[:1] not in (("install",), ("upgrade",)):
        raise SystemExit(f"helm: unexpected command {arguments[:1]}")
    if not (ROOT / arguments[2] / "Chart.yaml").is_file():
        raise SystemExit(f"helm: {arguments[2]} is no chart")
    for option, value in pairwise(arguments):
        if option == "--values" and not Path(value).is_file():
            raise SystemExit(f"helm: the page has no file {value}")


def _make(arguments):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for word in arguments:
        if "=" not in word and not word.startswith("-") and word not in targets:
            raise SystemExit(f"make: no target {word!r}")


def _launcher(program, arguments):
    if program == "python" and arguments[:2] == ("-m", "graphstash"):
        _graphstash(arguments[2:])
        return
    script = next((word for word in arguments if word.endswith(".py")), None)
    if script is not None:
        _must_exist(program, script)


def _must_exist(program, name):
    if not Path(name).exists() and not (ROOT / name).exists():
        raise SystemExit(f"{program}: there is no file {name}")


def main():
    sys.path.insert(0, str(ROOT / "docs" / "tools"))
    check(*sys.argv[1:])


if __name__ == "__main__":
    main()
