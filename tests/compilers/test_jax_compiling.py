"""How the hook handles one JAX compilation. Each case has a process of its own."""

from support.ports import reserved_port


def test_a_compile_within_a_compile_does_not_end_the_outer_one(jax_program):
    printed = jax_program(
        """
        import jax
        from jax._src import compiler
        from graphstash.hooks.jax.compiling import ProgramTracker

        def compile_program(backend, module, *arguments, **named):
            name = str(module.operation.attributes["sym_name"]).strip('"')
            print("begins", name)
            if "outer" in name:  # as a custom partitioning does that computes something
                jax.jit(inner)(1.0)
            return original(backend, module, *arguments, **named)

        def inner(x):
            return x + 1

        def outer(x):
            return x * 2

        original = compiler.backend_compile_and_load
        compiler.backend_compile_and_load = compile_program
        ProgramTracker(lambda: print("ended"), lambda *_: True, print)
        jax.jit(outer)(1.0)
        """
    )
    assert printed == ["begins jit_outer", "begins jit_inner", "ended"]


def test_unserializable_collective_program_is_reported_to_the_hook_only(jax_program):
    printed = jax_program(
        """
        from jax._src import compilation_cache, compiler
        from graphstash.hooks.jax.compiling import ProgramTracker

        def fail(*_):
            raise RuntimeError("UNIMPLEMENTED: it cannot be serialized")

        compilation_cache.put_executable_and_time = fail
        tracker = ProgramTracker(lambda: None, lambda *_: True, print)
        program = tracker.current_program()
        program.is_collective = True
        tracker._local.program = program
        compiler._cache_write("key", 1.0, "program", None, None, [])
        """
    )
    assert printed == ["UNIMPLEMENTED: it cannot be serialized"]


def test_processes_share_entries_unless_jax_itself_shares_among_them(jax_program):
    printed = jax_program(
        """
        import jax
        from jax._src import distributed
        from graphstash.hooks.jax.ranks import JaxRanks

        jax.distributed.initialize("127.0.0.1:PORT", 1, 0)
        ranks = JaxRanks(distributed.global_state.client, rank=0, size=2)
        print(ranks.wait("name", timeout_seconds=0))
        print(ranks.claim("name", b"first"), ranks.claim("name", b"second"))
        print({ranks.wait("name", timeout_seconds=0) for _ in range(1000)})  # at once, every time
        print(ranks.compiles_together)
        jax.config.update("jax_share_binary_between_hosts", True)
        print(ranks.compiles_together)
        """.replace("PORT", str(reserved_port()))
    )
    assert printed == ["None", "b'first' b'first'", "{b'first'}", "False", "True"]


def test_result_of_program_that_the_key_cannot_describe_is_not_published(jax_program, tmp_path):
    printed = jax_program(
        f"""
        import zlib
        from dataclasses import replace
        import jax
        from graphstash import ClientConfig
        from graphstash.hooks.jax.compiling import ProgramTracker
        from graphstash.hooks.jax.entries import Entries
        from graphstash.hooks.jax.fingerprint import request_of
        from support.host import Host

        jax.devices()
        program = ProgramTracker(lambda: None, lambda *_: True, print).current_program()
        for unshareable in ("it calls a Python function", ""):
            with Host(ClientConfig(url="none", cache_dir="{tmp_path}/cache")) as host:
                entry = zlib.compress(b"\\0\\0\\0\\1executable")
                one = replace(program, unshareable=unshareable)
                Entries(host.cache).put("jit_f-0", one, entry)
                host.publisher.drain(30)
                print(host.cache.is_on_this_host(request_of("jit_f-0", one).key))
        """
    )
    assert printed == ["False", "True"]


def test_threads_are_those_of_the_client_that_compiles_for_the_cpu(jax_program):
    printed = jax_program(
        """
        import os
        import jax
        from jax._src import xla_bridge
        from jax.extend.backend import clear_backends
        from graphstash.hooks.jax.compiling import ProgramTracker

        os.environ["NPROC"] = "5"
        jax.devices()
        os.environ["NPROC"] = "3"
        tracker = ProgramTracker(lambda: None, lambda *_: True, print)
        print(tracker.current_program().threads)  # the client was there before the hook
        try:
            xla_bridge._init_backend("another")
        except Exception:
            print(tracker.current_program().threads)  # a client for other devices changes nothing
        clear_backends()
        jax.devices()
        print(tracker.current_program().threads)
        """
    )
    assert printed == ["5 (now 3)", "5 (now 3)", "3"]


def test_options_of_a_client_are_those_that_jax_gave_before_the_hook(jax_program):
    printed = jax_program(
        """
        import jax
        import xla_plugins.xla_cpu_pjrt as plugin
        from jax._src import xla_bridge
        from jaxlib import xla_client
        from graphstash.hooks.jax.compiling import ProgramTracker

        library = plugin.__file__.replace("__init__.py", "xla_cpu_pjrt.so")
        options = lambda: {"mine": 1}
        xla_bridge.register_plugin("one", library_path=library, options=options)
        jax.config.update("jax_platforms", "one")
        jax.config.update("jax_pjrt_client_create_options", "other:text")
        jax.devices()
        tracker = ProgramTracker(lambda: None, lambda *_: True, print)
        print(tracker.current_program().client_options)
        create = xla_client._xla.get_c_api_client
        print(tracker._options_of(create(platform_name="one", options={"mine": 2})))
        tracker.close()
        xla_bridge._backend_factories["one"].factory = lambda: None
        for _ in range(2):
            tracker = ProgramTracker(lambda: None, lambda *_: True, print)
            print(tracker.current_program().unshareable)
            tracker.close()
            xla_bridge._backend_factories.pop("one", None)
        """
    )
    unknown = "its client's options are unknown, because graphstash.install() came later"
    assert printed == [
        "mine=1 other='text'",
        "mine=2",
        f"{unknown}: LookupError('the client of one was made by another function')",
        f"{unknown}: KeyError('one')",
    ]


LATE = """
    import contextlib
    import os

    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    import graphstash

    def user(x):
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.ffi.ffi_call("mine", result)(x)

    devices = jax.devices()
    jax.ffi.register_ffi_target_as_batch_partitionable("mine")
    graphstash.install()
    sharding = NamedSharding(Mesh(np.array(devices), ("a",)), PartitionSpec("a"))
    for function in (user, jax.numpy.linalg.cholesky):
        lowered = jax.jit(function, in_shardings=sharding).lower(np.eye(4, dtype=np.float32))
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # no code for the custom call
            lowered.compile()
        print(graphstash.stats().fallbacks)
    """


def test_custom_call_registered_before_a_late_installation_is_not_shared(jax_program):
    expected = ["{'unshareable': 1}"] * 2
    assert jax_program(LATE, url="none", hooks="jax") == expected
