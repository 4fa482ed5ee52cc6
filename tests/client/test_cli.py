"""The command line: how `graphstash run` starts a job, and how commands report errors."""

import ast
import json
import os
import re
import signal
import socket
import subprocess
import sys
import venv
from functools import partial
from pathlib import Path

import httpx
import pytest
from reference import command_line

from graphstash_schema.exit_status import MEANINGS, ExitStatus
from support import processes
from support.server import Server
from support.waiting import PATIENT_VARIABLES, until

graphstash = partial(processes.graphstash, COLUMNS="200", GRAPHSTASH_URL="none")
here = partial(processes.graphstash_here, COLUMNS="200", GRAPHSTASH_URL="none")


def run(program, *arguments, **variables):
    """Run a Python program under `graphstash run`."""
    return graphstash("run", "--", sys.executable, "-c", program, *arguments, **variables)


def test_run_passes_status_output_and_all_arguments_after_the_command_through():
    program = "import os, sys; print(sys.argv[1:], os.environ.get('GRAPHSTASH_JOB')); sys.exit(7)"
    words = ("--job", "mine", "-q", "--", "x y")
    for separator in (("--",), ()):
        result = graphstash("run", *separator, sys.executable, "-c", program, *words)
        assert result.returncode == 7
        assert result.stdout == f"{[*words]} None\n"
        assert result.stderr == ""


def test_run_ends_with_the_signal_that_ended_the_command():
    assert run("import os; os.kill(os.getpid(), 9)").returncode == -9


def test_run_keeps_the_users_own_sitecustomize_and_python_path(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    result = run(
        "import sitecustomize, sys; print(sitecustomize.__file__); "
        "print(any('_process/autoload' in entry for entry in sys.path))",
        PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    )
    own = str(tmp_path / "sitecustomize.py")
    # graphstash prints one line itself, and the job prints the second.
    assert result.stdout.splitlines() == ["mine", "mine", own, "False"]
    assert result.stderr == ""


@pytest.mark.parametrize("path", ["", ":/lib"])
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


def test_python_without_graphstash_starts_normally():
    autoload = graphstash("run", "--", "printenv", "PYTHONPATH").stdout.split(os.pathsep)[0].strip()
    program = f"import sys; sys.path.insert(0, {autoload!r}); import sitecustomize; print(1)"
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False
    )
    assert (result.stdout, result.stderr) == ("1\n", "")


@pytest.mark.parametrize("options", [(), ("--fail-on-miss",)])
def test_run_names_the_python_of_the_command_if_it_lacks_graphstash(tmp_path, options):
    venv.create(tmp_path)
    python = str(tmp_path / "bin/python")
    child = f"import subprocess; subprocess.run([{python!r}, '-c', '']); print(1)"
    result = graphstash("run", *options, "--", python, "-c", child)
    said = f"graphstash: {python} cannot import graphstash: "
    assert (result.stdout, result.stderr.count(said)) == ("1\n", 1)
    assert graphstash("run", *options, "--", sys.executable, "-c", child).stderr == ""


JOB = "import graphstash, os; graphstash.install(); print('trained')"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [("URL", "cache", "expected http://host:port"), ("CACHE_DIR", "~nobody-here/x", "home")],
)
def test_job_with_invalid_setting_runs_without_cache_and_names_setting(variable, value, message):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HOME", "XDG"))}
    result = subprocess.run(
        [sys.executable, "-c", JOB],
        env=environment | {f"GRAPHSTASH_{variable}": value},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "trained\n"
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"graphstash: disabled: GRAPHSTASH_{variable}='{value}': ")
    assert line.endswith("; the job runs without the cache")
    assert message in line


def test_ignored_settings_are_logged_once_by_all_processes_of_a_job():
    program = f"import subprocess, sys; {JOB}; len(sys.argv) > 1 or subprocess.run("
    program += "[sys.executable, '-c', sys.orig_argv[2], 'child'], check=True)"
    result = run(program, GRAPHSTASH_HOOKS="jax,jx", GRAPHSTASH_LOCAL_LIMITS="1GiB")
    assert result.stdout == "trained\n" * 2
    hook, ignored = result.stderr.splitlines()
    assert "GRAPHSTASH_HOOKS: unknown hook jx, ignored; did you mean jax? Use inductor" in hook
    assert "GRAPHSTASH_LOCAL_LIMITS (did you mean GRAPHSTASH_LOCAL_LIMIT?)" in ignored


