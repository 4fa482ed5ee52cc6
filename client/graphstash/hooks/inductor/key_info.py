"""The contents of torch's keys: the graph, its inputs, and the settings in force.

`compiled_fx_graph_hash` and `autograd_cache_key` return a key and, for torch's log, lines with the
hashed values. In torch 2.15, `autograd_cache_key` returns these lines only at log level DEBUG.

The hook adds the switches of the process and the code of the user to each key. It does so when
torch makes the key: results of AOTAutograd contain the keys of their FX graphs, and torch looks
those keys up later, when the switches may have changed.
"""

import os
import re
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import lru_cache, wraps
from hashlib import sha256
from itertools import combinations
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from torch._functorch._aot_autograd.schemas import AOTConfig
from torch._inductor import codecache, config
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from graphstash.hooks.code import UndescribableError
from graphstash.hooks.inductor.ambient import ambient_state, is_changed, unknown_switches
from graphstash.hooks.inductor.ranks import setting_with_rank
from graphstash.hooks.inductor.target import GPUS, cpu_target
from graphstash.hooks.inductor.user_code import registrations, user_code_of

__all__ = ["GPU_SUFFIX", "KeyInfo", "State", "current_state", "options_of_compilation"]

GPU_SUFFIX: Final = "_gpu"
"""Suffix of the key of a graph whose tensors are all on GPUs (`_is_on_gpu`). If an entry's name has
it, `fingerprint` leaves the CPU out of the artifact's key."""

