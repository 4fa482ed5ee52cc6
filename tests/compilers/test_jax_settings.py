"""JAX's settings under the hook: which settings it changes, for how long, and which it obeys."""

from functools import partial

import pytest

from graphstash._artifacts.stash import Stash
from graphstash.config import ClientConfig
from graphstash_schema import ArtifactKey, ArtifactMetadata
from support.tiers import most_extended

VERSIONS = most_extended(["", "jax-oldest"], quick=[""])


@pytest.fixture
def run(jax_program):
    """Return a function that runs a program on a host without a server."""
    return partial(jax_program, url="none", hooks="jax")


@pytest.mark.parametrize("environment", VERSIONS)
def test_context_managers_of_the_user_change_no_global_setting(run, environment):
    printed = run(
        """
        import jax
        from jax._src import config
        import graphstash

        size = "jax_persistent_cache_min_entry_size_bytes"
        seconds = "jax_persistent_cache_min_compile_time_secs"
        before = jax.config.values[size]
        with config.persistent_cache_min_compile_time_secs(7.0):
            graphstash.install()
            print(jax.config.values[seconds])
        print(jax.config.values[seconds])
        with config.persistent_cache_min_entry_size_bytes(0):
            jax.jit(lambda x: x + 1)(1.0)  # the first compile
        print(jax.config.values[size] == before)
        with config.persistent_cache_min_compile_time_secs(7.0):
            graphstash.uninstall()
        print(jax.config.values[seconds], jax.config.values[size] == before)
        """,
        environment=environment,
    )
    assert printed == ["7.0", "0.0", "True", "1.0 True"]


CHECKED = """
    import jax
    import numpy
    from jax._src import compilation_cache, compiler
    import graphstash

    jax.config.update("jax_compilation_cache_check_contents", True)
    graphstash.install()
    original = compiler.backend_compile_and_load
    compiled = []

    def compile_program(*arguments, **named):
        compiled.append(arguments)
        return original(*arguments, **named)

    def square(x):
        return x @ x

    compiler.backend_compile_and_load = compile_program
    try:
        for _ in range(2):
            jax.jit(square)(numpy.ones((4, 4)))
            jax.clear_caches()
    except compilation_cache.CacheVerificationError as error:
        print(str(error).partition(" for key")[0])
    stats = graphstash.stats()
    print(len(compiled), stats.hits > 0, stats.fallbacks)
    """


@pytest.mark.parametrize("operation", ["x @ x", "x + x"])  # the second program is in a pack
def test_jax_compares_cached_program_with_its_compilation(run, operation):
    program = CHECKED.replace("x @ x", operation)
    run(program.replace("True)", "False)"))
    assert run(program) == ["1 True {}"]


def test_jax_reports_cached_program_that_differs_from_its_compilation(run, tmp_path):
    run(CHECKED)
    tier = tmp_path / "host" / "tier"
    (found,) = (tier / "v2").glob("*/default/jax/*/??/*")
    key = ArtifactKey.parse("jax", found.parts[-3], found.name)
    with Stash(ClientConfig(url="none", cache_dir=tier)) as stash:
        changed = stash.get(key) + b"more"
        metadata = ArtifactMetadata(compile_seconds=1, raw_size_bytes=len(changed))
        stash.put(key, changed, metadata)
    assert run(CHECKED) == ["Persistent compilation cache inconsistency", "1 True {}"]


@pytest.mark.parametrize("environment", VERSIONS)
def test_failed_installation_restores_settings_and_functions(run, environment):
    printed = run(
        """
        import jax
        from jax._src import compilation_cache
        import graphstash
        from graphstash.hooks.jax import seam

        def fail():
            raise OSError("no cache can be reset")

        get_file_cache = compilation_cache.get_file_cache
        seam.reset_cache = fail
        graphstash.install()
        print(compilation_cache.get_file_cache is get_file_cache)
        print(jax.config.jax_compilation_cache_dir)
        """,
        environment=environment,
    )
    assert printed == ["True", "None"]
