"""Backend `triton-fused` without a GPU: interpreted and compiled ahead of time, each in a process of its own.

Whether Triton interprets or compiles is decided when it is imported; interpreted kernels cannot be compiled.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rcq_cli.backends import BACKENDS, choose_backend
from rcq_cli.errors import UnsupportedHere
from rcq_cli.protocols import Geometry

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = (
    "triton-fused and (name_and_says or one-channel or alternating or S7 and keys_come and True"
    " or G4 and keys_come and False or S7 and values_come or G4 and values_come"
    " or whole_step and heads1 and 33)"
)
triton = pytest.importorskip("triton", reason="Triton has no wheel for this platform")


def run(*command: str, **variables: str) -> str:
    """Run Python in a process of its own; return what it printed, or fail with it."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
    found = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-3000:]
    return found.stdout


def test_interpreted_kernels_keep_every_promise():
    passed = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/interpreted/check_triton.py")
    assert " passed" in passed
    assert "skipped" not in passed


def test_the_contract_of_every_backend_holds_when_interpreted():
    passed = run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.interpreted.quick",
        "-W", "ignore::RuntimeWarning", "tests/contracts/test_every_backend.py", "-k", CONTRACT,
        TRITON_INTERPRET="1",
    )  # fmt: skip
    assert " passed" in passed
    assert "skipped" not in passed


def test_kernels_compile_for_every_target_within_its_shared_memory(tmp_path):
    printed = run("tests/interpreted/ahead_of_time.py", TRITON_CACHE_DIR=str(tmp_path))
    rows = [line.split() for line in printed.splitlines()]
    assert {target for _, target, *_ in rows} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    for kernel, target, shared, limit, spilled in rows:
        assert int(shared) <= int(limit), f"{kernel} on {target}"
        # exact scores of promoted blocks hold query, keys and both scores in registers
        most = 256 if kernel == "rescore" else 0
        assert spilled == "unknown" or int(spilled) <= most, f"{kernel} on {target} spills {spilled} bytes"


def test_it_says_why_it_cannot_run_on_this_machine():
    geometry = Geometry(4, 2, 64, "float32", "cpu", 0.125)
    assert "needs a CUDA or ROCm device" in BACKENDS.load("triton-fused").unsupported(geometry)
    with pytest.raises(UnsupportedHere, match="triton-fused cannot run here"):
        choose_backend("triton-fused", geometry)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_benchmark_says_that_it_needs_a_gpu():
    found = subprocess.run(
        [sys.executable, "benchmarks/gpu.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 7
    assert found.stdout == ""
    assert "no CUDA or ROCm device" in found.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
def test_on_a_gpu_a_step_is_within_its_bound_and_waits_for_nothing():
    from rcq_cli import LayerCache

    gen = torch.Generator().manual_seed(1)
    k, v = (torch.randn(8, 4100, 128, generator=gen).bfloat16() for _ in "kv")
    cache = LayerCache(
        "certified", query_heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda:0",
        backend="triton-fused",
    )  # fmt: skip
    cache.prefill(k.to("cuda:0"), (v + 0.5).to("cuda:0"))
    query = torch.randn(32, 128, generator=gen).bfloat16().to("cuda:0")
    cache.attend(query)
    taken = cache.attend(query)
    error = (taken.output.double() - cache._state.exact(query)).norm(dim=-1)
    assert bool((error <= taken.certificate.total_bound).all())
    torch.cuda.set_sync_debug_mode("error")
    try:
        cache._state._work(query).launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
