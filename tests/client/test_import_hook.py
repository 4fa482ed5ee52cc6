import subprocess
import sys
import textwrap


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
        from graphstash._import_hook import when_imported
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
        from graphstash._import_hook import when_imported
        when_imported("compiler", lambda: 1 / 0)
        import compiler
        print(compiler.value)
        """,
        compiler="value = 3",
    )
    assert result.stdout == "3\n"
    assert "installing the hook failed" in result.stderr


def test_a_module_that_is_absent_stays_absent(tmp_path):
    result = run(
        tmp_path,
        """
        from graphstash._import_hook import when_imported
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
        from graphstash._import_hook import when_imported
        when_imported("compiler", lambda: print("installed"))
        assert importlib.util.find_spec("compiler").origin.endswith("compiler.py")
        assert importlib.util.find_spec("compiler") is not None
        import compiler
        """,
        compiler="",
    )
    assert result.stdout == "installed\n", result.stderr