OPTIONS = {
    "--url": "http://cache:1",
    "--namespace": "team",
    "--job": "nightly",
    "--cache-dir": "/caches/x y",
    "--stats-file": "/caches/y",
}
GIVEN = {
    "GRAPHSTASH_READ_NAMESPACES": "trusted,shared",
    "GRAPHSTASH_TRUSTED_KEYS": "/team/keys.json",
    "GRAPHSTASH_SIGNATURES": "prefer",
    "GRAPHSTASH_TOKEN_FILE": "/team/token",
}
"""Variables that point to lists and files, which a job inherits unchanged."""


@pytest.mark.parametrize("entry", ["__main__", "_cli.main"])
def test_fast_and_full_command_line_parse_run_options_alike(entry):
    program = (
        "import os; print({k: v for k, v in os.environ.items() if k.startswith('GRAPHSTASH_')})"
    )
    (option, value), *others = OPTIONS.items()
    given = [option, value, *(f"{option}={value}" for option, value in others)]
    argv = ["run", *given, "--read-only", "-q", "--", sys.executable, "-c", program]
    run = f"import sys, graphstash.{entry} as it; sys.argv[0] = 'graphstash'; it.main()"
    settings = ast.literal_eval(processes.python(run, *argv, check=True, **GIVEN).stdout)
    assert settings == {
        **{f"GRAPHSTASH_{k[2:].upper().replace('-', '_')}": v for k, v in OPTIONS.items()},
        **GIVEN,
        "GRAPHSTASH_READ_ONLY": "true",
        "GRAPHSTASH_SUMMARY": "false",
        "GRAPHSTASH_AUTOLOAD": "1",
    }


_SLOW = {"httpx", "filelock", "cryptography", "graphstash_schema.model", "graphstash_server"}
"""Modules that take as long to import as a command that only rejects its arguments."""


@pytest.mark.untraced
def test_run_imports_nothing_heavy_before_the_job():
    program = """
        import os, sys
        from graphstash import __main__
        def end(*_):
            heavy = {"typer", "rich", "pydantic", "httpx", "click", "argparse", "asyncio"}
            print(sorted(heavy & sys.modules.keys()), len(sys.modules), flush=True)
            os._exit(0)
        os.execve = end
        sys.argv = ["graphstash", "run", "--url", "http://cache:8077", "--", "true"]
        __main__.main()
    """
    heavy, modules = processes.python(program, check=True).stdout.rsplit(maxsplit=1)
    assert heavy == "[]"
    assert int(modules) < 150


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        (("--version",), {"typer", "rich", "pydantic", *_SLOW}),
        (("--help",), {"pydantic", *_SLOW}),
        (("--nope",), {"rich", "pydantic", *_SLOW}),
        (("no-such-command",), {"rich", *_SLOW}),  # typer reads the options by pydantic
    ],
)
def test_start_imports_only_what_the_command_line_needs(arguments, unwanted):
    program = f"""
        import sys
        from graphstash.__main__ import main
        try:
            main()
        finally:
            print(sorted({unwanted} & sys.modules.keys()), file=sys.stderr)
    """
    result = processes.python(program, *arguments)
    assert result.stderr.splitlines()[-1] == "[]"


def test_the_list_of_commands_repeats_the_first_sentences_of_their_help():
    """`graphstash --help` imports no command, so `main` repeats the first sentences."""
    for name, command in command_line().commands.items():
        assert command.short_help, name
        said = command.help.replace("`", "").partition("\n\n")[0].replace("\n", " ")
        assert said.startswith(command.short_help), name


