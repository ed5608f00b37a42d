"""Backend `cpu` with vectors of 16 numbers, as on processors with AVX-512, wherever the tests run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rcq_cli.kernels._cpu_vector import WIDE

CHOSEN = "edges or option or naive or codes or spectra or (error and dtype1)"


@pytest.mark.skipif(WIDE, reason="all other tests of this backend use such vectors here")
def test_kernels_are_right_with_vectors_of_sixteen(tmp_path: Path) -> None:
    files = (f"tests/unit/test_cpu_{name}.py" for name in ("backend", "spectra"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.unit.sixteen_lanes", "-k", CHOSEN, *files]
    # compiled code of another width must not be found by later runs
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    root = Path(__file__).parents[2]
    result = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "passed" in result.stdout
