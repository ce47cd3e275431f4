"""Products with weights of four bits that a kernel unpacks, beside the reference, which `test_four_bit_linear`
holds against numbers found one by one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bulkrun import ops
from bulkrun.ops.experts.four_bit_experts import four_bit_experts as reference_experts
from bulkrun.ops.matmul.four_bit_linear import four_bit_linear as reference
from bulkrun.ops.matmul.four_bit_weight import E2M1, WHOLE_NUMBERS, FourBitWeight, in_bits, unpack
from bulkrun.ops.triton import four_bit_linear as module
from bulkrun.ops.triton import four_bit_product
from bulkrun.ops.triton.four_bit_experts import four_bit_experts
from bulkrun.ops.triton.four_bit_linear import four_bit_linear
from tests.ops.naive_experts import random_biases, routed

CLAMPED = ops.ClampedSwiglu(1.702, 0.8)
ERROR = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # of the largest: sums in another order
DTYPES = [torch.float32, torch.float16]
KINDS = ["zeros", "no_zeros", "e2m1"]
# outputs, inputs, inputs of a group: tiles that are not full, groups wider and narrower than tiles, a single one
SIZES = [(64, 128, 128), (130, 64, 2), (65, 192, 32), (7, 64, 16), (200, 384, 128), (40, 320, 64), (33, 192, 192)]


def random_weight(kind: str, shape: tuple[int, ...], group_size: int, device: str) -> FourBitWeight:
    """In the form for the kernel."""
    made = in_bits(plain_weight(kind, shape, group_size))
    assert made.form == ("e2m1" if kind == "e2m1" else "whole")
    return on(made, device)


def on(weight: FourBitWeight, device: str) -> FourBitWeight:
    return FourBitWeight(*(part.to(device) if isinstance(part, torch.Tensor) else part for part in weight))


def plain_weight(kind: str, shape: tuple[int, ...], group_size: int) -> FourBitWeight:
    """Scales are of 16 bits, as checkpoints have them."""
    generator = torch.Generator().manual_seed(shape[-1])
    *outputs, size = shape
    codes = torch.randint(256, (*outputs, size // 2), dtype=torch.uint8, generator=generator)
    scale = (torch.rand(*outputs, size // group_size, generator=generator) + 0.1).half().float() / size**0.5
    scale = scale.half().float()
    zero = torch.randint(16, scale.shape, dtype=torch.uint8, generator=generator) if kind == "zeros" else None
    codebook = torch.tensor(E2M1 if kind == "e2m1" else WHOLE_NUMBERS)
    if kind == "e2m1":
        scale = torch.exp2(scale.log2().round()).bfloat16()
    return FourBitWeight(codes, scale, zero, codebook)


def assert_close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    assert ours.dtype == exact.dtype and ours.shape == exact.shape
    size = exact.abs().max().item() if exact.numel() else 0.0
    torch.testing.assert_close(ours, exact, atol=ERROR[ours.dtype] * size, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", [2, 4, 32, 64, 128, 256])
def test_numbers_are_the_same_in_every_form(kind: str, group_size: int) -> None:
    plain = plain_weight(kind, (5, 512), group_size)
    made = in_bits(plain)
    assert made.form != "table" and made.group_size == plain.group_size
    assert torch.equal(unpack(made), unpack(plain))


def test_every_exponent_that_a_float_holds_is_its_number() -> None:
    """From the lowest, which is no normal number, to the highest that the kernel can make up for."""
    scale = torch.ldexp(torch.ones(128 + 1, 1, dtype=torch.float64), torch.arange(-127, 2)[:, None]).bfloat16()
    codes = torch.arange(32, dtype=torch.uint8).expand(129, 32).contiguous()
    plain = FourBitWeight(codes, scale, None, torch.tensor(E2M1))
    made = in_bits(plain)
    assert made.scale[:, 0].tolist() == [*range(129)]
    assert torch.equal(unpack(made), unpack(plain))
    x = torch.eye(64)
    assert torch.equal(four_bit_linear(x, made, None), unpack(plain).T)


def test_a_weight_stays_as_it_is_where_something_would_be_lost() -> None:
    codes, zero = torch.zeros(2, 64, dtype=torch.uint8), torch.ones(2, 1, dtype=torch.uint8)
    whole, e2m1 = torch.tensor(WHOLE_NUMBERS), torch.tensor(E2M1)
    for weight in (
        FourBitWeight(codes, torch.tensor([[1.0], [1.0 + 2**-23]]), zero, whole),  # a scale of all 32 bits
        FourBitWeight(codes, torch.ones(2, 1), zero, whole + 1),
        FourBitWeight(codes, torch.ones(2, 1), zero, e2m1),
        FourBitWeight(codes, torch.ones(2, 1).bfloat16(), zero, whole),
        FourBitWeight(codes, torch.ones(2, 4).mul_(4.0).bfloat16(), None, e2m1),
        FourBitWeight(codes, torch.ones(2, 4).mul_(1.5).bfloat16(), None, e2m1),
        FourBitWeight(codes, torch.zeros(2, 4).bfloat16(), None, e2m1),
        FourBitWeight(torch.zeros(2, 96, dtype=torch.uint8), torch.ones(2, 2), None, whole),  # groups of 96
        FourBitWeight(torch.zeros(2, 48, dtype=torch.uint8), torch.ones(2, 3), None, whole),  # half a block of inputs
    ):
        assert in_bits(weight) is weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [0, 1, 17, 40, 70])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.pairs("sizes", "kind", "num_rows", "dtype")
def test_it_gives_what_the_reference_gives(
    sizes: tuple[int, int, int], kind: str, num_rows: int, dtype: torch.dtype, device: str
) -> None:
    outputs, size, group_size = sizes
    weight = random_weight(kind, (outputs, size), group_size, device)
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, size, generator=generator).to(device, dtype)
    bias = torch.randn(outputs, generator=generator).to(device, dtype) if num_rows % 2 else None
    assert_close(four_bit_linear(x, weight, bias), reference(x, weight, bias))


@pytest.mark.parametrize("num_rows", [16, 17, 32, 33, 64, 65, 128, 129, 300, 1030])
def test_tiles_of_every_size_end_anywhere(num_rows: int, device: str) -> None:
    weight, x = random_weight("zeros", (72, 64), 32, device), torch.randn(num_rows, 64, device=device)
    assert_close(four_bit_linear(x, weight, None), reference(x, weight, None))


@pytest.mark.parametrize("kind", ["zeros", "e2m1"])
@pytest.mark.parametrize("size", [960, 1024, 2112, 3136, 4096])
@pytest.mark.parametrize("num_rows", [1, 70])
@pytest.mark.pairs("size", "kind", "num_rows")
def test_few_programs_share_sums(kind: str, size: int, num_rows: int, device: str) -> None:
    """From one program to four for a tile, the last with less to do."""
    weight = random_weight(kind, (136, size), 32, device)
    x, bias = torch.randn(num_rows, size, device=device), torch.randn(136, device=device)
    for one in (None, bias):
        assert_close(four_bit_linear(x, weight, one), reference(x, weight, one))


@pytest.mark.parametrize("group_size", [32, 128])
def test_scales_that_the_dtype_of_rows_lacks_are_multiplied_in_float32(group_size: int, device: str) -> None:
    plain = plain_weight("zeros", (72, 128), group_size)
    bits = (torch.rand(plain.scale.shape) + 0.5).view(torch.int32) & ~15
    weight = on(in_bits(plain._replace(scale=bits.view(torch.float32))), device)
    assert weight.form == "whole" and not weight.exact_in
    x = torch.randn(5, 128, device=device).half()
    assert_close(four_bit_linear(x, weight, None), reference(x, weight, None))


def test_sums_are_shared_by_as_many_programs_as_there_is_room_for() -> None:
    shared = {(128, 64): 2, (80, 64): 3, (64, 32): 4, (64, 23): 2, (1, 224): 4, (132, 64): 2, (133, 64): 1, (1, 7): 1}
    assert {case: four_bit_product._splits(*case) for case in shared} == shared


def test_rows_may_be_strided(device: str) -> None:
    weight, x = random_weight("zeros", (72, 64), 32, device), torch.randn(5, 128, device=device)[:, ::2]
    assert_close(four_bit_linear(x, weight, None), reference(x, weight, None))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The grids of the kernel, which does not run."""
    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]):  # type: ignore[no-untyped-def]
            grids.append(grid)
            return lambda *args, **options: None

    monkeypatch.setattr(four_bit_product, "_product_kernel", Kernel())
    yield grids


