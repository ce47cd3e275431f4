"""The grouped product of fp8 experts beside its reference, and the tiles that rows fall into.

The interpreter rounds to fp8 wrong where a carry reaches the exponent (test_fp8.py), so there rows are quantized by the
reference; multiplying it does right. A GPU does everything itself, in bfloat16 too.
"""

from __future__ import annotations

import pytest
import torch

from bulkrun import ops
from bulkrun.ops.experts.fp8_experts import fp8_experts as reference
from bulkrun.ops.matmul.fp8 import FP8
from bulkrun.ops.matmul.fp8_linear import Fp8Weight
from bulkrun.ops.matmul.fp8_linear import quantize_rows as reference_rows
from bulkrun.ops.triton import fp8_experts as module
from bulkrun.ops.triton.fp8_experts import fp8_experts
from tests.ops.naive_experts import Weights, random_biases, random_weights, routed

CLAMPED = ops.ClampedSwiglu(1.702, 0.8)
ERROR = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # of the largest: sums in another order, and
# in 16 bits a number before the second product that has another last bit
# In float16 of a Hopper GPU, whose fp8 units keep 13 bits of what is added: products are off by 1.3e-4 (seen on an
# H200), so that some of what is rounded to fp8 again falls on the other side. Emulated with 14 to 12 bits, 33 rows are
# off by 1.8e-3 to 2.5e-3 of the largest; this leaves room for the tail of thousands of rows.
ON_HOPPER = 6e-3