def test_server_options_are_listed_without_the_packages_of_a_server():
    program = """
        import sys
        sys.modules |= dict.fromkeys(("pydantic_settings", "platformdirs", "sqlalchemy", "fastapi"))
        from graphstash.__main__ import main
        main()
    """
    assert "--min-free-bytes" in processes.python(program, "serve", "--help", check=True).stdout
    refused = processes.python(program, "serve", "--port", "0")
    assert refused.returncode == 1
    assert "`serve` needs the server's packages" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("run",), 2, "write the command after `--`"),
        (("run", "--", "no-such-program"), 127, "not found on PATH"),
        (("run", "--namespace", "Team A", "--", "true"), 2, "[a-z0-9][a-z0-9._-]{0,63}"),
        (("status", "--url", "http://host:port"), 2, "expected http://host:port"),
        (("run", "--naemspace", "x", "--", "true"), 2, "No such option: --naemspace"),
        (("run", "--job"), 2, "requires an argument"),
        (("run", "--job=a/b", "true"), 2, "--job='a/b'"),
        (("prefetch", "no/job"), 2, "error: job name 'no/job'"),
        (("ls", "--namespace", "Bad"), 2, "--namespace='Bad'"),
        (("ls", "--sort", "hits", "--after", "x"), 2, "raise --limit"),
        (("ls", "--kind", "java"), 2, "'triton'"),
        (("ls", "--limit", "-1"), 2, "'--limit': '-1' should be greater than or equal to 0; see"),
        (("ls", "--limit", "x"), 2, "'--limit': 'x' should be a valid integer; see"),
        (("show", "xyz"), 2, "write its first 4 to 64 characters"),
        (("show", "a/b"), 2, "is not a key: write kind/device type/fingerprint"),
        (("export", "x", "--job", "a", "--local"), 2, "leave out --local"),
        (("export", "x", "--fingerprint", "X"), 2, "--fingerprint"),
        (("import", "no-such-file"), 1, "no-such-file: No such file or directory; nothing was"),
        (("import", "/"), 1, "/: Is a directory; nothing was imported"),
        (("import", __file__), 3, "not a bundle of graphstash"),
        (("export", "/no-such/file"), 1, "/no-such/file: there is no directory /no-such\n"),
        (("nothing",), 2, "No such command 'nothing'; see `graphstash --help`"),
        (("lss",), 2, "No such command 'lss'. Did you mean 'ls'? See `graphstash --help`"),
        (("prefetch", "job"), 1, "error: set GRAPHSTASH_URL"),
        (("status", "--url", "http://127.0.0.1:9"), 1, "does not answer"),
        (("prefetch", "job", "--url", "http://127.0.0.1:9"), 1, ":9: Connection refused; `g"),
        (("keys", "trust", "x"), 2, "no trusted-keys file: set GRAPHSTASH_TRUSTED_KEYS"),
    ],
)
def test_bad_input_is_reported_in_one_line(tmp_path, arguments, status, message):
    result = here(*arguments, GRAPHSTASH_CACHE_DIR=tmp_path)
    assert (result.returncode, result.stdout) == (status, "")
    assert message in result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("graphstash: error: ")


@pytest.mark.parametrize(
    ("options", "program", "status", "reason"),
    [
        ((), "/", 126, "Permission denied"),
        (("--fail-on-miss",), "/etc/passwd", 126, "Permission denied"),
        (("--fail-on-miss",), "/no-such/program", 127, "No such file or directory"),
    ],
)
def test_run_distinguishes_an_unexecutable_program_from_a_missing_one(
    options, program, status, reason
):
    result = graphstash("run", *options, "--", program)
    assert (result.returncode, result.stdout) == (status, "")
    assert result.stderr == f"graphstash: error: {program}: {reason}\n"


@pytest.mark.parametrize("variable", ["GRAPHSTASH_CA_FILE", "GRAPHSTASH_TRUSTED_KEYS"])
def test_unusable_file_is_named_by_a_process_that_ends_with_the_status_of_usage(tmp_path, variable):
    result = graphstash("status", **{variable: tmp_path / "absent"})
    assert (result.returncode, result.stdout) == (ExitStatus.USAGE, "")
    assert result.stderr.startswith("graphstash: error: ")
    assert result.stderr.count("\n") == 1
    assert str(tmp_path / "absent") in result.stderr


