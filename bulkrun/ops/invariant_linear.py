"""Matrix products with weights in which a row's bits depend on that row and the weight, and on nothing else.

A library chooses its way to multiply by the number of rows and of threads, and each way sums in another order. Here
every product is of one size: TILE_ROWS rows with one panel of the weight, on one thread (the idea: Thinking Machines,
"Defeating nondeterminism in LLM inference", 2025). That a row's place in its tile does not matter is a property of the
processor's kernels that `is_invariant_linear` looks for. This is the reference, and what runs on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bulkrun.ops.linear import linear, pack_for_onednn
from bulkrun.ops.tile_workers import TileWorkers

TILE_ROWS = 32  # two tiles of the matrix units; the cost of one decoding sequence is that of so many
_PANEL = 1024  # rows of a weight in one product, about: small enough for threads to share a weight


def make_panels(weight: torch.Tensor) -> list[torch.Tensor]:
    """The weight [O, I] as `invariant_linear` takes it: pieces [P, I] in order, packed where that is faster.

    On a GPU one piece. How it is cut depends on O only.
    """
    if weight.is_cuda:
        return [weight.contiguous()]
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

    panels: from `make_panels`. bias: [O]. On a GPU T may be anything and `workers` is not used.
    """
    assert workers is not None, "only the kernel can do without"
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


def is_invariant_linear(panel: torch.Tensor) -> bool:
    """Whether a row of a tile gives the same bits at every place and beside any others, with this panel.

    Tried with noise; call with one thread. Panels of one shape, dtype and layout behave alike.
    """
    generator = torch.Generator().manual_seed(0)
    x_RI = torch.randn(TILE_ROWS, panel.shape[1], generator=generator).to(panel.dtype)
    same_RI = x_RI[:1].expand(TILE_ROWS, -1).contiguous()
    turned_RO = linear(x_RI.roll(7, 0).contiguous(), panel, None)
    same_RO = linear(same_RI, panel, None)
    is_same_everywhere = bool((same_RO == same_RO[:1]).all())
    return is_same_everywhere and torch.equal(turned_RO.roll(-7, 0), linear(x_RI, panel, None))
