import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from functools import partial

import pytest
from reference import command_line

from graphstash._cli import launcher
from graphstash_schema.exit_status import MEANINGS, ExitStatus
from support import processes

graphstash = partial(processes.graphstash, COLUMNS="200", GRAPHSTASH_URL="none")


def test_run_passes_status_output_and_arguments_through(tmp_path):
    program = "import sys; print(sys.argv[1:]); sys.exit(7)"
    result = graphstash("run", "--", sys.executable, "-c", program, "--", "--url", "x y")
    assert result.returncode == 7
    assert result.stdout == "['--', '--url', 'x y']\n"
    assert result.stderr == ""


def test_what_follows_the_command_belongs_to_the_command():
    program = "import os, sys; print(sys.argv[1:], os.environ.get('GRAPHSTASH_JOB'))"
    result = graphstash("run", sys.executable, "-c", program, "--job", "mine", "-q", "--", "x")
    assert result.stdout == "['--job', 'mine', '-q', '--', 'x'] None\n"


def test_run_ends_with_the_signal_that_ended_the_command():
    result = graphstash("run", "--", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    assert result.returncode == -9


def test_run_hands_its_options_to_every_python_below(tmp_path):
    program = textwrap.dedent(
        """
        import os, subprocess, sys
        print(os.environ["GRAPHSTASH_NAMESPACE"], os.environ["GRAPHSTASH_URL"], flush=True)
        if len(sys.argv) == 1:
            subprocess.run(["sh", "-c", f"{sys.executable} {__file__} child"], check=True)
        """
    )
    (tmp_path / "script.py").write_text(program)
    result = graphstash(
        *("run", "--namespace", "team", "--url", "http://cache:1", "--"),
        *(sys.executable, tmp_path / "script.py"),
    )
    assert result.stdout.splitlines() == ["team http://cache:1"] * 2, result.stderr


def test_run_hands_lists_and_files_on_as_they_were_given(tmp_path):
    given = {
        "GRAPHSTASH_READ_NAMESPACES": "trusted,shared",
        "GRAPHSTASH_TRUSTED_KEYS": str(tmp_path / "keys.json"),
        "GRAPHSTASH_SIGNATURES": "prefer",
        "GRAPHSTASH_TOKEN_FILE": str(tmp_path / "token"),
    }
    program = f"import os; print(all(os.environ[k] == v for k, v in {given!r}.items()))"
    result = graphstash("run", "--", sys.executable, "-c", program, **given)
    assert result.stdout == "True\n", result.stderr


def test_run_keeps_the_users_own_sitecustomize_and_python_path(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    result = graphstash(
        *("run", "--", sys.executable, "-c"),
        "import sitecustomize, sys; print(sitecustomize.__file__); "
        "print(any('_process/autoload' in entry for entry in sys.path))",
        PYTHONPATH=str(tmp_path),
    )
    own = str(tmp_path / "sitecustomize.py")
    # graphstash itself, then it
    assert result.stdout.splitlines() == ["mine", "mine", own, "False"]
    assert result.stderr == ""


@pytest.mark.parametrize("path", ["", ":", ":/lib", "/lib:"])
def test_run_keeps_the_working_directory_on_a_path_that_has_it(tmp_path, path):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "train.py").write_text("import sys; print(sys.path)")
    program = [sys.executable, "jobs/train.py"]
    alone, run = (
        subprocess.check_output(
            [*before, *program], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, text=True
        )
        for before in ([], [sys.executable, "-P", "-m", "graphstash", "run", "--"])
    )
    assert run == alone
    assert (f"'{tmp_path}'" in run) is bool(path)


def test_a_python_without_graphstash_just_starts(tmp_path):
    program = (
        "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]; print(1)"
    )
    autoload = graphstash("run", "--", "printenv", "PYTHONPATH").stdout.split(os.pathsep)[0].strip()
    program = f"import sys; sys.path.insert(0, {autoload!r}); import sitecustomize; {program}"
    command = [sys.executable, "-S", "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout == "1\n"
    assert result.stderr == ""


JOB = "import graphstash, os; graphstash.install(); print('trained')"


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("URL", "cache", "expected http://host:port"),
        ("LOCAL_LIMIT", "banana", "it takes a size such as 500MB or 10GiB (0 or more)"),
        ("WAIT_SECONDS", "-1", "it takes a number (0 to 86,400)"),
        ("PUBLISH_QUEUE", "many", "it takes a whole number (1 to 4,096)"),
        ("READ_ONLY", "perhaps", "it takes true or false"),
        ("SIGNATURES", "always", "it takes require, prefer or off"),
        ("CACHE_DIR", "~nobody-here/x", "home directory"),
    ],
)
def test_run_starts_a_job_with_a_wrong_setting_which_the_job_names(variable, value, told):
    result = graphstash("run", "--", sys.executable, "-c", JOB, **{f"GRAPHSTASH_{variable}": value})
    assert (result.returncode, result.stdout) == (0, "trained\n")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"graphstash: disabled: GRAPHSTASH_{variable}='{value}': ")
    assert line.endswith("; the job runs without the cache")
    assert told in line


