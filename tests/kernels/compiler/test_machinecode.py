"""Read one iteration of the K loop from small machine code with a known answer."""

from __future__ import annotations

import pytest

from kernels.compiler.machinecode import NO_LOOP, LoopCode, loop_code


def listing(text: str) -> str:
    """Return lines as nvdisasm prints them: labels unchanged, instructions with an address."""
    return "\n".join(
        line if line.endswith(":") else f"        /*{16 * place:04x}*/   {line} ;"
        for place, line in enumerate(text.strip().splitlines())
    )


PLAIN = """
MOV R1, c[0x0][0x28]
HGMMA.64x256x16.F32.BF16 R24, gdesc[UR12], RZ
.L_x_0:
DEPBAR.LE SB0, 0x2
HGMMA.64x256x16.F32.BF16 R24, gdesc[UR12], R24
HGMMA.64x256x16.F32.BF16 R24, gdesc[UR12], R24, gsb0
WARPGROUP.DEPBAR.LE gsb0, 0x1
LDGSTS.E.BYPASS.128 [R135], desc[UR18][R14.64], P6
@P0 BRA `(.L_x_0)
WARPGROUP.DEPBAR.LE gsb0, 0x0
EXIT
.L_x_1:
BRA `(.L_x_1)
"""


def test_only_the_loop_that_multiplies_counts() -> None:
    assert loop_code(listing(PLAIN)) == LoopCode(6, 2, False)


def test_a_loop_that_waits_for_every_wgmma_says_so() -> None:
    waiting = PLAIN.replace("gsb0, 0x1", "gsb0, 0x0")
    assert loop_code(listing(waiting)) == LoopCode(6, 2, True)


FUSED = """
.L_x_0:
IADD3 R1, R1, 0x1, RZ
@P1 BRA P2, `(.L_x_2)
MOV R2, R3
MOV R2, R3
MOV R2, R3
.L_x_2:
SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R4
@!P0 BRA `(.L_x_2)
HMMA.16816.F32.BF16 R4, R5, R6, R4
@P3 BRA `(.L_x_0)
"""


def test_the_end_of_a_tile_that_most_turns_branch_around_is_left_out() -> None:
    """The loop that waits for a barrier inside the turn is counted as one pass, not as a loop."""
    assert loop_code(listing(FUSED)) == LoopCode(6, 1, False)


NESTED = """
.L_x_0:
MOV R1, R2
.L_x_1:
FFMA R3, R4, R5, R3
FFMA R3, R4, R5, R3
ISETP.NE.AND P0, PT, R1, RZ, PT
@P0 BRA `(.L_x_1)
@P1 BRA `(.L_x_0)
"""


@pytest.mark.parametrize(
    ("text", "code"), [(NESTED, LoopCode(4, 2, False)), ("EXIT", NO_LOOP), ("", NO_LOOP)]
)
def test_the_innermost_loop_is_read_and_there_may_be_none(text: str, code: LoopCode) -> None:
    assert loop_code(listing(text)) == code
