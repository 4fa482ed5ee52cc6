"""The inductor hook: torch.compile's remote caches, and the C++ objects that they omit.

    entries    FX graphs, AOTAutograd results and autotuning results. The hook replaces the backend
               of torch's remote caches by `backend_override_cls`, which torch has for tests and
               which is the same in 2.7 to 2.15. No Redis is needed.
    objects    results of g++, at `CppBuilder.build`

The hook enables the remote caches in torch's configuration. Environment variables would also enable
them in children without the hook, which would then look for a Redis server.

The hook does not share profiles for dynamic shapes (`RemoteDynamoPGOCache`). An artifact never
changes, but torch rewrites the profile of a rank for every new shape. A profile also decides which
graphs are compiled. With another job's profile, no log would explain these decisions.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import autograd_cache
from torch._guards import CompileContext
from torch._inductor import codecache, compile_fx, config, cpp_builder, remote_cache
from torch._inductor.runtime import autotune_cache
from torch.utils._triton import has_triton

from graphstash._compile.cache import CompileCache
from graphstash.hooks.inductor import SPEC
from graphstash.hooks.inductor.entries import Entries, offer_variants
from graphstash.hooks.inductor.objects import Objects, defer_precompilation
from graphstash.hooks.patching import Patches
from graphstash_schema import ArtifactKind

__all__ = ["InductorHook", "install"]

_log = logging.getLogger("graphstash")

_REMOTE_CACHES: Final = {
    "RemoteFxGraphCache": ArtifactKind.INDUCTOR,
    "RemoteAOTAutogradCache": ArtifactKind.AOT_AUTOGRAD,
    "RemoteAutotuneCache": ArtifactKind.AUTOTUNE,
    "RemoteBundledAutotuneCache": ArtifactKind.AUTOTUNE,
}
"""Excludes the base class `RemoteCache`, because local caches of torch inherit from it."""

_SEAMS: Final = (
    *((remote_cache, name, "backend_override_cls") for name in _REMOTE_CACHES),
    (codecache, "FxGraphCache", "_lookup_graph"),
    (autograd_cache, "AOTAutogradCache", "_lookup"),
)

_KEY_MAKERS: Final = (
    (codecache, "compiled_fx_graph_hash"),
    (autograd_cache, "autograd_cache_key"),
)


def install(cache: CompileCache) -> "InductorHook | None":
    """Install the cache into torch.compile. Return None and log why if torch is unsupported."""
    return InductorHook(cache) if SPEC.is_supported(str(torch.__version__)) else None


class InductorHook:
    """The changes to torch. `close` undoes them."""

    def __init__(self, cache: CompileCache) -> None:
        self._patches = Patches()
        with self._patches.all_or_none():
            self._objects = self._patch_builder(cache)
            self._entries = Entries(cache, built_seconds=self._built_seconds)
            if missing := _missing_name():
                _log.warning(
                    "graphstash: torch %s has no %s; its graphs are not shared",
                    torch.__version__,
                    missing,
                )
            else:
                self._patch_caches()

    def close(self) -> None:
        """Uninstall the hook and finish pending work."""
        self._patches.undo()
        _forget_remote_cache()
        self._entries.close()
        if self._objects is not None:
            self._objects.close()

    def after_fork(self, cache: CompileCache) -> bool:
        """Use the child's own cache. The parent finishes the compilations that it has begun."""
        self._entries.switch_cache(cache)
        if self._objects is not None:
            self._objects.switch_cache(cache)
        return True

    def _patch_builder(self, cache: CompileCache) -> Objects | None:
        builder: Any = getattr(cpp_builder, "CppBuilder", None)
        if not hasattr(builder, "build"):
            _log.warning(
                "graphstash: torch %s has no CppBuilder.build; its C++ objects are not shared",
                torch.__version__,
            )
            return None
        objects = Objects(cache, builder.build, is_awaited=lambda: self._entries.is_compiling)

        def build(builder: Any) -> Any:
            return objects.build(builder)

        self._patches.replace(builder, "build", build)
        if hasattr(codecache, "_precompile_header"):
            header = defer_precompilation(codecache._precompile_header)
            self._patches.replace(codecache, "_precompile_header", header)
        return objects

    def _built_seconds(self) -> float:
        return 0.0 if self._objects is None else self._objects.built_seconds

    def _patch_caches(self) -> None:
        for name, kind in _REMOTE_CACHES.items():
            backend = partial(self._entries.backend, kind)
            self._patches.replace(getattr(remote_cache, name), "backend_override_cls", backend)
        self._offer_variants(
            codecache.FxGraphCache,
            "_lookup_graph",
            is_miss=lambda result: result[0] is None,
            make_miss=lambda: (None, {}),
            on_hit=lambda result: self._entries.watch(result[0]),
        )
        self._offer_variants(
            autograd_cache.AOTAutogradCache,
            "_lookup",
            is_miss=lambda result: result is None,
            make_miss=lambda: None,
        )
        for module, name in _KEY_MAKERS:
            if hasattr(module, name):
                self._patches.wrap(module, name, self._entries.key_info.wrap_key_maker)
        if hasattr(codecache, "log_cache_bypass"):  # torch's hook for listeners
            logging = partial(_wrap_log_bypass, self._entries)
            self._patches.wrap(codecache, "log_cache_bypass", logging)
        original = compile_fx._compile_fx_inner

        def compile_fx_inner(*args: Any, **kwargs: Any) -> Any:
            with self._entries.compilation():
                return original(*args, **kwargs)

        self._patches.replace(compile_fx, "_compile_fx_inner", compile_fx_inner)
        bundler: Any = getattr(autotune_cache, "AutotuneCacheBundler", None)
        if bundler is not None:
            begin = _wrap_begin_bundle(bundler, bundler.begin_compile)
            self._patches.replace(bundler, "begin_compile", staticmethod(begin))
        _forget_remote_cache()
        self._switch_on()

    def _offer_variants(self, owner: Any, name: str, **calls: Callable[..., Any]) -> None:
        offered = offer_variants(getattr(owner, name), self._entries, **calls)
        self._patches.replace(owner, name, staticmethod(offered))

    def _switch_on(self) -> None:
        """Enable torch's remote caches, unless the user has disabled caching."""
        if config.fx_graph_cache:
            self._patches.switch_on(config, "fx_graph_remote_cache")
        if functorch_config.enable_autograd_cache:
            self._patches.switch_on(functorch_config, "enable_remote_autograd_cache")
        # Enable only bundles of autotuning results, one per graph. The setting for single kernels
        # would be written into generated code, and torch's compile workers, which may lack the
        # hook, would act on it. Without a device for Triton, torch fails to make a bundle.
        if torch.accelerator.is_available() and has_triton():
            self._patches.switch_on(config, "bundled_autotune_remote_cache")