def test_a_job_names_what_it_ignores_once_in_all_its_processes():
    program = f"import subprocess, sys; {JOB}; len(sys.argv) > 1 or subprocess.run("
    program += "[sys.executable, '-c', sys.orig_argv[2], 'child'], check=True)"
    result = graphstash(
        *("run", "--", sys.executable, "-c", program),
        GRAPHSTASH_HOOKS="jax,jx",
        GRAPHSTASH_LOCAL_LIMITS="1GiB",
    )
    assert result.stdout == "trained\n" * 2
    hook, ignored = result.stderr.splitlines()
    assert "GRAPHSTASH_HOOKS: unknown hook jx, ignored; did you mean jax? Use inductor" in hook
    assert "GRAPHSTASH_LOCAL_LIMITS (did you mean GRAPHSTASH_LOCAL_LIMIT?)" in ignored


OPTIONS = {
    "--url": "http://cache:1",
    "--namespace": "team",
    "--job": "nightly",
    "--cache-dir": "/caches/x",
    "--stats-file": "/caches/y",
}


@pytest.mark.parametrize("is_light", [True, False], ids=["light", "whole"])
def test_run_reads_its_options_alike_with_and_without_the_whole_command_line(is_light, tmp_path):
    """What is not plainly right, such as a path with a space, takes the whole command line."""
    options = OPTIONS | ({} if is_light else {"--cache-dir": "/caches/x y"})
    program = (
        "import os; print({k: v for k, v in os.environ.items() if k.startswith('GRAPHSTASH_')})"
    )
    words = [word for pair in options.items() for word in pair]
    joined = [f"{option}={value}" for option, value in options.items()]
    for given in (words, joined):
        argv = ["run", *given, "--read-only", "-q", "--", sys.executable, "-c", program]
        assert (launcher.read(argv[1:]) is not None) == is_light
        settings = eval(graphstash(*argv, check=True).stdout)
        assert settings == {
            **{f"GRAPHSTASH_{k[2:].upper().replace('-', '_')}": v for k, v in options.items()},
            "GRAPHSTASH_READ_ONLY": "true" if is_light else "True",
            "GRAPHSTASH_SUMMARY": "false" if is_light else "False",
            "GRAPHSTASH_AUTOLOAD": "1",
        }