@pytest.fixture(autouse=True)
def _rounded_right(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        monkeypatch.setattr(module, "quantize_rows", reference_rows)


def on(device: str, weights: Weights) -> list[Fp8Weight]:
    rows = [reference_rows(weight.to(device).flatten(0, 1)) for weight in weights]
    return [
        Fp8Weight(*(part.unflatten(0, weight.shape[:2]) for part in parts))
        for weight, parts in zip(weights, rows, strict=True)
    ]


def check(
    num_experts: int,
    asked: Weights,
    sizes: tuple[int, int],
    device: str,
    dtype: torch.dtype = torch.float32,
    biases: Weights | None = None,
    activation: ops.ExpertActivation = None,
    error: float = 0.0,
) -> None:
    generator = torch.Generator().manual_seed(0)
    x_TE = torch.randn(len(asked[0]), sizes[0], generator=generator).to(device, dtype)
    both, asked = (
        on(device, random_weights(num_experts, sizes, has_gates=activation != "relu2")),
        (asked[0].to(device), asked[1].to(device)),
    )
    biases = biases and (biases[0].to(device), biases[1].to(device))
    ours, exact = (
        fp8_experts(x_TE, *both, *asked, biases, activation),
        reference(x_TE, *both, *asked, biases, activation),
    )
    assert ours.dtype == dtype and ours.shape == x_TE.shape
    size = exact.abs().max().item() if exact.numel() else 0.0
    torch.testing.assert_close(ours, exact, atol=max(ERROR[dtype], error) * size, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sizes", [(40, 24), (129, 65), (8, 200), (256, 128)], ids=str)
@pytest.mark.parametrize("experts", [(5, 2, 0), (5, 2, 1), (1, 1, 3), (3, 3, 13), (33, 8, 7)], ids=str)
@pytest.mark.pairs("experts", "sizes", "dtype")
def test_it_gives_what_the_reference_gives(
    experts: tuple[int, int, int], sizes: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    """Sizes that fill no tiles, experts that get nothing, and one that gets half of all tokens."""
    num_experts, top_k, num_tokens = experts
    check(num_experts, routed(num_tokens, num_experts, top_k), sizes, device, dtype)


@pytest.mark.parametrize("activation", [None, CLAMPED, "relu2"])
@pytest.mark.parametrize("has_biases", [False, True])
def test_biases_and_activations(has_biases: bool, activation: ops.ExpertActivation, device: str) -> None:
    has_gates = activation != "relu2"
    biases = random_biases(6, (48, 40), torch.float32, has_gates=has_gates) if has_biases else None
    check(6, routed(9, 6, 4), (48, 40), device, biases=biases, activation=activation)


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 64, 65, 97, 128, 129, 300])
@pytest.mark.parametrize("num_experts", [1, 3])
def test_tiles_of_every_size_end_anywhere(num_experts: int, num_tokens: int, device: str) -> None:
    check(num_experts, routed(num_tokens, num_experts, 1), (40, 24), device)


@pytest.mark.parametrize("expert", [0, 3, 6])
def test_all_tokens_at_one_expert(expert: int, device: str) -> None:
    ids_Tk = torch.full((70, 1), expert)
    check(7, (torch.rand(70, 1), ids_Tk), (24, 16), device)


def test_experts_of_one_row_each_fill_every_tile_that_is_launched(device: str) -> None:
    """The most tiles that so many pairs can need."""
    ids_Tk = torch.randperm(16)[:, None]
    check(16, (torch.rand(16, 1), ids_Tk), (24, 16), device)


def test_a_row_that_is_no_numbers_gives_none_and_leaves_others_alone(device: str) -> None:
    both, (weights_Tk, ids_Tk) = on(device, random_weights(4, (64, 64))), routed(20, 4, 2)
    asked = weights_Tk.to(device), ids_Tk.to(device)
    x_TE = torch.randn(20, 64, device=device)
    whole = fp8_experts(x_TE, *both, *asked, None, None)
    x_TE[7, 3] = torch.nan
    out = fp8_experts(x_TE, *both, *asked, None, None)
    others = [row for row in range(20) if row != 7]
    assert not out[7].isfinite().any()
    assert torch.equal(out[others], whole[others])


def test_launches_are_as_many_whatever_the_experts_got(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a captured step needs: the grid is known from shapes."""
    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]):  # type: ignore[no-untyped-def]
            grids.append(grid)
            return lambda *args, **options: None

    monkeypatch.setattr(module, "_grouped_linear_kernel", Kernel())
    both, x_TE = on(device, random_weights(8, (24, 16))), torch.randn(50, 24, device=device)
    for ids_Tk in (torch.zeros(50, 1, dtype=torch.int64), torch.arange(50)[:, None] % 8):
        fp8_experts(x_TE, *both, torch.ones(50, 1, device=device), ids_Tk.to(device), None, None)
    assert len(grids) == 4 and grids[:2] == grids[2:]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 33, 300, 2000])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "sizes"), [(32, 4, (2880, 2880)), (128, 8, (2048, 768)), (8, 2, (1024, 3584))], ids=str
)
def test_large_experts(
    num_experts: int, top_k: int, sizes: tuple[int, int], num_tokens: int, dtype: torch.dtype
) -> None:
    """Of the sizes of gpt-oss-20b and Qwen3-30B-A3B among others."""
    biases = random_biases(num_experts, sizes, dtype)
    check(num_experts, routed(num_tokens, num_experts, top_k), sizes, "cuda", dtype, biases, CLAMPED, ON_HOPPER)


@pytest.mark.gpu
def test_experts_that_lie_beyond_two_to_the_31_bytes() -> None:
    shapes = (66, 2 * 4096, 4096), (66, 4096, 4096)
    numbers = [torch.randint(0, 0x78, shape, dtype=torch.uint8, device="cuda").view(FP8) for shape in shapes]
    both = [Fp8Weight(one, torch.rand(*one.shape[:2], 1, device="cuda") / 2**16) for one in numbers]
    x_TE, weights_Tk = torch.rand(9, 4096, device="cuda", dtype=torch.bfloat16), torch.ones(9, 1, device="cuda")
    ids_Tk = torch.tensor([0, 65, 64, 65, 1, 65, 63, 65, 65], device="cuda")[:, None]
    ours, exact = (op(x_TE, *both, weights_Tk, ids_Tk, None, None) for op in (fp8_experts, reference))
    torch.testing.assert_close(ours, exact, rtol=2.0**-6, atol=0)


@pytest.mark.gpu
def test_a_captured_product_computes_from_what_the_router_says_at_each_replay() -> None:
    both, x_TE = on("cuda", random_weights(8, (256, 128))), torch.randn(40, 256, device="cuda", dtype=torch.bfloat16)
    weights_Tk, ids_Tk = (one.cuda() for one in routed(40, 8, 2))
    fp8_experts(x_TE, *both, weights_Tk, ids_Tk, None, None)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_TE = fp8_experts(x_TE, *both, weights_Tk, ids_Tk, None, None)
    ids_Tk.copy_(torch.stack([torch.randperm(8)[:2] for _ in range(40)]))
    graph.replay()
    assert torch.equal(out_TE, fp8_experts(x_TE, *both, weights_Tk, ids_Tk, None, None))
