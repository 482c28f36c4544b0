"""The scan of machine code finds what it is there for in listings written by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from build_tools.kernels import aot as triton_aot
from build_tools.kernels import pending
from build_tools.kernels import sass as triton_sass

ROOT = Path(__file__).parents[2]

PRODUCT = "HGMMA.64x16x16.F32.BF16 R24, gdesc[UR4], R24, gsb0"  # sums in R24 to R31
EIGHT_BITS = "QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def listing(*lines: str) -> str:
    """As nvdisasm writes it; lines that end in a colon are labels."""
    return "\n".join(
        line if line.endswith(":") else f"        /*{16 * i:04x}*/    {line} ;" for i, line in enumerate(lines)
    )


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
    assert found.loop == 5 * 16


def test_the_largest_loop_has_what_lies_elsewhere_and_comes_back() -> None:
    waits = [".L_x_3:", "NOP", "@!P0 BRA `(.L_x_3)", "BRA `(.L_x_2)"]  # behind the end, as ptxas puts them
    small = [".L_x_0:", "NOP", "@P0 BRA `(.L_x_0)"]
    body = [".L_x_1:", "@!P0 BRA `(.L_x_3)", ".L_x_2:", "FADD R1, R2, R3", "@P1 BRA `(.L_x_1)", "EXIT"]
    assert triton_sass.scan(listing(*small, *body, *waits)).loop == 16 * 6


OF_REGISTERS = "HGMMA.64x16x16.F32.BF16 R24, R4, gdesc[UR4].tnspB, R24, gsb0"  # reads R4 to R7
OPEN = OF_REGISTERS.removesuffix(", gsb0")
BEGIN = "WARPGROUP.ARRIVE"


@pytest.mark.parametrize(
    ("why", "lines"),
    [
        ("", ["MOV R4, R1", BEGIN, OPEN, OF_REGISTERS, "MOV R8, R1", WAIT, "MOV R4, R24"]),
        ("what a product still reads", [BEGIN, OF_REGISTERS, "LDS.128 R1, [R9]", WAIT]),
        ("what a product still reads", [BEGIN, OF_REGISTERS, "SHFL.IDX PT, R7, R9, R1, 0x1f", WAIT]),
        ("what a product still reads", [BEGIN, OF_REGISTERS, WAIT.replace("0x0", "0x1"), "MOV R5, RZ"]),
        ("", [BEGIN, OF_REGISTERS, BEGIN, PRODUCT, WAIT.replace("0x0", "0x1"), "MOV R5, RZ"]),
        ("sums are touched", [BEGIN, PRODUCT, "STG.E.128 [R2.64], R28", WAIT]),
        ("sums are touched", [BEGIN, PRODUCT, "@P0 MOV R31, R1", WAIT]),
        ("", [BEGIN, PRODUCT, "ISETP.GE.AND P0, PT, R4, R5, PT", "STS [R4], R23", "R2UR UR24, R5", WAIT]),
        ("a register of a product is written behind", [BEGIN, "MOV R7, R1", OF_REGISTERS, WAIT]),
        ("a register of a product is written behind", [BEGIN, "FMUL R24, R1, R1", PRODUCT, WAIT]),
        ("a product reads sums", [BEGIN, PRODUCT, "HGMMA.64x16x16.F32.BF16 R40, R28, gdesc[UR4], R40, gsb0", WAIT]),
        # In the loop's next turn: nothing waits for the product of the last.
        ("what a product still reads", [".L_x_1:", "MOV R4, R2", BEGIN, OF_REGISTERS, "@P1 BRA `(.L_x_1)", WAIT]),
        ("", [".L_x_1:", WAIT, "MOV R4, R2", BEGIN, OF_REGISTERS, "@P1 BRA `(.L_x_1)", WAIT]),
    ],
)  # fmt: skip
def test_registers_of_products_under_way(why: str, lines: list[str]) -> None:
    found = pending.touched(triton_sass.parse(listing(*lines, "EXIT")))
    assert [text.startswith(why) for text in found] == [True] * bool(why), found


LOG = """ptxas info    : Compiling entry function '_forward' for 'sm_90a'
ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to something
ptxas info    : Used 216 registers, used 1 barriers
"""


def test_warnings_of_ptxas() -> None:
    (warning,) = triton_aot.serialised(LOG)
    assert warning.startswith("(C7515) Potential Performance Loss: wgmma")


def test_faults_of_the_code() -> None:
    code = triton_sass.Findings(products=8, alone=8, narrow=16, accesses=16, loop=2**18)
    names = [*triton_aot._INSTRUCTIONS]
    report = triton_aot.Report("m", "n", 90, 8, 3, 99, 0, 0, dict.fromkeys(names, 1), True, True, 3, code=code)
    assert len(report.faults()) == 3
    assert len(dataclasses.replace(report, aligned=False).faults()) == 2
    touching = dataclasses.replace(report, code=None, touched=["what a product still reads is written: MOV R4, RZ"])
    assert len(touching.faults()) == 1
    assert dataclasses.replace(report, code=None, warnings=["(C7515) serialized"]).faults() == [
        "ptxas says: (C7515) serialized"
    ]