def test_run_imports_nothing_heavy_before_the_job():
    program = """
        import os, sys
        from graphstash import __main__
        def end(*_):
            heavy = {"typer", "rich", "pydantic", "httpx", "click", "argparse", "asyncio"}
            print(sorted(heavy & sys.modules.keys()), len(sys.modules))
            os._exit(0)
        os.execve = end
        sys.argv = ["graphstash", "run", "--url", "http://cache:8077", "--", "true"]
        sys.stdout.reconfigure(write_through=True)
        __main__.main()
    """
    heavy, modules = processes.python(program, check=True).stdout.rsplit(maxsplit=1)
    assert heavy == "[]"
    assert int(modules) < 150


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (("run",), 2, "write the command after `--`"),
        (("run", "--", "no-such-program"), 127, "not found on PATH"),
        (("run", "--namespace", "Team A", "--", "true"), 2, "[a-z0-9][a-z0-9._-]{0,63}"),
        (("run", "--url", "cache", "--", "true"), 2, "expected http://host:port"),
        (("status", "--url", "http://host:port"), 2, "expected http://host:port"),
        (("run", "--naemspace", "x", "--", "true"), 2, "No such option: --naemspace"),
        (("run", "--job"), 2, "requires an argument"),
        (("run", "--job=a/b", "true"), 2, "--job='a/b'"),
        (("run", "--", "/"), 127, "not found on PATH"),
        (("prefetch", "no/job"), 2, "manifest name 'no/job'"),
        (("ls", "--namespace", "Bad"), 2, "--namespace='Bad'"),
        (("ls", "--sort", "size", "--after", "x"), 2, "raise --limit"),
        (("ls", "--kind", "java"), 2, "'triton'"),
        (("show", "xyz"), 2, "write 4 to 64 of its characters"),
        (("show", "a/b"), 2, "is no key: write kind/device type/fingerprint"),
        (("export", "x", "--job", "a", "--local"), 2, "leave out --local"),
        (("export", "x", "--fingerprint", "X"), 2, "--fingerprint"),
        (("import", "no-such-file"), 3, "there is no such file; nothing was imported"),
        (("nothing",), 2, "No such command 'nothing'; see `graphstash --help`"),
        (("prefetch", "job"), 1, "error: set GRAPHSTASH_URL"),
    ],
)
def test_bad_input_gets_one_clear_line(arguments, status, told):
    result = graphstash(*arguments)
    assert result.returncode == status
    assert told in result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("graphstash: error: ")
    assert "Traceback" not in result.stderr


def test_status_without_a_server_says_what_to_do():
    result = graphstash("status", "--url", "http://127.0.0.1:9")
    assert result.returncode == 1
    assert "the server does not answer" in result.stderr
    assert "graphstash doctor" in result.stderr
    answer = json.loads(graphstash("status", "--url", "http://127.0.0.1:9", "--json").stdout)
    assert answer["reachable"] is False


