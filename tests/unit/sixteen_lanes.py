"""A pytest plugin that compiles the CPU kernels for vectors of 16 numbers on any processor.

That is their width with AVX-512. Each such vector becomes two here, and generic code stands in for the
multiply-add of AVX-512; loops, layouts and what is left over at the end of a row are those of such a
processor.
"""

from numba.core import codegen

own = codegen.get_host_cpu_features
codegen.get_host_cpu_features = lambda: f"{own()},+avx512bw"
from rcq_cli.kernels import _cpu_vector  # noqa: E402 - it looks at the features when it is imported

codegen.get_host_cpu_features = own
from rcq_cli.kernels import _cpu_integer  # noqa: E402

_cpu_integer.X86 = False
assert _cpu_vector.LANES == 16
