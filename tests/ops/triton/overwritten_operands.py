"""Finds registers that are written while one of Hopper's wide matrix instructions may still read them.

Such an instruction runs on by itself, until its group is waited for, and takes its first operand from registers where
that is not in shared memory. The assembler gives those to other values as soon as it has seen the instruction; whether
that was too soon depends on how busy the matrix units are, so sums are wrong now and then, and only on a device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_LINE = re.compile(r"\s+/\*([0-9a-f]{4,5})\*/\s+(.*?)\s*;\s*/\*")
_JUMP = re.compile(r"BRA\S* .*?0x([0-9a-f]+)")
_OPERAND = re.compile(r"GMMA\S* R\d+, R(\d+), gdesc")  # four registers from this one on
_WAIT = re.compile(r"DEPBAR\S* gsb0, 0x([0-9a-f]+)")  # until no more than so many groups run
_TARGET = re.compile(r"(?:@!?U?P\d+ )?(\S+) (?:U?P\d+, )?R(\d+),")
_WITHOUT_TARGET = ("ST", "RED", "BAR", "BRA")


def overwritten_operands(sass: str) -> list[str]:
    """The instructions of loops, as `cuobjdump --dump-sass` prints them, that write such registers too soon."""
    return [instruction for body in _loops(sass) for instruction in _too_soon([*body, *body])]


def _loops(sass: str) -> Iterator[list[str]]:
    """The instructions of each loop, inner ones of outer ones included."""
    places, instructions = [], []
    for match in filter(None, map(_LINE.match, sass.splitlines())):
        places.append(int(match[1], 16))
        instructions.append(match[2])
    for end, instruction in enumerate(instructions):
        jump = _JUMP.search(instruction)
        if jump and int(jump[1], 16) in places[:end]:
            yield instructions[places.index(int(jump[1], 16)) : end]


def _too_soon(instructions: list[str]) -> Iterator[str]:
    groups: list[set[int]] = [set()]  # registers that groups under way read; the last one is still being filled
    for instruction in instructions:
        if operand := _OPERAND.search(instruction):
            groups[-1] |= set(range(int(operand[1]), int(operand[1]) + 4))
        if "GMMA" in instruction:
            groups += [set()] if "gsb0" in instruction else []
        elif wait := _WAIT.search(instruction):
            groups = groups[-int(wait[1], 16) - 1 :]
        elif _written(instruction) & set().union(*groups):
            yield instruction


def _written(instruction: str) -> set[int]:
    target = _TARGET.match(instruction)
    if target is None or target[1].startswith(_WITHOUT_TARGET):
        return set()
    width = 4 if ".128" in target[1] else 2 if ".64" in target[1] or ".WIDE" in target[1] else 1
    return set(range(int(target[2]), int(target[2]) + width))