def test_status_shows_a_server_to_people_and_to_scripts(server, tmp_path):
    result = graphstash("status", "--url", server.url, GRAPHSTASH_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert server.url in result.stdout
    assert str(tmp_path) in result.stdout
    command = ("status", "--url", server.url, "--json")
    answer = json.loads(graphstash(*command, GRAPHSTASH_CACHE_DIR=str(tmp_path)).stdout)
    assert answer["reachable"] is True
    assert answer["server"]["version"]
    assert answer["local"]["size_bytes"] == 0


def test_prefetch_of_a_job_that_nobody_ran_says_so(server, namespace):
    result = graphstash("prefetch", "job", "--url", server.url, "--namespace", namespace)
    assert result.returncode == 1
    assert "no artifacts are remembered for job 'job'" in result.stderr


def test_a_file_that_cannot_be_used_gets_one_clear_line(tmp_path):
    absent = str(tmp_path / "absent")
    for variable in ("GRAPHSTASH_CA_FILE", "GRAPHSTASH_TRUSTED_KEYS"):
        for command in (("status",), ("prefetch", "job")):
            result = graphstash(*command, **{variable: absent})
            assert result.returncode == 2
            assert absent in result.stderr
            assert "Traceback" not in result.stderr


@pytest.mark.parametrize("width", ["60", "80", "100"])
def test_help_fills_its_paragraphs_and_names_defaults(width):
    told = graphstash("serve", "--help", COLUMNS=width).stdout
    flat = " ".join(told.replace("│", " ").split())
    assert "[default: 8077]" in flat
    assert "[default: tokens]" in flat
    assert "(8077)" not in flat
    lines = [each.strip() for each in told.partition("Options")[0].splitlines()]
    for first, second in itertools.pairwise(lines):  # a line ends early only where a paragraph does
        word = second.split(" ")[0]
        assert not second or not first or len(first) + 1 + len(word) > int(width) - 3


def test_no_help_has_markup_that_a_terminal_would_swallow():
    """Help is Markdown: `<scope>` outside of backticks is HTML there, and is not shown."""
    commands = [command_line()]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
        for told in (command.help, *(getattr(each, "help", "") for each in command.params)):
            assert "<" not in re.sub(r"`[^`]*`", "", told or "")


def test_the_help_groups_every_command_and_names_every_exit_status():
    told = graphstash("--help").stdout
    panels = [line for line in told.splitlines() if line.startswith("╭")]
    assert [panel.strip("╭─╮ ") for panel in panels] == [
        *("Options", "Jobs", "The server and its artifacts", "Administration")
    ]
    for command in command_line().commands:
        assert re.search(rf"^│ {command} ", told, re.MULTILINE)
    for status, meaning in MEANINGS.items():
        assert f"{status.value}: {meaning.replace('`', '')}" in told


def test_every_option_and_argument_is_explained_in_a_sentence():
    commands = [("graphstash", command_line())]
    for path, command in commands:
        commands += [(f"{path} {n}", each) for n, each in getattr(command, "commands", {}).items()]
        for parameter in command.params:
            if not getattr(parameter, "hidden", False) and parameter.name != "help":
                told = (parameter.help or "").partition(" [default: ")[0]
                assert told.endswith("."), f"{path} {parameter.name}"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_options_and_values(shell):
    words = "graphstash ls --kind tri"
    asked = {"_GRAPHSTASH_COMPLETE": f"complete_{shell}", "COMP_WORDS": words, "COMP_CWORD": "3"}
    asked |= {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    result = processes.python(
        "import sys; sys.argv = ['graphstash']; from graphstash.__main__ import main; main()",
        **asked,
    )
    assert "triton" in result.stdout
    assert "jax" not in result.stdout


def test_the_completion_of_a_shell_is_shown():
    command = f"{sys.executable} -m graphstash --show-completion; exit $?"
    told = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert "complete -o default -F _graphstash_completion graphstash" in told.stdout


@contextmanager
def ended(process):
    """Kills a process at the end if it still runs."""
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def test_an_interrupted_command_ends_with_its_status(server, tmp_path):
    """Ctrl-C while a server does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        command = [sys.executable, "-m", "graphstash", "ls", "--url"]
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = {"GRAPHSTASH_FIRST_BYTE_SECONDS": "60", "GRAPHSTASH_CACHE_DIR": str(tmp_path)}
        process = subprocess.Popen(
            [*command, url], env=os.environ | settings, stderr=subprocess.PIPE, text=True
        )
        connection, _ = silent.accept()
        with connection, ended(process), connection.makefile("rb") as request:
            while request.readline() not in {b"\r\n", b""}:
                pass
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=60)
    assert process.returncode == ExitStatus.INTERRUPTED
    assert "Traceback" not in told


def test_help_imports_no_searchers_and_names_them():
    code = """
        import contextlib, io, sys
        from graphstash.__main__ import main

        for argv in (["--help"], ["tune", "search", "--help"]):
            sys.argv = ["graphstash", *argv]
            with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as told:
                main()
        imported = [name for name in sys.modules if name.startswith("graphstash.tuning")]
        from graphstash.tuning import SEARCHERS
        print(imported, [name for name in SEARCHERS if name not in told.getvalue()])
    """
    assert processes.python(code, check=True).stdout.strip() == "[] []"


def test_a_job_starts_without_the_rest_of_the_command_line():
    """What `run` imports before its command takes its place."""
    code = """
        import os, sys

        def stop(*_):
            heavy = {"typer", "rich", "click", "pydantic", "httpx"} & set(sys.modules)
            print(sorted(heavy), len(sys.modules))
            os._exit(0)

        os.execve = stop
        sys.argv = ["graphstash", "run", "--", "true"]
        from graphstash.__main__ import main
        main()
    """
    heavy, count = processes.python(code, check=True).stdout.rsplit(maxsplit=1)
    assert heavy == "[]"
    assert int(count) < 150


def test_a_wrong_setting_never_stops_a_job(tmp_path):
    program = "import graphstash; print(graphstash.install()); print(graphstash.stats().hits)"
    result = processes.python(program, GRAPHSTASH_WAIT_SECONDS="soon")
    assert result.stdout.split() == ["None", "0"]
    assert "GRAPHSTASH_WAIT_SECONDS='soon'" in result.stderr


def test_without_a_home_a_job_runs_all_the_same():
    program = "import graphstash; graphstash.install(); print('trained')"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HOME", "XDG"))}
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"GRAPHSTASH_CACHE_DIR": "~nobody-here/x"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout == "trained\n"
    assert "GRAPHSTASH_CACHE_DIR" in result.stderr
