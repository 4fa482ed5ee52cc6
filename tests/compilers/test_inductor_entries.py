"""torch's remote caches in this process: a function's result does not depend on the cache."""

import base64
import gc
import json
import pickle
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from graphstash import CompileCache
from graphstash._compile.compile_limit import CompileLimit
from graphstash._compile.stats import Counters
from graphstash._compile.two_call import TwoCallCache
from graphstash_schema import ArtifactKind, ArtifactMetadata
from support.deferred import Deferred
from support.fault_proxy import Fault, FaultProxy
from support.server import Server

dynamo = Deferred("torch._dynamo.utils")
functorch_config = Deferred("torch._functorch.config")
autograd_cache = Deferred("torch._functorch._aot_autograd.autograd_cache")
codecache = Deferred("torch._inductor.codecache")
compile_fx = Deferred("torch._inductor.compile_fx")
config = Deferred("torch._inductor.config")
cpp_builder = Deferred("torch._inductor.cpp_builder")
remote_cache = Deferred("torch._inductor.remote_cache")
autotune_cache = Deferred("torch._inductor.runtime.autotune_cache")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """A server with the leases of one test."""
    with Server(tmp_path_factory.mktemp("quiet")) as server:
        yield server


def multiply(x, y):
    return x @ y


def compute():
    """Compile and run a graph without generated kernels, which needs no C++ compiler."""
    x, y = torch.arange(12.0).reshape(3, 4), torch.ones(4, 5)
    with torch.no_grad():
        result = torch.compile(multiply)(x, y)
    assert torch.equal(result, x @ y)


def times(number):
    """Compile and run a graph that calls an operation, whose kernel multiplies by a number."""
    with torch.library._scoped_library("kernels", "DEF") as library, torch.no_grad():
        library.define("times(Tensor x) -> Tensor")
        library._register_fake("times", torch.empty_like)
        library.impl("times", lambda x: x * number, "CPU")
        return torch.compile(lambda x, y: torch.ops.kernels.times(x) @ y)(*torch.ones(2, 4, 4))


def test_a_hit_calls_the_kernel_of_its_own_process(host):
    with host("a") as a:
        assert torch.equal(times(2.0), torch.full((4, 4), 8.0))
        assert a.stats.published == a.stats.misses == 2
    with host("b") as b:
        assert torch.equal(times(3.0), torch.full((4, 4), 12.0))
        assert (b.stats.hits, b.stats.misses) == (2, 0)


def test_a_graph_is_compiled_once(host):
    with host("a") as a:
        compute()
        assert a.stats.published == a.stats.misses == 2  # the graph, and AOTAutograd's entry
    with host("b") as b:
        compute()
        assert (b.stats.hits_server, b.stats.misses) == (2, 0)
        assert dynamo.counters["inductor"]["fxgraph_cache_hit"] == 1
        assert dynamo.counters["aot_autograd"]["autograd_cache_hit"] == 1


def test_torchs_own_cache_has_no_code_for_other_vector_instructions(host, monkeypatch):
    """torch 2.7 and 2.15 would generate such code on this processor and compute other numbers."""
    with host("a") as a:
        for number, instructions in enumerate(("default", "avx2"), 1):
            monkeypatch.setenv("ATEN_CPU_CAPABILITY", instructions)
            compute()
            assert a.stats.misses == 2 * number
            torch._dynamo.reset()


def test_graph_is_shared_despite_a_kernel_for_an_absent_device(host):
    """torch 2.11 registers kernels for Apple's GPUs in Python."""
    with torch.library._scoped_library("aten", "IMPL") as apple, host("a") as a:
        apple.impl("sin", torch.cos, "MPS")
        compute()
        assert a.stats.fallbacks == {}
        assert a.stats.published == 2


def unloadable(entry):
    """Return the entry of an FX graph whose generated code raises an exception on load."""
    stored = json.loads(entry)
    graph = pickle.loads(base64.b64decode(stored["data"]))
    graph.source_code = "raise ValueError"
    return json.dumps(stored | {"data": base64.b64encode(pickle.dumps(graph)).decode()}).encode()