def test_many_rows_and_other_forms_go_through_numbers_unpacked_before(
    launches: list[tuple[int, ...]], device: str
) -> None:
    weight = random_weight("zeros", (8, 64), 32, device)
    for num_rows, form in ((module._FEW_ROWS + 1, "whole"), (3, "table")):
        x = torch.randn(num_rows, 64, device=device)
        plain = weight if form == "whole" else weight._replace(form="table", scale=torch.ones(8, 2, device=device))
        assert torch.equal(four_bit_linear(x, plain, None), reference(x, plain, None))
    assert not launches


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(64, 64), (192, 64), (320, 128)], ids=str)
@pytest.mark.parametrize("experts", [(5, 2, 0), (5, 2, 1), (1, 1, 3), (3, 3, 13), (33, 8, 7), (4, 2, 90)], ids=str)
@pytest.mark.pairs("experts", "sizes", "kind", "dtype")
def test_experts_are_those_of_the_reference(
    experts: tuple[int, int, int], sizes: tuple[int, int], kind: str, dtype: torch.dtype, device: str
) -> None:
    """Sizes that fill no tiles, experts that get nothing, and one that gets half of all tokens."""
    (num_experts, top_k, num_tokens), (hidden, inner) = experts, sizes
    both = [random_weight(kind, (num_experts, *shape), 32, device) for shape in ((2 * inner, hidden), (hidden, inner))]
    weights_Tk, ids_Tk = (part.to(device) for part in routed(num_tokens, num_experts, top_k))
    biases = random_biases(num_experts, sizes, dtype) if num_tokens % 2 else None
    biases = biases and (biases[0].to(device), biases[1].to(device))
    x_TE = torch.randn(num_tokens, hidden, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    asked = (x_TE, *both, weights_Tk, ids_Tk, biases, CLAMPED if biases else None)
    assert_close(four_bit_experts(*asked), reference_experts(*asked))


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 33, 97, 300])
@pytest.mark.parametrize("num_experts", [1, 3])
def test_tiles_of_experts_end_anywhere(num_experts: int, num_tokens: int, device: str) -> None:
    both = [random_weight("e2m1", (num_experts, *shape), 32, device) for shape in ((128, 64), (64, 64))]
    routes = (part.to(device) for part in routed(num_tokens, num_experts, 1))
    asked = (torch.randn(num_tokens, 64, device=device), *both, *routes, None, None)
    assert_close(four_bit_experts(*asked), reference_experts(*asked))


