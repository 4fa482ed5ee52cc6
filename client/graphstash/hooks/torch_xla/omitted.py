"""Operations with attributes that torch_xla omits from the name of a graph.

torch_xla names a graph by the hashes of its operations. The operations below hash their operands,
but omit an attribute that their lowering uses. Two graphs that differ only in the alpha of `celu`
have the same name. Within one process, torch_xla runs the first of them in place of both. With a
shared cache, a job with alpha 1 could also run the graph of another job with alpha 2.

Therefore `observer` records the attribute wherever torch_xla creates a node, in lazy and compiled
steps alike. If it had a single value in this process, all graphs contain that value, which is a
part of the key. If it had several, a name does not determine the value in its graph. From then on,
the hook does not share the graphs of this process.

The list comes from a review of every `XlaNode`, and every `GenericOp` whose lowering captures a
value, in the sources of 2.7. A test compares names and lowered programs of torch's operations.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import torch_xla

from graphstash.hooks.torch_xla.observer import Argument, observe

__all__ = ["OPERATIONS", "OmittedAttributes", "Operation", "omitted_attributes"]

_VALUE: Final = "RKN5torch4lazy5ValueE"
_TENSOR: Final = (
    "N3c1013intrusive_ptrINS_9XLATensorENS0_6detail34intrusive_target_default_null_typeIS2_EEEE"
)
_STRING: Final = "RKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of torch_xla whose hash omits an attribute.

    Attributes:
        name: The operation's name in torch, followed by the omitted attributes.
        symbols: Functions of the extension that create the operation's nodes.
        arguments: Arguments to observe in each of these functions.
        describe: Returns a text for the key from the values of the arguments, in order. Returns
            None if a key cannot represent them.
        usual: The text for the values that almost all programs use. It is left out of the key, so
            a process that never calls the operation has the same key.
    """

    name: str
    symbols: tuple[str, ...]
    arguments: tuple[Argument, ...]
    describe: Callable[[Sequence[int]], str | None]
    usual: str


def _scalar(name: str, tag: str, value: str, register: str) -> tuple[Argument, Argument]:
    """Return the arguments that observe type and value of a `c10::Scalar` passed by reference."""
    return (
        Argument(f"{name}'s type", tag, f"mov eax, [{register}]"),
        Argument(name, value, f"mov rax, [{register} + 16]"),
    )


def _scalars(values: Sequence[int]) -> str | None:
    words = []
    for tag, value in zip(values[::2], values[1::2], strict=True):
        if tag == 0:
            words.append(repr(_as_float(value)))
        elif tag in (1, 4):  # integers and booleans
            words.append(str(_as_signed(value)))
        else:  # complex and symbolic numbers occupy more than one word
            return None
    return " ".join(words)


def _as_float(value: int) -> float:
    return float(struct.unpack("<d", struct.pack("<Q", value))[0])


def _as_signed(value: int, *, bits: int = 64) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def _growth(values: Sequence[int]) -> str:
    growth, backoff, interval = values
    return f"{_as_float(growth)!r} {_as_float(backoff)!r} {_as_signed(interval, bits=32)}"


def _integer(values: Sequence[int]) -> str:
    return str(_as_signed(values[0]))


def _axis(values: Sequence[int]) -> str:
    return str(_as_signed(values[0], bits=32))


def _divisor(values: Sequence[int]) -> str:
    is_given, divisor = values
    return str(_as_signed(divisor, bits=32)) if is_given else "none"


def _never(_values: Sequence[int]) -> None:
    """Return None: the omitted attributes are not numbers, so a key cannot represent them."""


_SECOND: Final = Argument("second integer", "48 89 d0", "mov rax, rdx")
"""The argument after the operand. It is in `rdx`: `rdi` has the address for the result."""

