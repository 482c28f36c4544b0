"""What the machine code of a kernel says that its PTX does not: a scan of nvdisasm's listing.

Of Hopper's asynchronous products (HGMMA, of 8 bits QGMMA and IGMMA) it counts those that are waited for one by one; of
all kernels accesses to memory of one or two bytes, and the size of loops.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class Findings:
    """products: asynchronous ones; alone: how many of them the kernel waits for before it issues the next. narrow:
    global loads and stores of one or two bytes, and accesses: of all sizes. loop: bytes of the largest loop, with the
    loops in it.
    """

    products: int
    alone: int
    narrow: int
    accesses: int
    loop: int


class Instruction(NamedTuple):
    """guard: its predicate, "" for none. label: where a branch goes, "" for none."""

    guard: str
    opcode: str
    operands: tuple[str, ...]
    label: str

    @property
    def ends(self) -> bool:
        """Whether what stands behind it does not run after it."""
        leaves = self.opcode.startswith(("EXIT", "RET")) or (self.opcode == "BRA" and len(self.operands) == 1)
        return leaves and not self.guard


class Code(NamedTuple):
    """labels: the index of the instruction that each is in front of."""

    instructions: list[Instruction]
    labels: dict[str, int]


def disassembler() -> str | None:
    """nvdisasm: the environment variable NVDISASM, Triton's own, that of the CUDA toolkit; None where there is none."""
    if os.environ.get("NVDISASM"):
        return os.environ["NVDISASM"]
    places = [shutil.which("nvdisasm")]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        places.insert(0, str(Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"))
    compiler = shutil.which("nvcc")
    if compiler is not None:
        places.append(str(Path(compiler).resolve().with_name("nvdisasm")))
    return next((path for path in places if path is not None and os.access(path, os.X_OK)), None)


def disassemble(cubin: bytes) -> str:
    """nvdisasm's listing. Raises FileNotFoundError where there is no nvdisasm."""
    tool = disassembler()
    if tool is None:
        raise FileNotFoundError("nvdisasm: neither in Triton's package nor on PATH; set NVDISASM to its path")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout


def scan(listing: str) -> Findings:
    """Reads the findings off nvdisasm's listing of one kernel."""
    code = parse(listing)
    memory = [i.opcode for i in code.instructions if re.match(r"(LDG|STG|LDGSTS|ATOMG|RED|REDG)\b", i.opcode)]
    return Findings(
        products=sum(i.opcode.startswith(PRODUCTS) for i in code.instructions),
        alone=_alone(code.instructions),
        narrow=sum(bool(re.search(r"\.[US](8|16)\b", opcode)) for opcode in memory),
        accesses=len(memory),
        loop=_BYTES * _largest_loop(code),
    )


PRODUCTS = ("HGMMA", "QGMMA", "IGMMA")
_BYTES = 16  # of an instruction, from compute capability 7.0 on

_LINE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:\{\s*)?(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")


def parse(listing: str) -> Code:
    """The instructions of a listing."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if line.startswith(".L_"):
            labels[line.partition(":")[0]] = len(instructions)
            continue
        match = _LINE.match(line)
        if match is None:
            continue
        guard, opcode, rest = match.groups()
        target = re.search(r"`\((\.L_\w+)\)", rest)
        operands = tuple(operand.strip() for operand in rest.split(",")) if rest else ()
        instructions.append(Instruction(guard or "", opcode, operands, target[1] if target else ""))
    return Code(instructions, labels)


def following(code: Code, place: int) -> Iterator[int]:
    """The places of what may run after the instruction there."""
    instruction = code.instructions[place]
    if not instruction.ends and place + 1 < len(code.instructions):
        yield place + 1
    if instruction.label in code.labels and instruction.opcode.startswith(("BRA", "CALL")):
        yield code.labels[instruction.label]


def _alone(instructions: Sequence[Instruction]) -> int:
    """Products behind which all products are waited for before the next is issued."""
    count, issued = 0, False
    for instruction in instructions:
        if instruction.opcode.startswith(PRODUCTS):
            issued = True
        elif issued and instruction.opcode.startswith("WARPGROUP.DEPBAR") and int(instruction.operands[1], 16) == 0:
            count, issued = count + 1, False
    return count


def _largest_loop(code: Code) -> int:
    """Instructions of the largest loop: of the pieces that run from end to end, those that reach each other."""
    instructions = code.instructions
    behind = {i + 1 for i, instruction in enumerate(instructions) if instruction.label or instruction.ends}
    starts = sorted({0, *code.labels.values(), *behind} - {len(instructions)})
    sizes = [end - start for start, end in pairwise([*starts, len(instructions)])]
    place = {start: i for i, start in enumerate(starts)}
    reached = []  # by piece: a bit for every piece that may run after it
    for start, size in zip(starts, sizes, strict=True):
        reached.append(sum(1 << place[at] for at in {*following(code, start + size - 1)} if at in place))
    count = len(starts)
    for through, i in itertools.product(range(count), repeat=2):
        if reached[i] >> through & 1:
            reached[i] |= reached[through]
    loops = ([j for j in range(count) if reached[i] >> j & reached[j] >> i & 1] for i in range(count))
    return max(sum(sizes[j] for j in loop) for loop in loops)
