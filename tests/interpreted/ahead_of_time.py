"""Compile kernels for targets without a GPU; print kernel, target, shared bytes, their limit, spilled bytes.

cuobjdump of the wheel says what a cubin spills, the notes of the assembler text what gfx942 does; where
neither is there the last column says `unknown`. All kernels are compiled for sm_90, those that read
the whole cache for every target.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rcq_cli.kernels._triton import attend, judge, pages, plan, score, seal
from rcq_cli.kernels._triton.arithmetic import WARPS

TARGETS = {
    # name: target and shared memory of a thread block, bytes
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
}
POINTERS = {
    "fp16": "q tail pool host source output scale offset first second notes",
    "fp32": "extra stats weights tail_notes partial",
    "fp64": "centre constants seen state spectra fields out left",
    "i64": "faults checks counts prints",
    "i32": "slots owner used fresh queue",
    "i16": "host_keys host_values",
    "i8": "codes",
    "u8": "packed marks flags",
    "i1": "raw",
}
BLOCK: dict[str, Any] = {"S": 32, "SP": 32, "D": 128, "DP": 128}
ROWS: dict[str, Any] = {"R": 4, "RP": 16}
VALUES: dict[str, Any] = {"G": 16, "TWO": True}
WIDE: dict[str, Any] = {"MP": 256}
JUDGE: dict[str, Any] = {
    "FINAL": True, "PARTS": 128, "NP": 128, "LARGEST": 65504.0, "R": 4, "S": 32, "D": 128, "DP": 128,
}  # fmt: skip
JOBS: dict[str, tuple[Any, dict[str, Any], dict[str, str]]] = {
    "score": (score.score, {"PER": 8, **ROWS, **BLOCK}, {}),
    "rescore": (score.rescore, {"PER": 8, "PROBE": False, **ROWS, **BLOCK}, {}),
    "verify": (score.verify, {"PER": 8, "STORE": False, "GP": 8, "NARROW": True, **VALUES, **BLOCK}, {}),
    "plan": (plan.plan, {"FIRST": True, "R": 4, "S": 32, "D": 128, "DP": 128, **WIDE}, {}),
    "assign": (pages.assign, {"CP": 32, **WIDE, **ROWS}, {}),
    "page_in": (pages.page_in, BLOCK, {"pool": "i16"}),
    "attend": (attend.attend, {"LATE": False, **ROWS, **BLOCK, **VALUES}, {}),
    "attend_late": (attend.attend, {"LATE": True, **ROWS, **BLOCK, **VALUES}, {}),
    "judge": (judge.judge, {**JUDGE, **WIDE}, {}),
    "seal_keys": (seal.seal_keys, {"NARROW": True, **BLOCK}, {"raw": "i32", "notes": "fp64"}),
    "value_meta": (seal.value_meta, {"GP": 16, **VALUES, **BLOCK}, {"raw": "i32"}),
    "value_codes": (seal.value_codes, {**VALUES, **BLOCK}, {}),
    "decode": (seal.decode, {"COMPARE": True, **VALUES, **BLOCK}, {"notes": "fp64"}),
    "print_rows": (seal.print_rows, BLOCK, {"source": "i16"}),
}  # fmt: skip

STEP = ("score", "attend")
"""The kernels that read the whole cache; compiled for every target."""


def compiled(function: Any, constants: dict[str, Any], other: dict[str, str], target: GPUTarget) -> Any:
    """Compile one kernel; every argument that is no pointer is a 32-bit integer."""
    types = {name: kind for kind, names in POINTERS.items() for name in names.split()} | other
    signature = {
        name: "constexpr" if name in constants else f"*{types[name]}" if name in types else "i32"
        for name in function.arg_names
    }
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    return triton.compile(source, target=target, options={"enable_fp_fusion": False, "num_warps": WARPS})


def spilled(kernel: Any) -> str:
    """Return the bytes of stack a thread needs, which is where registers spill; `unknown` without a tool."""
    if "amdgcn" in kernel.asm:
        found = re.search(r"vgpr_spill_count:\s*(\d+)", kernel.asm["amdgcn"])
        return str(4 * int(found[1])) if found else "unknown"
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return "unknown"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return str(max(int(n) for n in re.findall(r"STACK:(\d+)", said)))


def main() -> None:
    for name, (target, limit) in TARGETS.items():
        for job, (function, constants, other) in JOBS.items():
            if name != "sm_90" and job not in STEP:
                continue
            kernel = compiled(function, constants, other, target)
            print(job, name, kernel.metadata.shared, limit, spilled(kernel), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