_LINE: Final = re.compile(r"\[(\w+)\] (\w+)(?:\[([^\]]*)\])?: (.*)", re.DOTALL)
_TENSOR: Final = re.compile(r"dtype=torch\.(\w+), shape=torch\.Size\(\[([^\]]*)\]\)")
_STRIDES: Final = re.compile(r"shape=torch\.Size\(\[([^\]]*)\]\), stride=\(([^)]*)\)")
_SYMBOL: Final = re.compile(r"\bs\d+\b")
_OPERATION: Final = re.compile(
    r"\btorch\.ops\.\w+\.(\w+)|\btorch\.(?:nn\.functional\.|_C\._nn\.)?(\w+)\(|( @ )"
)
_NUMBER: Final = re.compile(r"(?<![\w.\[])-?\d+\.\d*(?:e[+-]?\d+)?(?![\w.])")
_MAX_NUMBERS: Final = 200
_FX_KEY: Final = re.compile(rf"f[a-z2-7]{{51}}(?:{GPU_SUFFIX})?")
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_READ: Final = frozenset(
    {
        *("ATEN_CPU_CAPABILITY", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_CUDA_ARCH_LIST"),
        *(
            f"TORCHINDUCTOR_{name}"
            for name in (
                *("COORDINATE_DESCENT_TUNING", "CPP_WRAPPER", "CUDAGRAPHS", "EPILOGUE_FUSION"),
                *("FREEZING", "LAYOUT_OPTIMIZATION", "MAX_AUTOTUNE", "MAX_AUTOTUNE_CONV_BACKENDS"),
                *("MAX_AUTOTUNE_GEMM", "MAX_AUTOTUNE_GEMM_BACKENDS", "MAX_AUTOTUNE_POINTWISE"),
                *("MAX_FUSION_SIZE", "MULTI_KERNEL", "PERMUTE_FUSION", "SHAPE_PADDING"),
                *("SIMDLEN", "SPLIT_REDUCTIONS", "USE_FAST_MATH", "GROUP_FUSION"),
            )
        ),
    }
)
"""Environment variables that affect generated code and hold no secret. `KeyInfo.details` does not
publish others, such as the address of a Redis server with its password."""
_READ_LATE: Final = re.compile(r"_get_(?!\w*sdp)|setting\.")
"""Switches and settings that Inductor reads. Others, such as the switches of attention, have had
their effect in AOTAutograd."""
_MAX_VALUE: Final = 200
_MAX_KEYS: Final = 64


class State(NamedTuple):
    """What torch reads when it compiles an FX graph, apart from the graph.

    Attributes:
        thread: thread that compiles, if it has its own settings (torch 2.15), or 0.
        settings: digest of Inductor's settings.
        registered: digest of switches and registrations.
    """

    thread: int
    settings: bytes
    registered: str

    def equals(self, other: "State") -> bool:
        """Return whether both states are the same. Compare Inductor's settings only within one
        thread: those of two threads may differ although the program has changed none.
        """
        is_same = self.settings == other.settings or self.thread != other.thread
        return is_same and self.registered == other.registered


def current_state(without: Collection[str] = ()) -> State:
    """Return the state in which this thread would compile an FX graph now.

    `without`: names of Inductor's settings to ignore.
    """
    return _make_state(ambient_state(), registrations().lines, without)


def options_of_compilation() -> frozenset[str]:
    """Return the names of the settings that this thread's call of `torch.compile` has given.

    torch sets them while it compiles the forward or the backward graph, and then resets them. So a
    state after the compilation can be compared only without these settings.
    """
    frame: FrameType | None = sys._getframe()
    names: set[str] = set()
    while frame is not None:
        if (
            frame.f_code.co_name == "compile_fx"
            and frame.f_globals.get("__name__") == "torch._inductor.compile_fx"
        ):
            names.update(frame.f_locals.get("config_patches") or ())
        frame = frame.f_back
    return frozenset(names)


class KeyInfo:
    """Completes torch's keys, and remembers the contents of recent keys. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the fields below
        self._lines: OrderedDict[str, list[str]] = OrderedDict()  # what each key hashes
        self._unshared: OrderedDict[str, str] = OrderedDict()  # why keys are not shared
        self._states: OrderedDict[str, State] = OrderedDict()  # of FX graphs
        self._thread = _ThreadState()

    def wrap_key_maker(self, make_key: Callable[..., tuple[str, list[str]]]) -> Callable[..., Any]:
        """Wrap a function of torch that makes keys."""

        @wraps(make_key)
        def make_completed_key(
            graph: Any, inputs: Any, *args: Any, **kwargs: Any
        ) -> tuple[str, list[str]]:
            self._thread.latest = None
            key, lines = make_key(graph, inputs, *map(_without_random_name, args), **kwargs)
            try:
                found = _complete_key(key, getattr(graph, "gm", graph), inputs, *args[:1])
                key = found.key
                self._remember(self._lines, key, [*lines, *found.lines])
                if found.is_compiled:
                    self._remember(self._states, key, _make_state(found.ambient, found.registered))
                self._thread.latest = (found.ambient, found.registered)
            except Exception as error:  # noqa: BLE001 - the hook's outermost frame
                # torch's caches on this host still use torch's key. The hook does not share it.
                self._remember(self._unshared, key, str(error) or repr(error))
            return key, lines

        return make_completed_key

    def state_of_key(self, without: Collection[str] = ()) -> State:
        """Return the state in which this thread made its latest key, see `current_state`.

        While torch looks up an entry by this key, no program's code can change the state.
        """
        if self._thread.latest is None:
            return current_state(without)
        return _make_state(*self._thread.latest, without)

    def why_unshared(self, name: str) -> str:
        """Return why the entry with this name is not shared, or an empty string."""
        with self._lock:
            return next((why for key, why in self._unshared.items() if key in name), "")

    def is_of_one_state(self, entry: str) -> bool:
        """Return whether all FX graphs that an entry names were compiled in one state.

        torch compiles a backward graph at the first backward pass. If the program has changed a
        setting by then, the entry does not hold what its key stands for.
        """
        with self._lock:
            named = [self._states.get(key) for key in _FX_KEY.findall(entry)]
        found = [each for each in named if each is not None]
        return all(one.equals(other) for one, other in combinations(found, 2))

    def _remember(self, place: OrderedDict[str, Any], key: str, value: Any) -> None:
        with self._lock:
            place[key] = value
            while place is self._lines and len(place) > _MAX_KEYS:
                place.popitem(last=False)

    def details(self, name: str) -> dict[str, str]:
        """Return environment variables, and the contents of the key in an entry's name if known."""
        with self._lock:
            lines = next((each for key, each in self._lines.items() if key in name), [])
        details: dict[str, str] = {}
        inputs: list[str] = []
        layout: list[str] = []
        settings: list[str] = []
        for line in lines:
            found = _LINE.fullmatch(line)
            if found is None:
                continue
            digest, what, index, value = found.groups()
            if what == "gm":
                details |= {"program": digest, **_contents_of_graph(value)}
            elif what == "example_inputs":
                layout += _describe_layout(len(inputs), value)
                inputs.append(_describe_input(value))
            elif what != "inductor_config" or not _is_default(index):
                label = what if index is None else f"{what}.{index}"
                settings.append(f"{label}={_ADDRESS.sub('', value)[:_MAX_VALUE]}")
        if lines:
            is_dynamic = any(_SYMBOL.search(each) for each in inputs)
            details |= {
                "inputs": ", ".join(inputs),
                "layout": " ".join(layout),
                "setting.dynamic": str(is_dynamic),
                "settings": "\n".join(sorted(settings)),
            }
        return details | _variables(os.environ)


class _CompletedKey(NamedTuple):
    """A completed key.

    Attributes:
        lines: lines with the added parts, like torch's.
        is_compiled: whether it is the key of an FX graph.
        registered: descriptions of the user's code that takes part in compiling every graph.
    """

    key: str
    lines: list[str]
    is_compiled: bool
    ambient: str
    registered: list[str]


class _ThreadState(threading.local):
    """State of one thread: the switches and registrations in its latest key, if it has any."""

    latest: tuple[str, list[str]] | None = None


def _complete_key(key: str, graph: Any, inputs: Any, settings: Any = None) -> _CompletedKey:
    """Return the completed key. `settings` are torch's.

    Raises:
        UndescribableError: no key can describe the switches or the code.
    """
    if unknown := unknown_switches():
        raise UndescribableError(f"torch has switches that are not known: {', '.join(unknown)}")
    if setting := setting_with_rank():
        raise UndescribableError(f"{setting} writes the rank of the process into graphs")
    of_autograd = settings if isinstance(settings, AOTConfig) else None
    ambient, registered = ambient_state(), registrations()
    code = user_code_of(graph, inputs, of_autograd, registered)
    suffix = GPU_SUFFIX if _is_on_gpu(graph, inputs) else ""
    # torch generates C++ code for one target, and compiles what its own cache holds for another.
    target = "" if suffix else repr(cpu_target())
    digest = codecache.sha256_hash(f"{key}\0{ambient}\0{code}\0{target}".encode())
    lines = [f"[{sha256(code.encode()).hexdigest()[:16]}] user_code: {bool(code)}"]
    switches = (line.partition("=") for line in ambient.splitlines())
    lines += [f"[switch] ambient[{name}]: {state}" for name, _, state in switches]
    whole = f"{key[0]}{digest}{suffix}"
    return _CompletedKey(whole, lines, of_autograd is None, ambient, registered.lines)


def _without_random_name(settings: Any) -> Any:
    """Return settings of AOTAutograd without the random name of a graph that is compiled ahead.

    A program that saves its compiled graphs, such as vLLM, stores them under these names. torch's
    key contains the name, so the key would never recur. A hit gets the name of the present run.
    """
    if getattr(settings, "precompile_backend_id", None) is None:  # torch 2.7 has no such name
        return settings
    return replace(settings, precompile_backend_id="any")


def _make_state(ambient: str, registered: list[str], without: Collection[str] = ()) -> State:
    late = _digest_late_state(ambient, tuple(registered), frozenset(without))
    thread = threading.get_ident() if hasattr(config, "_hash_dirty_var") else 0
    return State(thread, _hash_settings(without), late)


@lru_cache(maxsize=4)
def _digest_late_state(ambient: str, registered: tuple[str, ...], without: frozenset[str]) -> str:
    """Return the digest of registrations, and of the switches that Inductor reads."""
    ignored = {f"setting.{name}" for name in without}
    switches = [
        each
        for each in ambient.splitlines()
        if _READ_LATE.match(each) and each.partition("=")[0] not in ignored
    ]
    return sha256(repr((switches, registered)).encode()).hexdigest()


def _hash_settings(without: Collection[str]) -> bytes:
    """Return a hash of Inductor's settings, like torch's, apart from some of them."""
    if not without:
        return config.get_hash()
    untyped: Any = config
    values = untyped._get_dict(ignored_keys=[*untyped._compile_ignored_keys, *without])
    return sha256(repr(sorted(values.items())).encode()).digest()


def _is_on_gpu(graph: Any, inputs: Any) -> bool:
    """Return whether all tensors of a graph are on GPUs, and Inductor's wrapper is in Python."""
    values = list(inputs)
    if config.cpp_wrapper or not any(isinstance(each, torch.Tensor) for each in values):
        return False
    for module in graph.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                value = node.meta.get("val", node.meta.get("example_value"))
                if value is None and node.op.startswith("call_"):
                    return False
                values.append(value)
    tensors = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
    return all(each.device.type in GPUS for each in tensors)


def _describe_input(value: str) -> str:
    """Return a tensor's type and shape, e.g. `float32[8, 4]`, or torch's text of another input."""
    found = _TENSOR.search(value)
    return f"{found[1]}[{found[2]}]" if found else value[:_MAX_VALUE]


def _describe_layout(number: int, value: str) -> list[str]:
    """Return what is unusual about an input: its strides, and whether it requires a gradient."""
    layout = []
    if (found := _STRIDES.search(value)) and not _is_contiguous(found[1], found[2]):
        layout.append(f"{number}:stride=({found[2].replace(' ', '')})")
    if "requires_grad=True" in value:
        layout.append(f"{number}:requires_grad")
    return layout


def _is_contiguous(shape: str, stride: str) -> bool:
    """Return whether strides are those of a contiguous tensor; symbols count as such."""
    try:
        extents = [int(each) for each in shape.split(",") if each.strip()]
        steps = [int(each) for each in stride.split(",") if each.strip()]
    except ValueError:
        return True
    expected = 1
    for extent, step in zip(reversed(extents), reversed(steps), strict=True):
        if extent != 1 and step != expected:
            return False
        expected *= extent
    return True


def _contents_of_graph(text: str) -> dict[str, str]:
    """Return the operations and the numbers in the text of a graph."""
    operations = Counter(aten or named or "matmul" for aten, named, _ in _OPERATION.findall(text))
    return {
        "operations": " ".join(f"{name}={count}" for name, count in sorted(operations.items())),
        "constants": " ".join(_NUMBER.findall(text)[:_MAX_NUMBERS]),
    }


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in `_READ`. They set defaults of Inductor's settings, and `details`
    omits a setting that has its default.
    """
    return {f"env.{name}": value for name, value in environ.items() if name in _READ}


def _is_default(name: str) -> bool:
    try:
        return not is_changed(config, name)
    except Exception:  # noqa: BLE001 - a private name; without it, list all settings
        return False