def _wrap_begin_bundle(bundler: Any, original: Callable[..., None]) -> Callable[..., None]:
    """Wrap the function with which torch begins a bundle of autotuning results.

    torch ends a bundle when its graph runs. If another graph begins a bundle before that, torch
    raises an AssertionError. This happens when torch loads a forward graph and its backward graph
    together. The second bundle would also contain the results of the first graph, so the wrapper
    discards both bundles.
    """

    def begin_compile(*args: Any, **kwargs: Any) -> None:
        is_open = _discard_bundle(bundler)
        original(*args, **kwargs)
        if is_open:
            _discard_bundle(bundler)

    return begin_compile


def _discard_bundle(bundler: Any) -> bool:
    """Discard the open bundle, and return whether there was one."""
    holder = bundler  # a process has one bundle; with torch 2.15, each compile context has one
    if hasattr(bundler, "_get_context_bundler"):
        holder = bundler._get_context_bundler(CompileContext.try_get(), create=False)
    if getattr(holder, "_bundler", None) is None:
        return False
    holder._bundler = None
    return True


def _wrap_log_bypass(entries: Entries, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's listener. Log each reason why torch does not cache a graph once.

    torch calls it for an FX graph before it compiles the graph.
    """
    logged: set[str] = set()

    def log_bypass(*args: Any, **kwargs: Any) -> Any:
        reason = str(args[-1]) if args else ""
        if reason not in logged:
            logged.add(reason)
            _log.warning("graphstash: torch caches no graph like this one: %s", reason)
        if args[:1] == ("bypass_fx_graph",):
            entries.check_bypass(reason)
        return original(*args, **kwargs)

    return log_bypass


def _forget_remote_cache() -> None:
    """Make torch create its AOTAutograd cache again, with the current backend."""
    get_remote_cache: Any = getattr(autograd_cache.AOTAutogradCache, "get_remote_cache", None)
    if hasattr(get_remote_cache, "cache_clear"):
        get_remote_cache.cache_clear()


def _missing_name() -> str:
    """Return the first name that the hook needs and this torch lacks, or an empty string."""
    for module, owner, name in _SEAMS:
        if not hasattr(getattr(module, owner, None), name):
            return f"{owner}.{name}"
    return "" if hasattr(compile_fx, "_compile_fx_inner") else "_compile_fx_inner"
