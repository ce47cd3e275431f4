"""Matrix products with weights in which a row's bits depend on that row and the weight, and on nothing else.

Our own products (`cpu.panel_linear`) sum in one order whatever the number of rows and of threads. A library chooses its
way to multiply by both, and each way sums in another order; so there every product is of one size: TILE_ROWS rows with
one panel of the weight, on one thread (the idea: Thinking Machines, "Defeating nondeterminism in LLM inference", 2025).
That a row's place in its tile does not matter is a property of the processor's kernels that `is_invariant_linear` looks
for. This is the reference, and what runs on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bulkrun.ops.cpu.panel_linear import can_pack_panels, pack_panels, pack_panels_
from bulkrun.ops.matmul.linear import linear, pack_for_onednn
from bulkrun.ops.tile_workers import TileWorkers

TILE_ROWS = 32  # two tiles of the matrix units; the cost of one decoding sequence is that of so many
_PANEL = 1024  # rows of a weight in one product, about: small enough for threads to share a weight


def make_panels(weight: torch.Tensor, *, in_place: bool = False) -> list[torch.Tensor]:
    """The weight [O, I], or in panels of our own, as `invariant_linear` takes it: pieces [P, I] in order.

    They are packed where that is faster. One piece on a GPU and for our own products; else how it is cut depends on O
    only. `in_place`: they may take the memory of the weight, which must not be used afterwards.
    """
    if weight.is_cuda or weight.ndim == 4:
        return [weight.contiguous()]
    if can_pack_panels(weight):
        return [pack_panels_(weight) if in_place else pack_panels(weight)]
    num_panels = -(-weight.shape[0] // _PANEL)
    width = -(-weight.shape[0] // num_panels)
    width += -width % 64
    return [pack_for_onednn(panel.contiguous()) for panel in weight.split(width)]


def invariant_linear(
    x_TI: torch.Tensor,
    panels: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    workers: TileWorkers | None,
) -> torch.Tensor:
    """`x @ weight.T + bias`; x_TI: [T, I], T a multiple of TILE_ROWS; returns [T, O] in x's dtype.

    panels: from `make_panels`. bias: [O]. With our own products T may be anything, and on a GPU, which does not use
    `workers`.
    """
    assert workers is not None, "only the kernel can do without"
    if panels[0].ndim == 4:
        with workers.all_together():
            return linear(x_TI, panels[0], bias)
    assert x_TI.shape[0] % TILE_ROWS == 0, "every product has the same number of rows"
    x_TI = x_TI.contiguous()
    ends, width = [0], 0
    for panel in panels:
        width += panel.shape[0]
        ends.append(width)
    out_TO = x_TI.new_empty(x_TI.shape[0], width)

    def multiply(piece: tuple[int, int]) -> None:
        index, row = piece
        columns = slice(ends[index], ends[index + 1])
        own_bias = None if bias is None else bias[columns]
        out_TO[row : row + TILE_ROWS, columns] = linear(x_TI[row : row + TILE_ROWS], panels[index], own_bias)

    rows = range(0, x_TI.shape[0], TILE_ROWS)
    workers.run(multiply, [(index, row) for index in range(len(panels)) for row in rows])
    return out_TO


def is_invariant_linear(panel: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a row of a tile gives the same bits at every place and beside any others, with this panel.

    Tried with noise of this dtype; call with one thread. Panels of one shape, dtype and layout behave alike.
    """
    generator = torch.Generator().manual_seed(0)
    size = panel.shape[1] if panel.ndim == 2 else panel[0, :, 0].numel()
    x_RI = torch.randn(TILE_ROWS, size, generator=generator).to(dtype)
    same_RI = x_RI[:1].expand(TILE_ROWS, -1).contiguous()
    turned_RO = linear(x_RI.roll(7, 0).contiguous(), panel, None)
    same_RO = linear(same_RI, panel, None)
    is_same_everywhere = bool((same_RO == same_RO[:1]).all())
    return is_same_everywhere and torch.equal(turned_RO.roll(-7, 0), linear(x_RI, panel, None))