def test_graph_that_torch_fails_to_load_is_rejected_and_compiled(host, monkeypatch):
    with host("a"):
        compute()
    get = TwoCallCache.get

    def damaged(cache, request, **options):
        entry = get(cache, request, **options)
        is_graph = entry is not None and request.key.kind is ArtifactKind.INDUCTOR
        return unloadable(entry) if is_graph else entry

    monkeypatch.setattr(TwoCallCache, "get", damaged)
    with host("b") as b:
        compute()
        assert b.stats.fallbacks == {"rejected": 2}  # by AOTAutograd, then to compile the graph
        assert dynamo.counters["inductor"]["fxgraph_cache_hit"] == 0


def predict():
    """Compile a forward pass whose backward pass never runs. torch stores no result of tracing."""
    torch.compile(multiply)(torch.ones(3, 4, requires_grad=True), torch.ones(4, 5))


@pytest.mark.parametrize(
    ("is_cached", "ended"),
    [(True, 0), (False, 1)],
    ids=["every graph is found", "torch bypasses its cache"],
)
def test_job_with_fail_on_miss_ends_only_before_it_compiles(host, monkeypatch, is_cached, ended):
    def bypass(*args, **kwargs):
        raise codecache.BypassFxGraphCache("no reason")

    def end(why, *, status):
        ends.append(why)

    with host("a"):
        predict()
    with host("b", fail_on_miss=True) as b:
        ends = []
        b.cache.limit = CompileLimit(b.cache.config, end)
        if not is_cached:
            monkeypatch.setattr(codecache.FxGraphCache, "_check_can_cache", bypass)
        predict()
        # AOTAutograd's entry, unless torch bypasses its cache.
        assert b.stats.misses == int(is_cached)
        assert len(ends) == ended, ends


def test_damaged_artifact_is_counted_and_the_function_computes_the_same(host, server):
    with host("sound") as sound:
        compute()
        assert sound.stats.published == 2
    with FaultProxy(server.port) as proxy:
        proxy.fault = Fault.FLIP
        with host("under", url=proxy.url) as under:
            compute()
    assert under.stats.fallbacks["digest_mismatch"] >= 1


NO_PICKLE = json.dumps({"data": base64.b64encode(b"no pickle").decode(), "time_taken_ms": 1})


@pytest.mark.parametrize(
    ("kind", "garbage"),
    [(ArtifactKind.INDUCTOR, b"no JSON"), (ArtifactKind.AOT_AUTOGRAD, NO_PICKLE.encode())],
    ids=["no JSON", "no pickle"],
)
def test_unloadable_entry_is_skipped_and_replaced(host, kind, garbage):
    with host("sound", namespace="elsewhere") as sound:
        compute()
        assert sound.stats.fallbacks == {}
        key = next(key for key in sound.cache.used if key.kind is kind)
    metadata = ArtifactMetadata(compile_seconds=1, raw_size_bytes=len(garbage))
    with host("met") as met:
        met.cache.stash.put(key, garbage, metadata)
        compute()
        assert met.stats.fallbacks == {"rejected": 1}
        assert met.stats.published == 2
    with host("after") as after:
        compute()
        assert after.stats.misses == 0
        assert dynamo.counters["inductor"]["fxgraph_cache_hit"] == 1
        assert dynamo.counters["aot_autograd"]["autograd_cache_hit"] == 1


