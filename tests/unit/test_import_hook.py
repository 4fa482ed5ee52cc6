"""A hook is installed after its compiler is imported, and neither delays nor fails the import."""

import os
import sys
import textwrap

import pytest

from support.processes import captured


def run(tmp_path, program, **files):
    for name, content in files.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(content))
    return captured(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        cwd=tmp_path,
        env={"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        timeout=60,
    )


def test_action_runs_once_after_its_module_and_leaves_imports_unchanged(tmp_path):
    result = run(
        tmp_path,
        """
        import importlib.util, sys
        from graphstash.hooks.import_hook import when_imported
        from graphstash.hooks.installing import install_when_needed
        from graphstash.hooks.registry import hook_specs

        install_when_needed(hook_specs().values(), print)
        heavy = {"pydantic", "httpx", "zstandard", "torch", "torch_xla", "typer", "rich"}
        print(sorted(heavy & set(sys.modules)))

        finders = len(sys.meta_path)
        when_imported("failing", lambda: 1 / 0)
        when_imported("looked_for", lambda: print("installed", sys.modules["looked_for"].ready))
        for name in ("absent", "broken"):
            when_imported(name, lambda: print("must not be installed"))
        for _ in range(2):
            assert importlib.util.find_spec("looked_for").origin.endswith("looked_for.py")
        import failing, looked_for, looked_for
        print(type(looked_for.__loader__).__name__, type(looked_for.__spec__.loader).__name__)
        print(failing.value)
        for name in ("absent", "broken"):
            try:
                importlib.import_module(name)
            except ImportError as error:
                print(error)
        assert len(sys.meta_path) == finders + 1  # it goes on waiting for the absent module
        """,
        failing="value = 3",
        looked_for="print('executing'); ready = True",
        broken="import library; raise ImportError('no device')",
        library="""
            from graphstash.hooks.import_hook import when_imported
            when_imported("broken", lambda: print("must not be installed"))
        """,
    )
    assert result.stdout.splitlines() == [
        *("[]", "executing", "installed True", "SourceFileLoader SourceFileLoader", "3"),
        *("No module named 'absent'", "no device"),
    ], result.stderr
    assert result.stderr.count("cannot install the hook") == 1


def test_action_waits_for_a_running_import(tmp_path):
    result = run(
        tmp_path,
        """
        import compiler
        print(type(compiler.__spec__).__name__, compiler.__spec__._initializing)
        """,
        compiler="import library; ready = True",
        library="""
        import sys
        from graphstash.hooks.installing import install_when_needed
        from graphstash.hooks.registry import hook_specs
        from graphstash.hooks.import_hook import when_imported

        def act(name):
            print(name, sys.modules["compiler"].ready)

        spec = hook_specs()["jax"]._replace(modules=("compiler",))
        install_when_needed([spec._replace(name=name) for name in ("first", "second")], act)
        when_imported("compiler", lambda: 1 / 0)
        """,
    )
    assert result.stdout.splitlines() == ["first True", "second True", "ModuleSpec False"]
    assert result.stderr.count("cannot install the hook") == 1


def test_early_action_runs_before_the_module_and_cannot_fail_its_import(tmp_path):
    result = run(
        tmp_path,
        """
        import importlib.util
        from graphstash.hooks.import_hook import when_imported
        when_imported("compiler", lambda: print("installed"), on_begin=lambda: print("begun"))
        when_imported("compiler", lambda: print("also"), on_begin=lambda: 1 / 0)
        print(importlib.util.find_spec("compiler") is not None)
        import compiler
        """,
        compiler="print('executing')",
    )
    assert sorted(result.stdout.splitlines()[3:]) == ["also", "installed"], result.stderr
    assert result.stdout.splitlines()[:3] == ["True", "begun", "executing"]


def test_missing_dependency_of_graphstash_does_not_fail_import_of_compiler(tmp_path):
    result = run(
        tmp_path,
        """
        import os
        os.environ["GRAPHSTASH_AUTOLOAD"] = "1"
        import triton
        from graphstash._entry_points import initialize
        initialize()  # as torch does at the end of its import, which an exception would fail
        print("goes on")
        """,
        triton="",
        pydantic="raise RuntimeError('another pydantic')",
    )
    assert result.stdout == "goes on\n", result.stderr
    assert "cannot install the triton hook" in result.stderr


def test_entry_point_of_imported_compiler_installs_hook_once(tmp_path):
    result = run(
        tmp_path,
        """
        import os, sys
        os.environ["GRAPHSTASH_AUTOLOAD"] = "1"
        import triton
        from graphstash._entry_points import initialize
        assert "pydantic" not in sys.modules  # the session imports it, the first package from now
        initialize()
        """,
        triton="__version__ = '3.3.0'",
    )
    assert "No module named 'triton.runtime'" in result.stderr  # the hook was tried
    assert result.stderr.count("cannot install") == 1


@pytest.mark.parametrize(
    ("value", "warnings"), [("yes", 1), ("\x1b[2J" + 99 * "2", 1), ("0", 0)], ids=range(3)
)
def test_unknown_autoload_value_is_logged_once(tmp_path, value, warnings):
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
