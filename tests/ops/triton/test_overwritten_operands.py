"""What the search finds in loops as the disassembler prints them."""

from __future__ import annotations

from tests.ops.triton.overwritten_operands import overwritten_operands


def sass(*instructions: str) -> str:
    lines = [f"        /*{16 * n:04x}*/                   {text} ;   /* 0x0 */" for n, text in enumerate(instructions)]
    return "\n".join(lines)


MULTIPLY = "HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR12], R24, gsb0"


def test_a_register_of_an_instruction_that_runs_must_not_be_written() -> None:
    loop = sass("HMUL2.BF16_V2 R89, R4, R5", MULTIPLY, "WARPGROUP.DEPBAR.LE gsb0, 0x1", "@P0 BRA 0x0")
    assert overwritten_operands(loop) == ["HMUL2.BF16_V2 R89, R4, R5"]  # in the next turn


def test_a_wait_for_its_group_ends_that() -> None:
    loop = ["HMUL2.BF16_V2 R89, R4, R5", MULTIPLY, "WARPGROUP.DEPBAR.LE gsb0, 0x0", "@P0 BRA 0x0"]
    assert not overwritten_operands(sass(*loop))


def test_groups_are_waited_for_in_their_order() -> None:
    first, second = MULTIPLY, MULTIPLY.replace("R88", "R96")
    wait = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
    loop = sass(first, second, wait, "LDS.64 R90, [R2]", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "@P0 BRA 0x0")
    assert not overwritten_operands(loop)
    late = sass(first, second, wait, "LDS.64 R98, [R2]", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "@P0 BRA 0x0")
    assert overwritten_operands(late) == ["LDS.64 R98, [R2]"] * 2


def test_wide_results_and_those_beside_a_predicate_are_seen_and_stores_are_none() -> None:
    end = "@P0 BRA 0x0"
    assert overwritten_operands(sass(MULTIPLY, "@!P6 LDG.E.128 R86, desc[UR10][R2.64]", end))
    assert overwritten_operands(sass(MULTIPLY, "IADD3 R88, P0, R21, UR9, RZ", end))
    assert overwritten_operands(sass(MULTIPLY, "LOP3.LUT P0, R91, R91, 0xf, RZ, 0xc0, !PT", end))
    assert not overwritten_operands(sass(MULTIPLY, "STS [R88], R2", "STG.E desc[UR10][R2.64], R88", end))


def test_an_operand_in_shared_memory_and_code_outside_of_loops_are_no_matter() -> None:
    shared = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"
    assert not overwritten_operands(sass("HMUL2.BF16_V2 R8, R4, R5", shared, "@P0 BRA 0x0"))
    assert not overwritten_operands(sass(MULTIPLY, "HMUL2.BF16_V2 R88, R4, R5", "EXIT"))