def test_launches_are_as_many_whatever_the_experts_got(launches: list[tuple[int, ...]], device: str) -> None:
    """What a captured step needs: the grid is known from shapes."""
    both = [random_weight("e2m1", (8, *shape), 32, device) for shape in ((128, 64), (64, 64))]
    for ids_Tk in (torch.zeros(50, 1, dtype=torch.int64), torch.arange(50)[:, None] % 8):
        x_TE, weights_Tk = torch.randn(50, 64, device=device), torch.ones(50, 1, device=device)
        four_bit_experts(x_TE, both[0], both[1], weights_Tk, ids_Tk.to(device), None, None)
    assert len(launches) == 4 and launches[:2] == launches[2:]


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 64, 100, 512, 1024])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("outputs", "size", "group_size"), [(10240, 8192, 128), (8192, 28672, 128), (5760, 2880, 32), (4096, 4096, 4096)]
)
def test_large_matrices(outputs: int, size: int, group_size: int, kind: str, num_rows: int) -> None:
    weight = random_weight(kind, (outputs, size), group_size, "cuda")
    x = torch.randn(num_rows, size, device="cuda", dtype=torch.bfloat16)
    assert_close(four_bit_linear(x, weight, None), reference(x, weight, None))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 33, 300, 2000])
def test_large_experts(num_tokens: int) -> None:
    """Of the sizes of gpt-oss-20b."""
    both = [random_weight("e2m1", (32, *shape), 32, "cuda") for shape in ((5760, 2880), (2880, 2880))]
    weights_Tk, ids_Tk = (part.cuda() for part in routed(num_tokens, 32, 4))
    first, second = random_biases(32, (2880, 2880), torch.bfloat16)
    x_TE = torch.randn(num_tokens, 2880, device="cuda", dtype=torch.bfloat16)
    asked = (x_TE, *both, weights_Tk, ids_Tk, (first.cuda(), second.cuda()), CLAMPED)
    assert_close(four_bit_experts(*asked), reference_experts(*asked))
