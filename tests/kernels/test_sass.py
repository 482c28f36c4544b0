"""The scan of machine code finds what it is there for: in listings written by hand, and in a real one without waits."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from build_tools.kernels import aot as triton_aot
from build_tools.kernels import sass as triton_sass

ROOT = Path(__file__).parents[2]

PRODUCT = "HGMMA.64x16x16.F32.BF16 R24, gdesc[UR4], R24, gsb0"  # sums in R24 to R31
FROM_REGISTERS = "HGMMA.64x16x16.F32.BF16 R24, R8, gdesc[UR4], R24, gsb0"  # a factor in R8 to R11
EIGHT_BITS = "QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24, gsb0"
WAIT, WAIT_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"


def listing(*lines: str) -> str:
    """As nvdisasm writes it; lines that end in a colon are labels."""
    return "\n".join(
        line if line.endswith(":") else f"        /*{16 * i:04x}*/    {line} ;" for i, line in enumerate(lines)
    )


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([PRODUCT, WAIT, "FADD R1, R24, R25", "EXIT"], []),
        ([PRODUCT, "FADD R1, R24, R25", WAIT, "EXIT"], ["uses a sum (R24)"]),
        ([PRODUCT, "MOV R31, R1", WAIT, "EXIT"], ["uses a sum (R31)"]),
        ([PRODUCT, "FADD R32, R1, R2", WAIT, "EXIT"], []),
        ([FROM_REGISTERS, "MOV R11, R1", WAIT, "EXIT"], ["overwrites a factor (R11)"]),
        ([FROM_REGISTERS, "MOV R1, R11", WAIT, "EXIT"], []),  # a factor may be read
        ([FROM_REGISTERS, "LDS.128 R4, [R1]", "LDS.128 R5, [R1]", WAIT, "EXIT"], ["overwrites a factor (R8)"]),
        ([FROM_REGISTERS, "STS.128 [R1], R8", WAIT, "EXIT"], []),
        ([PRODUCT, PRODUCT, WAIT_BUT_ONE, "FADD R1, R24, R25", "EXIT"], ["uses a sum (R24)"]),
        ([FROM_REGISTERS, PRODUCT, WAIT_BUT_ONE, "MOV R8, R1", WAIT, "EXIT"], []),  # only the second is under way
        ([FROM_REGISTERS, "@P0 BRA `(.L_x_1)", WAIT, ".L_x_1:", "MOV R8, R1", "EXIT"], ["overwrites a factor (R8)"]),
        ([".L_x_0:", "MOV R8, R1", FROM_REGISTERS, "@P0 BRA `(.L_x_0)", "EXIT"], ["overwrites a factor (R8)"]),
    ],
)
@pytest.mark.parametrize("eight_bits", [False, True])
def test_registers_of_products_under_way(lines: list[str], found: list[str], eight_bits: bool) -> None:
    if eight_bits:
        lines = [line.replace("HGMMA.64x16x16.F32.BF16", "QGMMA.64x16x32.F32.E4M3.E4M3") for line in lines]
    hazards = triton_sass.scan(listing(*lines)).hazards
    assert len(hazards) == len(found)
    assert all(words in hazard for words, hazard in zip(found, hazards, strict=True))


def test_products_that_are_waited_for_one_by_one() -> None:
    together = triton_sass.scan(listing(PRODUCT, PRODUCT, PRODUCT, WAIT, "EXIT"))
    one_by_one = triton_sass.scan(listing(PRODUCT, WAIT, PRODUCT, WAIT, "EXIT"))
    assert (together.products, together.alone) == (3, 1)
    assert triton_sass.scan(listing(EIGHT_BITS, EIGHT_BITS, WAIT, "EXIT")).products == 2
    assert (one_by_one.products, one_by_one.alone) == (2, 2)


def test_accesses_and_sizes() -> None:
    body = ["LDG.E.U16 R1, [R2]", "LDG.E.128 R4, [R2]", "STG.E.U8 [R2], R1", "LDS.U16 R1, [R2]"]
    found = triton_sass.scan(listing("MOV R0, R1", ".L_x_0:", *body, "@P0 BRA `(.L_x_0)", "EXIT"))
    assert (found.narrow, found.accesses) == (2, 3)
    assert (found.bytes, found.loop) == (7 * 16, 5 * 16)


LISTING = """
from build_tools.kernels import jobs, launches, sass
named = next(named for named in launches.jobs(90) if named.name == "attention bf16 64 causal: forward")
print(sass.disassemble(jobs.compile_job(named.job).asm["cubin"]))
"""


@pytest.mark.slow
def test_a_kernel_without_its_waits() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if triton_sass.disassembler() is None:
        pytest.skip("there is no nvdisasm, neither Triton's nor CUDA's")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", LISTING]
    text = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert not triton_sass.scan(text).hazards
    without, count = re.subn(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x\d", "NOP", text)
    assert count > 1
    assert len(triton_sass.scan(without).hazards) > 100


LOG = """ptxas info    : Compiling entry function '_forward' for 'sm_90a'
ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to something
ptxas info    : Used 216 registers, used 1 barriers
"""


def test_warnings_of_ptxas() -> None:
    (warning,) = triton_aot.serialised(LOG)
    assert warning.startswith("(C7515) Potential Performance Loss: wgmma")


def test_faults_of_the_code() -> None:
    code = triton_sass.Findings(["MOV: uses a sum"], products=8, alone=8, narrow=16, accesses=16, bytes=0, loop=2**18)
    names = [*triton_aot._INSTRUCTIONS]
    report = triton_aot.Report("m", "n", 90, 8, 3, 99, 0, 0, dict.fromkeys(names, 1), True, True, 3, code=code)
    assert len(report.faults()) == 4
    assert len(dataclasses.replace(report, aligned=False).faults()) == 3
    assert dataclasses.replace(report, code=None, warnings=["(C7515) serialized"]).faults() == [
        "ptxas says: (C7515) serialized"
    ]
