"""Matrix multiplication in TVM, on one thread of the CPU. Needs the extra `tvm`.

    for m_0: for n_0: for m_1: for n_1:
        for k_0:
            for m_2: for n_2:
                for k_1:
                    for m_3 (unrolled up to 16): for n_3 (vectorized): C += A * B

The numbers of factors (4, 2 and 4) are those of the GPU kernel for which the searchers `GBFS` and
`NA2C` were published (Zhang et al., "Compiler-Level Matrix Multiplication Optimization for Deep
Learning", arXiv 1909.10616, 2019). The loop order is our own.
"""

from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from time import thread_time
from typing import Any, Final

from graphstash.tuning.measuring import Target
from graphstash.tuning.measuring.outputs import CheckedOutput
from graphstash.tuning.measuring.target import Kernel
from graphstash.tuning.space import Value

__all__ = ["TvmGemm"]

_FACTORS: Final = {"m": 4, "k": 2, "n": 4}

_MAX_LANES: Final = 64
"""Maximum lanes of a vectorized loop. LLVM takes minutes for wider loops, and no vector register
holds more."""

_MAX_UNROLLED: Final = 16


class TvmGemm(Target):
    """C (m x n) = A (m x k) B (k x n) in float32, row-major.

    A configuration has the parameters m_0 to m_3, k_0, k_1, and n_0 to n_3, as in `GemmSpace`: the
    lengths of the loops that each of the three loops is split into, outermost first.

    Args:
        m: rows of the first matrix, and of the result.
        k: columns of the first matrix, rows of the second.
        n: columns of the second matrix, and of the result.
    """

    def __init__(self, m: int, k: int, n: int) -> None:
        self._sizes = {"m": m, "k": k, "n": n}

    def describe(self) -> dict[str, Any]:
        """Return the sizes, the data type, and the installed version of TVM."""
        return {
            "target": "tvm-gemm",
            **self._sizes,
            "dtype": "float32",
            "tvm": version("apache-tvm"),
        }

    def prepare(self) -> None:
        """Import TVM, and create the matrices."""
        import numpy as np
        import tvm

        m, k, n = self._sizes.values()
        self._random = np.random.default_rng(0)
        self._a = tvm.runtime.tensor(np.empty((m, k), np.float32))
        self._b = tvm.runtime.tensor(np.empty((k, n), np.float32))
        self._output = CheckedOutput((m, n), np.float32)
        self._c = tvm.runtime.from_dlpack(self._output.array)  # shares the memory
        self.renew()
        cpu = tvm.target.codegen.llvm_get_system_cpu()
        self._target = tvm.target.Target({"kind": "llvm", "mcpu": cpu})

    def renew(self) -> None:
        """Draw random matrices, and compute their product in float64."""
        import numpy as np

        m, k, n = self._sizes.values()
        a = self._random.standard_normal((m, k), dtype=np.float32)
        b = self._random.standard_normal((k, n), dtype=np.float32)
        self._a.copyfrom(a)
        self._b.copyfrom(b)
        self._reference = a.astype(np.float64) @ b.astype(np.float64)
        # Bound of the rounding errors of k products and sums, in any order (Higham, "Accuracy and
        # Stability of Numerical Algorithms", 3.5): gamma_k |A| |B|, with a unit roundoff of 2^-24.
        unit = k * 2.0**-24
        self._tolerance = unit / (1 - unit) * (np.abs(a, dtype=np.float64) @ np.abs(b))

    def build(self, configuration: Mapping[str, Value]) -> Kernel:
        """Compile the loops for this host's CPU."""
        import tvm

        splits = {
            axis: [int(configuration[f"{axis}_{depth}"]) for depth in range(count)]
            for axis, count in _FACTORS.items()
        }
        function = tvm.compile(self._make_schedule(splits), target=self._target)["main"]
        return partial(function, self._a, self._b, self._c)

    def check(self, kernel: Kernel) -> bool:
        """Return whether each element of the product is within rounding errors of the exact one."""
        self._output.fill_with_garbage()
        kernel()
        return self._output.holds(self._reference, self._tolerance)

    def cost(self, kernel: Kernel, calls: int) -> float:
        """Return mean CPU seconds of this thread, which exclude time that other processes run."""
        started = thread_time()
        for _ in range(calls):
            kernel()
        return (thread_time() - started) / calls

    def _make_schedule(self, splits: Mapping[str, list[int]]) -> Any:
        from tvm import s_tir

        schedule = s_tir.Schedule(_make_module(**self._sizes))
        block = schedule.get_sblock("C")
        m, n, k = schedule.get_loops(block)
        m_0, m_1, m_2, m_3 = schedule.split(m, factors=splits["m"])
        n_0, n_1, n_2, n_3 = schedule.split(n, factors=splits["n"])
        k_0, k_1 = schedule.split(k, factors=splits["k"])
        schedule.reorder(m_0, n_0, m_1, n_1, k_0, m_2, n_2, k_1, m_3, n_3)
        lanes = min(splits["n"][3], _MAX_LANES)
        schedule.vectorize(schedule.split(n_3, factors=[None, lanes])[1])
        if splits["m"][3] <= _MAX_UNROLLED:
            schedule.unroll(m_3)
        schedule.decompose_reduction(block, k_0)
        return schedule.mod


def _make_module(m: int, k: int, n: int) -> Any:
    import tvm
    from tvm import te

    a = te.placeholder((m, k), "float32", name="A")
    b = te.placeholder((k, n), "float32", name="B")
    along = te.reduce_axis((0, k), name="k")
    c = te.compute((m, n), lambda i, j: te.sum(a[i, along] * b[along, j], axis=along), name="C")
    return tvm.IRModule({"main": te.create_prim_func([a, b, c])})
