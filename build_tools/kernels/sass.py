"""What the machine code of a kernel says that its PTX does not: a scan of nvdisasm's listing.

Of Hopper's asynchronous products (HGMMA, of 8 bits QGMMA and IGMMA) it finds registers that are touched while a product
may still use them, and products that are waited for one by one; of all kernels accesses to memory of one or two bytes,
and the size of loops.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class Findings:
    """hazards: instructions that touch registers of a product in flight. products: such instructions; alone: how many
    of them the kernel waits for before it issues the next. narrow: global loads and stores of one or two bytes, and
    accesses: of all sizes. bytes: of code; loop: of the longest loop, with the loops in it.
    """

    hazards: list[str]
    products: int
    alone: int
    narrow: int
    accesses: int
    bytes: int
    loop: int


class Instruction(NamedTuple):
    """guard: its predicate, "" for none. label: where a branch goes, "" for none."""

    guard: str
    opcode: str
    operands: tuple[str, ...]
    label: str
    text: str


class Code(NamedTuple):
    """labels: the index of the instruction that each is in front of."""

    instructions: list[Instruction]
    labels: dict[str, int]


def disassembler() -> str | None:
    """nvdisasm: the environment variable NVDISASM, Triton's own, that of the CUDA toolkit; None where there is none."""
    if os.environ.get("NVDISASM"):
        return os.environ["NVDISASM"]
    found = [shutil.which("nvdisasm")]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        found.insert(0, str(Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"))
    compiler = shutil.which("nvcc")
    if compiler is not None:
        found.append(str(Path(compiler).resolve().with_name("nvdisasm")))
    return next((path for path in found if path is not None and os.access(path, os.X_OK)), None)


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
    """What there is to find in nvdisasm's listing of one kernel."""
    code = parse(listing)
    memory = [i.opcode for i in code.instructions if re.match(r"(LDG|STG|LDGSTS|ATOMG|RED|REDG)\b", i.opcode)]
    return Findings(
        hazards=list(hazards(code)),
        products=sum(i.opcode.startswith(_PRODUCTS) for i in code.instructions),
        alone=_alone(code.instructions),
        narrow=sum(bool(re.search(r"\.[US](8|16)\b", opcode)) for opcode in memory),
        accesses=len(memory),
        bytes=_BYTES * len(code.instructions),
        loop=_BYTES * max(map(len, _loops(code)), default=0),
    )


_PRODUCTS = ("HGMMA", "QGMMA", "IGMMA")
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
        found = _LINE.match(line)
        if found is None:
            continue
        guard, opcode, rest = found.groups()
        target = re.search(r"`\((\.L_\w+)\)", rest)
        operands = tuple(operand.strip() for operand in rest.split(",")) if rest else ()
        text = f"{opcode} {rest}".strip()
        instructions.append(Instruction(guard or "", opcode, operands, target[1] if target else "", text))
    return Code(instructions, labels)


def _alone(instructions: Sequence[Instruction]) -> int:
    """Products behind which all products are waited for before the next is issued."""
    count, issued = 0, False
    for instruction in instructions:
        if instruction.opcode.startswith(_PRODUCTS):
            issued = True
        elif _waits_for(instruction) == 0 and issued:
            count, issued = count + 1, False
    return count


def _waits_for(instruction: Instruction) -> int | None:
    """How many groups of products may be under way behind it; None where it is no wait."""
    if not instruction.opcode.startswith("WARPGROUP.DEPBAR"):
        return None
    return int(instruction.operands[1], 16)


class _Group(NamedTuple):
    """Registers of products that are waited for together: the factors that they read, the sums that they write."""

    factors: frozenset[int] = frozenset()
    sums: frozenset[int] = frozenset()


_MOST_GROUPS = 8
"""No wait leaves more under way (its operand has three bits). Older ones count as one, so that a walk through a loop
without waits ends."""

_State = tuple[tuple[_Group, ...], _Group]  # groups that are under way, oldest first, and the one that still grows


def hazards(code: Code) -> Iterator[str]:
    """Instructions that on some path touch registers of a product that has not been waited for: they write a factor, or
    read or write a sum. (Products may follow each other into the same sum.)"""
    starts = set(code.labels.values())
    reported: set[int] = set()
    seen: set[tuple[int, _State]] = set()
    pending: list[tuple[int, _State]] = [(0, ((), _Group()))]
    while pending:
        at, state = pending.pop()
        while True:
            if at in starts:
                if (at, state) in seen:
                    break
                seen.add((at, state))
            instruction = code.instructions[at]
            problem = _problem(instruction, state) if any(state[0]) or any(state[1]) else None
            if problem is not None and at not in reported:
                reported.add(at)
                yield f"{instruction.text[:80]}: {problem}"
            state = _after(instruction, state)
            following = _next(code, at)
            if not following:
                break
            pending += [(other, state) for other in following[1:]]
            at = following[0]


def _after(instruction: Instruction, state: _State) -> _State:
    """What is under way behind an instruction."""
    groups, current = state
    if instruction.opcode.startswith(_PRODUCTS):
        factors, sums = _product(instruction)
        current = _Group(current.factors | factors, current.sums | sums)
        if "gsb0" not in instruction.operands[-1]:
            return groups, current
        groups = (*groups, current)
        if len(groups) > _MOST_GROUPS:
            oldest, second, *rest = groups
            groups = (_Group(oldest.factors | second.factors, oldest.sums | second.sums), *rest)
        return groups, _Group()
    allowed = _waits_for(instruction)
    if allowed is not None:
        return groups[len(groups) - allowed :] if allowed else (), current
    return state


def _problem(instruction: Instruction, state: _State) -> str | None:
    groups, current = state
    factors = current.factors.union(*(group.factors for group in groups))
    sums = current.sums.union(*(group.sums for group in groups))
    if instruction.opcode.startswith(_PRODUCTS):
        own, result = _product(instruction)
        touched = {"overwrites a factor": result & factors, "reads a sum as its factor": own & sums}
    else:
        used = frozenset(int(number) for number in re.findall(r"\bR(\d+)", instruction.text))
        touched = {"overwrites a factor": _written(instruction) & factors, "uses a sum": used & sums}
    found = [f"{what} (R{min(registers)})" for what, registers in touched.items() if registers]
    return f"{' and '.join(found)} of a product that may be under way" if found else None


def _product(instruction: Instruction) -> tuple[frozenset[int], frozenset[int]]:
    """(registers of the left factor, of the sum in float32) of a product."""
    columns = re.match(r"[HQI]GMMA\.(?:\w+\.)*?64x(\d+)x", instruction.opcode)
    assert columns, instruction.text
    return _registers(instruction.operands[1], 4), _registers(instruction.operands[0], int(columns[1]) // 2)


# Opcodes whose first register is read, not written.
_READERS = ("ST", "RED", "BAR", "BRA", "BRX", "UTMA", "MEMBAR", "FENCE", "SYNCS", "R2UR", "ISETP", "FSETP", "WARPSYNC")


def _written(instruction: Instruction) -> frozenset[int]:
    """The registers that it writes."""
    opcode = instruction.opcode
    if opcode.startswith(_READERS):
        return frozenset()
    count = 4 if ".128" in opcode else 2 if re.search(r"\.(WIDE|64)\b", opcode) or opcode == "CS2R" else 1
    if opcode.startswith("LDSM"):
        count = {"4": 4, "2": 2}.get(opcode.rpartition(".")[2], 1)
    results = [operand for operand in instruction.operands if not re.match(r"!?U?P[T\d]", operand)]
    return _registers(results[0], count) if results else frozenset()


def _registers(operand: str, count: int) -> frozenset[int]:
    found = re.match(r"R(\d+)", operand)
    return frozenset(range(int(found[1]), int(found[1]) + count)) if found else frozenset()


def _loops(code: Code) -> Iterator[list[int]]:
    """The instructions of every loop, those of loops in loops included: what can reach itself (Tarjan's components)."""
    number: dict[int, int] = {}
    lowest: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    for root in range(len(code.instructions)):
        if root in number:
            continue
        walk: list[tuple[int, Iterator[int]]] = [(root, iter(_next(code, root)))]
        number[root] = lowest[root] = len(number)
        stack.append(root)
        on_stack.add(root)
        while walk:
            at, following = walk[-1]
            after = next(following, None)
            if after is None:
                walk.pop()
                if walk:
                    lowest[walk[-1][0]] = min(lowest[walk[-1][0]], lowest[at])
                if lowest[at] == number[at]:
                    members = [stack.pop()]
                    while members[-1] != at:
                        members.append(stack.pop())
                    on_stack.difference_update(members)
                    if len(members) > 1 or at in _next(code, at):
                        yield sorted(members)
            elif after not in number:
                number[after] = lowest[after] = len(number)
                stack.append(after)
                on_stack.add(after)
                walk.append((after, iter(_next(code, after))))
            elif after in on_stack:
                lowest[at] = min(lowest[at], number[after])


def _next(code: Code, at: int) -> list[int]:
    """What may run after an instruction."""
    instruction = code.instructions[at]
    if instruction.opcode.startswith(("EXIT", "RET")) and not instruction.guard:
        return []
    found = [at + 1] if at + 1 < len(code.instructions) else []
    if instruction.label in code.labels and instruction.opcode.startswith(("BRA", "CALL")):
        if instruction.opcode == "BRA" and not instruction.guard and len(instruction.operands) == 1:
            found = []
        found.append(code.labels[instruction.label])
    return found
