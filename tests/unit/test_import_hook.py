import subprocess
import sys
import textwrap

import pytest


def run(tmp_path, program, **files):
    for name, content in files.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(content))
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_action_runs_once_after_the_module_and_leaves_its_loader_alone(tmp_path):
    result = run(
        tmp_path,
        """
        import sys
        from graphstash.hooks.import_hook import when_imported
        finders = len(sys.meta_path)
        when_imported("compiler", lambda: print("installed", sys.modules["compiler"].ready))
        import compiler, compiler
        print(type(compiler.__loader__).__name__, type(compiler.__spec__.loader).__name__)
        assert len(sys.meta_path) == finders
        """,
        compiler="print('executing'); ready = True",
    )
    assert result.stdout.splitlines() == [
        "executing",
        "installed True",
        "SourceFileLoader SourceFileLoader",
    ], result.stderr


def test_a_failing_action_does_not_fail_the_import(tmp_path):
    result = run(
        tmp_path,
        """
        from graphstash.hooks.import_hook import when_imported
        when_imported("compiler", lambda: 1 / 0)
        import compiler
        print(compiler.value)
        """,
        compiler="value = 3",
    )
    assert result.stdout == "3\n"
    assert "cannot install the hook" in result.stderr


def test_a_module_that_is_absent_stays_absent(tmp_path):
    result = run(
        tmp_path,
        """
        from graphstash.hooks.import_hook import when_imported
        when_imported("compiler", lambda: print("never"))
        try:
            import compiler
        except ModuleNotFoundError as error:
            print(error.name)
        """,
    )
    assert result.stdout == "compiler\n", result.stderr


def test_waiting_for_a_compiler_costs_no_import(tmp_path):
    result = run(
        tmp_path,
        """
        import sys
        from graphstash.hooks import HOOKS, install_when_needed
        install_when_needed(HOOKS, print)
        heavy = {"pydantic", "httpx", "zstandard", "torch", "torch_xla", "typer", "rich"}
        print(sorted(heavy & set(sys.modules)))
        """,
    )
    assert result.stdout == "[]\n", result.stderr


def test_a_library_that_only_asks_whether_the_compiler_is_there_does_not_use_the_hook_up(tmp_path):
    result = run(
        tmp_path,
        """
        import importlib.util
        from graphstash.hooks.import_hook import when_imported
        when_imported("compiler", lambda: print("installed"))
        assert importlib.util.find_spec("compiler").origin.endswith("compiler.py")
        assert importlib.util.find_spec("compiler") is not None
        import compiler
        """,
        compiler="",
    )
    assert result.stdout == "installed\n", result.stderr


def test_a_module_that_is_just_being_imported_is_waited_for(tmp_path):
    result = run(
        tmp_path,
        """
        import compiler
        print(type(compiler.__spec__).__name__, compiler.__spec__._initializing)
        """,
        compiler="import library; ready = True",
        library="""
        import sys
        from graphstash.hooks import HOOKS, install_when_needed
        from graphstash.hooks.import_hook import when_imported

        def act(name):
            print(name, sys.modules["compiler"].ready)

        HOOKS["first"] = HOOKS["second"] = ("compiler",)
        install_when_needed(["first", "second"], act)
        when_imported("compiler", lambda: 1 / 0)
        """,
    )
    assert result.stdout.splitlines() == ["first True", "second True", "ModuleSpec False"]
    assert result.stderr.count("cannot install the hook") == 1


def test_a_module_whose_import_fails_gets_no_hook(tmp_path):
    result = run(
        tmp_path,
        """
        try:
            import compiler
        except ImportError as error:
            print(error)
        """,
        compiler="import library; raise ImportError('no device')",
        library="""
        from graphstash.hooks.import_hook import when_imported
        when_imported("compiler", lambda: print("installed"))
        """,
    )
    assert result.stdout == "no device\n", result.stderr


def test_what_is_to_begin_does_so_before_the_module_and_cannot_fail_it(tmp_path):
    result = run(
        tmp_path,
        """
        import importlib.util
        from graphstash.hooks.import_hook import when_imported
        when_imported("compiler", lambda: print("installed"), begun=lambda: print("begun"))
        when_imported("compiler", lambda: print("also"), begun=lambda: 1 / 0)
        print(importlib.util.find_spec("compiler") is not None)
        import compiler
        """,
        compiler="print('executing')",
    )
    assert sorted(result.stdout.splitlines()[3:]) == ["also", "installed"], result.stderr
    assert result.stdout.splitlines()[:3] == ["True", "begun", "executing"]


def test_what_is_missing_for_graphstash_does_not_fail_the_import_of_a_compiler(tmp_path):
    result = run(
        tmp_path,
        """
        import os
        os.environ["GRAPHSTASH_AUTOLOAD"] = "1"
        import triton
        from graphstash._entry_points import load
        load()  # as torch does at the end of its import, which an exception would fail
        print("goes on")
        """,
        triton="",
        pydantic="raise RuntimeError('another pydantic')",
    )
    assert result.stdout == "goes on\n", result.stderr
    assert "cannot install the triton hook" in result.stderr


@pytest.mark.parametrize(
    ("value", "warnings"), [("yes", 1), ("\x1b[2J" + 99 * "2", 1), ("0", 0), ("", 0)], ids=range(4)
)
def test_a_value_that_autoload_does_not_know_is_told_once_and_fails_nothing(
    tmp_path, value, warnings
):
    result = run(
        tmp_path,
        f"""
        import os, subprocess, sys
        os.environ["GRAPHSTASH_AUTOLOAD"] = {value!r}
        from graphstash._entry_points import load
        load()
        import compiler
        subprocess.run([sys.executable, "-c", "from graphstash._entry_points import load; load()"])
        """,
        compiler="print('goes on')",
    )
    assert result.stdout == "goes on\n", result.stderr
    assert result.stderr.count("does nothing") == warnings
    assert ("=yes does nothing: set GRAPHSTASH_AUTOLOAD=1" in result.stderr) == (value == "yes")
    assert "or 0 for no cache" in result.stderr or not warnings
    assert "\x1b" not in result.stderr
    assert len(result.stderr) < 300