OPERATIONS: Final = (
    Operation(
        "celu (alpha)",
        (f"_ZN9torch_xla4CeluE{_VALUE}RKN3c106ScalarE",),
        _scalar("alpha", "8b 02", "48 8b 42 10", "rdx"),
        _scalars,
        "1.0",
    ),
    Operation(
        "elu_backward (alpha, scale, input_scale)",
        (f"_ZN9torch_xla11EluBackwardE{_VALUE}S4_RKN3c106ScalarES8_S8_",),
        (
            *_scalar("alpha", "8b 01", "48 8b 41 10", "rcx"),
            *_scalar("scale", "41 8b 00", "49 8b 40 10", "r8"),
            *_scalar("input_scale", "41 8b 01", "49 8b 41 10", "r9"),
        ),
        _scalars,
        "1.0 1 1",
    ),
    Operation(
        "pixel_shuffle (upscale_factor)",
        (f"_ZN9torch_xla12PixelShuffleE{_VALUE}l",),
        (_SECOND,),
        _integer,
        "2",
    ),
    Operation(
        "GradScaler (growth_factor, backoff_factor, growth_interval)",
        (f"_ZN9torch_xla14AmpUpdateScaleC1E{_VALUE}S5_S5_ddi",),
        (
            Argument("growth_factor", "66 48 0f 7e c0", "movq rax, xmm0"),
            Argument("backoff_factor", "66 48 0f 7e c8", "movq rax, xmm1"),
            Argument("growth_interval", "44 89 c0", "mov eax, r8d"),
        ),
        _growth,
        "2.0 0.5 2000",
    ),
    Operation(
        "avg_pool (divisor_override)",
        (f"_ZN9torch_xla9AvgPoolNdC1E{_VALUE}lSt6vectorIlSaIlEES8_S8_bbSt8optionalIiE",),
        (  # the mask hides the uninitialized integer of an empty optional
            Argument("is given", "0f b6 44 24 1c", "movzx eax, byte ptr [rsp + 28]"),
            Argument(
                "divisor_override",
                "0f b6 44 24 1c f7 d8 23 44 24 18",
                "movzx eax, byte ptr [rsp + 28]; neg eax; and eax, [rsp + 24]",
            ),
        ),
        _divisor,
        "none",
    ),
    Operation(
        "index_add (dim)",
        (f"_ZN9torch_xla8IndexAddERK{_TENSOR}lS8_S8_",),
        (_SECOND,),
        _integer,
        "0",
    ),
    Operation(
        "index_copy (dim)",
        (f"_ZN9torch_xla9IndexCopyERK{_TENSOR}lS8_S8_",),
        (_SECOND,),
        _integer,
        "0",
    ),
    *(
        Operation(
            f"{name}_tensor (axis)",
            (f"_ZN9torch_xla{kind}C1E{_VALUE}RKSt6vectorIfSaIfEERKS6_IiSaIiEEii{_STRING}i",),
            (Argument("axis", "8b 44 24 10", "mov eax, [rsp + 16]"),),
            _axis,
            "-1",
        )
        for name, kind in (("quantize", "14QuantizeTensor"), ("dequantize", "16DequantizeTensor"))
    ),
    Operation(
        "custom_call (backend_config, api_version, attributes, shapes)",
        (
            (
                "_ZN9torch_xla10CustomCallC1EN3c108ArrayRefIN5torch4lazy5ValueEEE"
                f"{_STRING}N3xla5ShapeEbSE_iRKSt13unordered_mapISC_SC_St4hashISC_ESt8equal_toISC_E"
                "SaISt4pairISD_SC_EEE"
            ),
            (
                "_ZN9torch_xla10CustomCallC1EN3c108ArrayRefIN5torch4lazy5ValueEEE"
                f"{_STRING}N3xla5ShapeEbSE_i"
            ),
        ),
        (),
        _never,
        "",
    ),
    Operation(
        "gpu_custom_call (shapes)",
        (
            (
                "_ZN9torch_xla13GpuCustomCallC1EN3c108ArrayRefIN5torch4lazy5ValueEEEN3xla5ShapeE"
                f"{_STRING}"
            ),
        ),
        (),
        _never,
        "",
    ),
    Operation(
        "manual sharding (full shape)",
        (f"_ZN9torch_xla14CustomShardingC1E{_VALUE}RKN3xla5ShapeERKNS0_4TypeE",),
        (Argument("type", "8b 01", "mov eax, [rcx]"),),
        lambda values: None if values[0] else "0",
        "0",
    ),
    Operation(
        "exponential_ (shape)",
        (
            (
                "_ZN9torch_xla14tensor_methods12exponential_ERN3c1013intrusive_ptrINS_9XLATensorENS1_"
                "6detail34intrusive_target_default_null_typeIS3_EEEEd"
            ),
        ),
        (),
        _never,
        "",
    ),
    Operation(
        "bernoulli_ with a tensor (shape)",
        (
            (
                "_ZN9torch_xla14tensor_methods10bernoulli_ERN3c1013intrusive_ptrINS_9XLATensorENS1_"
                "6detail34intrusive_target_default_null_typeIS3_EEEERKS7_"
            ),
        ),
        (),
        _never,
        "",
    ),
    Operation(
        "cat (dtype of empty tensors)",
        (  # the tensors that `cat` receives, and the tensors that become operands
            (
                "_ZN9torch_xla14tensor_methods3catEN4absl12lts_202308024SpanIKN3c1013intrusive_ptrINS_"
                "9XLATensorENS4_6detail34intrusive_target_default_null_typeIS6_EEEEEElNS4_10ScalarTypeE"
            ),
            "_ZN9torch_xla3CatC1EN3c108ArrayRefIN5torch4lazy5ValueEEElNS1_10ScalarTypeE",
        ),
        (Argument("number of tensors", "48 89 d0", "mov rax, rdx", is_added=True),),
        lambda counts: "without" if counts[0] == counts[1] else None,
        "without",
    ),
)

