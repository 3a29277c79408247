"""The check for registers written under products in flight: on small programs, and on a kernel with that fault."""

import pytest
import triton

from sala.backends.torch.kernels import packed
from tests.kernels.aot import Build, run
from tests.kernels.sass import hazards
from tests.kernels.test_packed import build

PRODUCT = "HGMMA.64x16x16.F32.BF16 R32, R40, gdesc[UR36], R32, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
PROGRAMS = {
    "left operand": ([PRODUCT, "MOV R43, R2", WAIT], 1),
    "after the wait": ([PRODUCT, WAIT, "MOV R43, R2"], 0),
    "its neighbour": ([PRODUCT, "MOV R44, R2", WAIT], 0),
    "sums": ([PRODUCT, "FADD R39, R2, R3", WAIT], 1),
    "reads and stores": ([PRODUCT, "STS.128 [R40], R40", "ISETP.GE.AND P0, PT, R40, R41, PT", WAIT], 0),
    "left operand in shared memory": (["HGMMA.64x16x16.F32 R32, gdesc[UR8], R32, gsb0", "MOV R40, R2", WAIT], 0),
    "wide load": ([PRODUCT, "LDS.128 R37, [R2]", WAIT], 1),
    "second operand after a predicate": ([PRODUCT, "SHFL.BFLY PT, R41, R2, 0x1, 0x1f", WAIT], 1),
    "wait for the older of two": (
        [PRODUCT, PRODUCT.replace("R40", "R48"), "WARPGROUP.DEPBAR.LE gsb0, 0x1", "MOV R40, R2", "MOV R48, R2", WAIT],
        1,
    ),
    "in the next round": (["MOV R40, R2", PRODUCT, "@P0 BRA 0x0", WAIT], 1),
    "waited for in each round": (["MOV R40, R2", PRODUCT, WAIT, "@P0 BRA 0x0"], 0),
    "behind a jump over the wait": ([PRODUCT, "@P0 BRA 0x30", WAIT, "MOV R40, R2"], 1),
    "never reached": ([PRODUCT, "BRA 0x30", "MOV R40, R2", WAIT], 0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_hazards(name: str) -> None:
    program, count = PROGRAMS[name]
    lines = [f"        /*{16 * i:04x}*/      {one} ;      /* 0x0123 */" for i, one in enumerate([*program, "EXIT"])]
    assert len(hazards("\n".join(lines))) == count


@triton.jit
def _unsettled(acc):
    return acc


def unsettled_builds() -> list[Build]:
    """A product without the instruction that makes each step wait for the tensor cores."""
    packed._settled = _unsettled
    return [build(90, 4096, 16384, 4, 64, 1)]


def test_a_kernel_that_does_not_wait() -> None:
    done = run(90, f"{__name__}:unsettled_builds")
    assert done.returncode != 0
    assert "HFMA2.BF16_V2" in done.stderr  # weights of the next step, unpacked too early
