"""Backend `cpu` at the width of vectors that is not this processor's: 16 numbers (AVX-512) or 8 (AVX2)."""

import os
import subprocess
import sys
from pathlib import Path

from numba.core import codegen

from rcq_cli.kernels._cpu_vector import WIDE

CHOSEN = "guarded or edges or option or naive or codes or spectra or (hidden and cpu) or (error and dtype1)"


def without_avx512() -> dict[str, str]:
    """Return what has Numba compile for this processor as if it had no AVX-512."""
    own = codegen.get_host_cpu_features().split(",")
    features = ["-" + f[1:] if f[1:].startswith(("avx512", "avx10", "evex")) else f for f in own]
    return {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ",".join(features)}


def test_kernels_are_right_at_the_other_width(tmp_path: Path) -> None:
    files = [f"tests/unit/test_cpu_{name}.py" for name in ("backend", "exact", "spectra")]
    files += ["tests/unit/test_hidden_weight.py"]
    plugin = [] if WIDE else ["-p", "tests.unit.sixteen_lanes"]
    command = [sys.executable, "-m", "pytest", "-q", *plugin, "-k", CHOSEN, *files]
    # compiled code of another width must not be found by later runs
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)} | (without_avx512() if WIDE else {})
    root = Path(__file__).parents[2]
    result = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "passed" in result.stdout