@pytest.mark.parametrize("arguments", [("--version",), ("show", "--help"), ("status", "--json")])
def test_command_that_cannot_write_its_output_reports_the_reason(server, arguments):
    settings = os.environ | PATIENT_VARIABLES | {"GRAPHSTASH_URL": server.url}
    command = [sys.executable, "-m", "graphstash", *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, env=settings, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == ExitStatus.FAILED
    assert done.stderr == "graphstash: error: standard output: No space left on device\n"


@pytest.mark.parametrize("arguments", [("--version",), ("show", "--help"), ("status", "--json")])
def test_command_ends_like_other_tools_if_its_output_has_no_reader(server, arguments):
    settings = PATIENT_VARIABLES | {"GRAPHSTASH_URL": server.url}
    status, errors = processes.graphstash_unread(*arguments, **settings)
    assert (status, errors) == (-signal.SIGPIPE, "")


@pytest.mark.parametrize("arguments", [("status",), ("keys", "list"), ("doctor",)])
def test_misspelled_setting_is_reported_once_by_every_command(tmp_path, arguments):
    settings = {"GRAPHSTASH_NAMESPCE": "x", "GRAPHSTASH_CACHE_DIR": tmp_path}
    result = graphstash(*arguments, **settings, GRAPHSTASH_DATA_DIR="/of/a/server")
    output = result.stdout + result.stderr
    assert output.count("did you mean GRAPHSTASH_NAMESPACE?") == 1
    assert ("/of/a/server" in output) is False
    assert ("GRAPHSTASH_DATA_DIR" in output) is (arguments == ("doctor",))


def test_status_shows_a_server_to_people_and_to_scripts(server, tmp_path):
    settings = {"GRAPHSTASH_CACHE_DIR": tmp_path, **PATIENT_VARIABLES}
    result = here("status", "--url", server.url, **settings)
    assert result.returncode == 0, result.stderr
    assert server.url in result.stdout
    assert str(tmp_path) in result.stdout
    answer = json.loads(here("status", "--url", server.url, "--json", **settings).stdout)
    assert answer["reachable"] is True
    assert answer["server"]["version"]
    assert answer["local"]["size_bytes"] == 0
    result = here("prefetch", "job", "--url", server.url, **settings)
    assert result.returncode == 1
    assert "no run recorded artifacts of the job 'job'" in result.stderr


def test_status_shows_the_limit_of_the_store_and_calls_downloads_so(tmp_path):
    with Server(tmp_path / "server", GRAPHSTASH_STORE_LIMIT_BYTES="1073741824") as server:
        used = {"keys": [{"kind": "jax", "device_type": "cpu", "fingerprint": "a" * 64}]}
        assert httpx.put(f"{server.url}/v1/default/manifests/job", json=used).is_success
        settings = {"GRAPHSTASH_CACHE_DIR": tmp_path / "tier", **PATIENT_VARIABLES}
        shown = here("status", "--url", server.url, **settings).stdout
    assert "downloads" in shown
    assert not re.search(r"\bhits?\b", shown), shown
    assert re.search(r"^store: .* of at most 1(\.0)? GiB$", shown, re.MULTILINE), shown


def all_commands():
    """Return every command with its path, groups included."""
    commands = [("graphstash", command_line())]
    for path, command in commands:
        commands += [(f"{path} {n}", each) for n, each in getattr(command, "commands", {}).items()]
    return commands


def test_help_of_every_option_is_a_sentence_without_markup_that_a_terminal_hides():
    """Help is Markdown, where `<scope>` outside backticks is HTML and disappears."""
    for path, command in all_commands():
        assert "<" not in re.sub(r"`[^`]*`", "", command.help or ""), path
        for parameter in command.params:
            help_text = getattr(parameter, "help", "") or ""
            assert "<" not in re.sub(r"`[^`]*`", "", help_text), path
            if not getattr(parameter, "hidden", False) and parameter.name != "help":
                assert help_text.partition(" [default: ")[0].endswith("."), (
                    f"{path} {parameter.name}"
                )


def test_the_help_groups_every_command_and_names_every_exit_status():
    output = here("--help").stdout
    panels = [line for line in output.splitlines() if line.startswith("╭")]
    assert [panel.strip("╭─╮ ") for panel in panels] == [
        *("Options", "Jobs", "The server and its artifacts", "Administration")
    ]
    for command in command_line().commands:
        assert re.search(rf"^│ {command} ", output, re.MULTILINE)
    for status, meaning in MEANINGS.items():
        assert f"{status.value}: {meaning.replace('`', '')}" in output


def test_a_shell_completes_commands_options_and_values():
    words = "graphstash ls --kind tri"
    asked = {"_GRAPHSTASH_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "3"}
    result = processes.python(
        "import sys; sys.argv = ['graphstash']; from graphstash.__main__ import main; main()",
        **asked,
    )
    assert "triton" in result.stdout
    assert "jax" not in result.stdout


_WAITING = {"7", "45", "271"}
"""Numbers of poll, recvfrom and ppoll on x86-64."""


def test_an_interrupted_command_ends_with_its_status(tmp_path):
    """The user presses Ctrl-C while the server does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        command = [sys.executable, "-m", "graphstash", "ls", "--url"]
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = {"GRAPHSTASH_FIRST_BYTE_SECONDS": "60", "GRAPHSTASH_CACHE_DIR": str(tmp_path)}
        process = subprocess.Popen(
            [*command, url], env=os.environ | settings, stderr=subprocess.PIPE, text=True
        )
        connection, _ = silent.accept()
        with process, connection, connection.makefile("rb") as request:
            try:
                while request.readline() not in {b"\r\n", b""}:
                    pass
                # Python may miss a signal that arrives between its last check and the wait.
                calls = Path(f"/proc/{process.pid}/syscall")
                until(lambda: calls.read_text().split()[0] in _WAITING)
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate(timeout=60)
            finally:
                process.kill()
    assert process.returncode == ExitStatus.INTERRUPTED
    assert "Traceback" not in errors


def test_help_names_searchers_without_importing_them():
    code = """
        import contextlib, io, sys
        from graphstash.__main__ import main

        for argv in (["--help"], ["tune", "search", "--help"]):
            sys.argv = ["graphstash", *argv]
            with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as text:
                main()
        imported = [name for name in sys.modules if name.startswith("graphstash.tuning")]
        from graphstash.tuning import SEARCHERS
        print(imported, [name for name in SEARCHERS if name not in text.getvalue()])
    """
    assert processes.python(code, check=True).stdout.strip() == "[] []"