def test_a_put_that_fails_does_not_end_the_compilation(host, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no put")

    with host("a") as a:
        monkeypatch.setattr(a.hook._entries._exchange, "put", fail)
        compute()
        assert a.stats.fallbacks == {"internal": 2}


# The key describes this function, because it replaces a function of the compiler.
def _fail(*args, **kwargs):
    raise RuntimeError("no code")


def test_a_lease_is_held_while_a_graph_is_compiled_and_not_when_that_fails(
    host, quiet, monkeypatch
):
    held = []

    def end():
        held.append(quiet.leases_held())
        ended()

    with host("a", url=quiet.url) as a:
        ended = a.hook._entries._exchange.end
        monkeypatch.setattr(a.hook._entries._exchange, "end", end)
        monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", _fail)
        with pytest.raises(Exception, match="no code"):
            compute()
        for lease in a.cache._leases:
            lease.join(20)
        assert held == [1]
        assert quiet.leases_held() == 0
        monkeypatch.undo()
        compute()
        assert a.stats.published == 2


def test_a_graph_that_torch_does_not_cache_leaves_no_lease_and_its_reason_once(host, quiet, caplog):
    with host("a", url=quiet.url) as a, config.patch(post_grad_custom_pre_pass=lambda graph: None):
        compute()
        torch._dynamo.reset()
        compute()
        assert dynamo.counters["inductor"]["fxgraph_cache_bypass"] == 2
        assert a.stats.published == 0
        assert quiet.leases_held() == 0
    (said,) = [each.message for each in caplog.records if "caches no graph" in each.message]
    assert said.endswith(": Unsupported post grad custom pass")


def train(late, **how):
    """Compile with options. torch compiles the backward pass later, here under other settings."""
    x, y = torch.ones(3, 4, requires_grad=True), torch.ones(4, 5, requires_grad=True)
    result = torch.compile(multiply, **how)(x, y)
    with config.patch(late):
        result.sum().backward()


@pytest.mark.parametrize(("late", "published"), [({}, 3), ({"epilogue_fusion": False}, 2)])
def test_entry_is_not_published_if_settings_change_before_its_backward(host, late, published):
    """torch computes the key of the entry before the forward pass."""
    with host("a") as a:
        train(late)
    assert a.stats.published == published  # both graphs, and AOTAutograd's entry
    assert a.stats.fallbacks == ({"unshareable": 1} if late else {})


@pytest.mark.parametrize("late", [{}, {"epilogue_fusion": False}])
def test_settings_that_change_before_a_loaded_backward_end_sharing(host, late):
    """Without the cache, torch compiles the backward pass with the settings of that time."""
    with host("a"):
        train({})
    with host("b") as b:
        train(late)
        assert b.stats.misses == 0
        assert b.stats.fallbacks == ({"unshareable": 1} if late else {})
        torch._dynamo.reset()
        train({})
        assert dynamo.counters["aot_autograd"]["autograd_cache_hit"] == (1 if late else 2)


@pytest.mark.parametrize(
    ("how", "late"),
    [
        ({"mode": "max-autotune-no-cudagraphs"}, {}),
        ({"options": {"epilogue_fusion": False}}, {}),
        ({"options": {"_micro_pipeline_tp": True}}, {}),
        ({"options": {"epilogue_fusion": False}}, {"aggressive_fusion": True}),
    ],
    ids=["mode", "option", "private option", "option and a setting that changes"],
)
def test_options_of_torch_compile_are_not_settings_that_change(host, how, late):
    """torch applies the options when it compiles the backward graph, but not when it runs it."""
    with host("a") as a:
        train({}, **how)
        assert a.stats.fallbacks == {}
    with host("b") as b:
        train(late, **how)
        assert b.stats.misses == 0
        assert b.stats.fallbacks == ({"unshareable": 1} if late else {})


def test_entry_of_every_kind_round_trips_byte_for_byte(host):
    caches = {
        remote_cache.RemoteFxGraphCache: {"data": "AAAA", "time_taken_ms": 7},
        remote_cache.RemoteAOTAutogradCache: {"data": "BBBB", "time_taken_ms": 7},
        remote_cache.RemoteAutotuneCache: {"num_warps": 4, "time_taken_ms": 7},
        remote_cache.RemoteBundledAutotuneCache: {"kernel.best_config": {"num_warps": 4}},
    }
    with host("a") as a:
        for cache, value in caches.items():
            assert cache(cache.__name__).get("key") is None
            cache(cache.__name__).put("key", value)
        assert a.stats.published == len(caches)
    with host("b") as b:
        for cache, value in caches.items():
            assert cache(cache.__name__).get("key") == value
        assert b.stats.hits_server == len(caches)
        assert a.stats.misses == len(caches)
        assert {key.kind for key in b.cache.used} == {
            ArtifactKind.INDUCTOR,
            ArtifactKind.AOT_AUTOGRAD,
            ArtifactKind.AUTOTUNE,
        }


def seams():
    """Return every attribute that the hook may replace, with its present value."""
    return [
        cpp_builder.CppBuilder.__dict__["build"],
        codecache.FxGraphCache.__dict__["_lookup_graph"],
        autograd_cache.AOTAutogradCache.__dict__["_lookup"],
        autotune_cache.AutotuneCacheBundler.__dict__["begin_compile"],
        compile_fx._compile_fx_inner,
        config.fx_graph_remote_cache,
        config.autotune_remote_cache,
        config.bundled_autotune_remote_cache,
        functorch_config.enable_remote_autograd_cache,
        *(
            vars(getattr(remote_cache, name)).get("backend_override_cls")
            for name in dir(remote_cache)
            if name.endswith("Cache")
        ),
    ]


def test_uninstall_restores_torch(host):
    before = seams()
    with host("a") as a:
        assert seams() != before
        compute()
    assert seams() == before
    torch._dynamo.reset()
    compute()
    assert a.stats.misses == 2


def test_failed_installation_restores_torch(host, monkeypatch):
    before = seams()
    with monkeypatch.context() as other_torch:
        other_torch.delattr(autotune_cache.AutotuneCacheBundler, "begin_compile")
        with pytest.raises(AttributeError), host("a"):
            pass
    assert seams() == before


def test_forked_child_uses_a_cache_of_its_own(host):
    counted = Counters()
    with host("a") as a:
        own = CompileCache(a.cache.stash, counters=counted, publisher=a.cache.publisher)
        assert a.hook.after_fork(own)
        compute()
        assert a.stats.misses == 0
        assert counted.snapshot().published == 2


def test_profiles_autotuning_results_and_local_caches_are_not_shared(host):
    with host("a"):
        assert remote_cache.RemoteDynamoPGOCache.backend_override_cls is None
        assert remote_cache.RemoteCache.backend_override_cls is None
        assert config.bundled_autotune_remote_cache is None
        assert config.autotune_remote_cache is None
        assert torch._dynamo.config.automatic_dynamic_remote_pgo is None


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_cache_that_the_user_disabled_stays_disabled(host):
    with config.patch(fx_graph_remote_cache=False), host("a") as a:
        compute()
        assert config.fx_graph_remote_cache is False
        assert {key.kind for key in a.cache.used} <= {ArtifactKind.AOT_AUTOGRAD}
    with functorch_config.patch(enable_autograd_cache=False), host("b"):
        assert functorch_config.enable_remote_autograd_cache is None
    with config.patch(force_disable_caches=True), host("c") as c:
        compute()
        assert c.stats.misses == 0


def test_hook_with_missing_name_logs_once(host, monkeypatch, caplog):
    monkeypatch.delattr(remote_cache, "RemoteFxGraphCache")
    with host("a") as a:
        compute()
        assert a.stats.misses == 0
    warnings = [record.message for record in caplog.records if record.name == "graphstash"]
    assert len(warnings) == 1
    assert "RemoteFxGraphCache.backend_override_cls" in warnings[0]
    assert "graphs are not shared" in warnings[0]


def test_no_secret_of_the_environment_is_in_a_description(host, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_REDIS_URL", "redis://user:secret@cache")
    monkeypatch.setenv("TORCH_HUB_TOKEN", "secret")
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE_GEMM", "0")
    with host("a") as a:
        compute()
        misses = a.cache.log.misses
    assert misses
    for miss in misses:
        assert "secret" not in miss.description.model_dump_json()
    assert any("env.TORCHINDUCTOR_MAX_AUTOTUNE_GEMM" in miss.description.parts for miss in misses)


@pytest.mark.extended  # it takes ten seconds to import Lightning
def test_a_wrapper_around_torch_compile_does_not_make_torchs_functions_count_as_replaced():
    code = """
import torch
compile = torch.compile
import lightning.fabric.wrappers
assert torch.compile is not compile
import torch._inductor.compile_fx
from graphstash.hooks.inductor.replaced import replaced_in_torch
from graphstash.hooks.code import CodeDescriber

print(*replaced_in_torch(CodeDescriber()))
"""
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"\n"


def test_given_compilers_are_read_without_keeping_variables_of_callers():
    from graphstash.hooks.inductor.registries import _passed_compilers

    class Tensor:
        pass

    def call():
        tensor = Tensor()
        _passed_compilers(SimpleNamespace(fw_compiler=print))
        return weakref.ref(tensor)

    gc.disable()  # it would end the tensor even if a cycle of frames kept it
    try:
        assert call()() is None
    finally:
        gc.enable()
