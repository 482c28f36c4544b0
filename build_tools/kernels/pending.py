"""Whether machine code of Hopper touches registers of a product while that is under way.

A product (HGMMA, QGMMA, IGMMA) reads its left operand and its sums from registers after later instructions have begun.
Until WARPGROUP.DEPBAR has waited for it nothing may write the operand, or read or write the sums. What other
instructions wrote must stand before WARPGROUP.ARRIVE. PTX says the same of wgmma; ptxas may mend code that breaks it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from build_tools.kernels.sass import PRODUCTS, Code, Instruction, following

LEFT = 4
"""Registers of a left operand in a product of 64 rows."""

OLDEST = 8
"""Products that are older are as old as this: no code waits for so old a one alone."""


class _State(NamedTuple):
    """left, sums: a register -> how many groups of products were closed since the last product that has it. written:
    since the last WARPGROUP.ARRIVE."""

    left: dict[int, int]
    sums: dict[int, int]
    written: frozenset[int]


def touched(code: Code) -> list[str]:
    """The instructions that touch such registers on some path, and why they must not."""
    states: dict[int, _State] = {0: _State({}, {}, frozenset())}
    work = [0]
    while work:
        place = work.pop()
        state = _after(code.instructions[place], states[place])
        for after in following(code, place):
            joined = state if after not in states else _joined(states[after], state)
            if states.get(after) != joined:
                states[after] = joined
                work.append(after)
    found = []
    for place, state in sorted(states.items()):
        instruction = code.instructions[place]
        found += [
            f"{why}: {instruction.opcode} {', '.join(instruction.operands)}" for why in _wrong(instruction, state)
        ]
    return found


def _joined(one: _State, other: _State) -> _State:
    def youngest(a: dict[int, int], b: dict[int, int]) -> dict[int, int]:
        return {r: min(a.get(r, OLDEST), b.get(r, OLDEST)) for r in a.keys() | b.keys()}

    return _State(youngest(one.left, other.left), youngest(one.sums, other.sums), one.written | other.written)


def _after(instruction: Instruction, state: _State) -> _State:
    left, sums, written = state
    if instruction.opcode.startswith("WARPGROUP.ARRIVE"):
        return _State(left, sums, frozenset())
    if instruction.opcode.startswith("WARPGROUP.DEPBAR"):
        most = int(instruction.operands[1], 16)
        return _State(*({r: age for r, age in ages.items() if age <= most} for ages in (left, sums)), written)
    if not instruction.opcode.startswith(PRODUCTS):
        return _State(left, sums, written | set(_written(instruction)))
    of_left, of_sums = _of_product(instruction)
    left, sums = {**left, **dict.fromkeys(of_left, 0)}, {**sums, **dict.fromkeys(of_sums, 0)}
    if "gsb0" in instruction.operands:
        left, sums = ({r: min(age + 1, OLDEST) for r, age in ages.items()} for ages in (left, sums))
    return _State(left, sums, written)


def _wrong(instruction: Instruction, state: _State) -> Iterator[str]:
    if instruction.opcode.startswith(PRODUCTS):
        left, sums = _of_product(instruction)
        if state.written & {*left, *sums}:
            yield "a register of a product is written behind WARPGROUP.ARRIVE"
        if state.sums.keys() & left:
            yield "a product reads sums that are under way"
        if state.left.keys() & sums:
            yield "a product writes what another still reads"
        return
    written = set(_written(instruction))
    if state.left.keys() & written:
        yield "what a product still reads is written"
    if state.sums.keys() & (written | set(_read(instruction))):
        yield "sums are touched that are under way"


def _of_product(instruction: Instruction) -> tuple[set[int], set[int]]:
    """The registers of its left operand, none where that is in shared memory, and of its sums."""
    columns = re.search(r"\.64x(\d+)x", instruction.opcode)
    assert columns, instruction
    left, sums = instruction.operands[1], instruction.operands[0]
    return {*_registers(left, LEFT)}, {*_registers(sums, int(columns[1]) // 2)}


def _registers(operand: str, count: int) -> range:
    match = re.match(r"[-|~!]*R(\d+)\b", operand)
    return range(int(match[1]), int(match[1]) + count) if match else range(0)


_NONE_WRITTEN = re.compile(r"(ST|RED|BAR|WARPSYNC|NANOSLEEP|BRX|JMX|RET|CALL|BMOV|\w*SETP|PLOP3)")
_WIDE = re.compile(r"\.WIDE|\.(64|128|U64|S64)\b|\.64|\.128")


def _width(opcode: str) -> int:
    """Registers of its result, or of what it stores."""
    if opcode.startswith("LDSM"):
        return int(found[1]) if (found := re.search(r"\.([24])$", opcode)) else 1
    if ".128" in opcode:
        return 4
    return 2 if _WIDE.search(opcode) or opcode == "CS2R" else 1


def _written(instruction: Instruction) -> range:
    """The registers that an instruction other than a product writes."""
    opcode, operands = instruction.opcode, instruction.operands
    if not operands or _NONE_WRITTEN.match(opcode):
        return range(0)
    first = 1 if re.match(r"!?U?P[T\d]", operands[0]) and len(operands) > 1 else 0
    return _registers(operands[first], _width(opcode))


def _read(instruction: Instruction) -> Iterator[int]:
    stores = bool(_NONE_WRITTEN.match(instruction.opcode))
    width = _width(instruction.opcode) if stores else 1
    for operand in instruction.operands[0 if stores else 1 :]:
        if operand.startswith("["):
            yield from (int(number) for number in re.findall(r"\bR(\d+)", operand))
        else:
            yield from _registers(operand, width)