_POOL: Final = f"_ZN3tsl6thread10ThreadPoolC1EPNS_3EnvERKNS_13ThreadOptionsE{_STRING}i"
"""The constructor with which XLA's client for CPUs makes its two pools when the runtime starts."""

_POOL_SIZE: Final = Argument("number of threads", "44 89 c0", "mov eax, r8d", is_added=True)


class OmittedAttributes:
    """Observes the values of the omitted attributes in this process.

    Args:
        library: Path of torch_xla's extension.

    Raises:
        GateUnavailable: An operation cannot be observed in this build or on this host.
    """

    def __init__(self, library: Path) -> None:
        functions = [(name, each.arguments) for each in OPERATIONS for name in each.symbols]
        self._pools, *rest = observe(library, [(_POOL, (_POOL_SIZE,)), *functions])
        self._threads = ""
        observers = iter(rest)
        self._observers = [(each, [next(observers) for _ in each.symbols]) for each in OPERATIONS]

    def threads(self) -> str:
        """Return the number of threads in the pools of XLA's client. Empty before it starts.

        Call it before the first compilation: compilers make further pools.
        """
        if not self._threads and (seen := self._pools.observation()).called:
            self._threads = str(seen.values[0])
        return self._threads

    def values(self) -> dict[str, str]:
        """Return the unusual values by operation name.

        A value is "" if a key cannot represent it, for example because it differed between calls.
        """
        found = {}
        for operation, observers in self._observers:
            seen = [observer.observation() for observer in observers]
            if any(each.called for each in seen):
                values = [value for each in seen for value in each.values]
                known = [value for value in values if value is not None]
                words = operation.describe(known) if len(known) == len(values) else None
                if words != operation.usual:
                    found[operation.name] = words or ""
        return found


@cache
def omitted_attributes() -> OmittedAttributes:
    """Observe torch_xla from the first call until the process ends.

    The observers remain when a hook is removed. A hook that is installed later also needs the
    values of the calls before.

    Raises:
        GateUnavailable: An operation cannot be observed in this build or on this host.
    """
    return OmittedAttributes(Path(torch_xla._XLAC.__file__))
