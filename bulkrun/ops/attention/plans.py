"""What attention works out of a step's lengths once, by its first layer, for all layers with the same window.

How a step is cut differs by implementation, so each has its own kind of plan here. Knows no step: `sequence_groups`,
`attention_tiles` and `triton/partial_results` make them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from bulkrun.windows import Window


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The reference's: s sequences padded to Q queries and L keys each."""

    query_index: torch.Tensor  # int64 [s * Q]: rows of q to read; padding repeats a valid row
    output_index: torch.Tensor  # int64 [s * Q]: rows of the output to write; padding goes to row T, past the end
    key_slots: torch.Tensor  # int64 [s * L]: cache slots to read; padding repeats the sequence's own first key
    mask: torch.Tensor  # float [s, 1, Q, L]: 0 where a query sees a key, the dtype's lowest number elsewhere
    num_seqs: int
    num_queries: int
    num_keys: int


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """The batch-invariant attention's: U units of R rows and N items.

    Units with more items come first, items go by their order within the unit.
    """

    query_index: torch.Tensor  # int64 [U * Q]: rows of q to read; padding repeats a valid row
    output_index: torch.Tensor  # int64 [U * Q]: rows of the output to write; padding goes to row T, past the end
    unit_N: torch.Tensor  # int64: the unit of every item
    key_slots_NL: torch.Tensor  # int64: cache slots to read; padding repeats a key that the unit may read
    mask: torch.Tensor  # float [N, 1, R, L]: 0 where a row sees a key, the dtype's lowest number elsewhere
    units_per_step: list[int]  # how many units have a first item, a second one, ...
    num_queries: int  # Q
    num_rows: int  # R

    @property
    def num_units(self) -> int:
        """U."""
        return self.query_index.numel() // self.num_queries


@dataclass(slots=True)
class AttentionPlans:
    """One step's, by window; empty until its first layer attends."""

    groups: dict[Window | None, list[SequenceGroup]] = field(default_factory=dict)
    tiles: dict[Window | None, AttentionTiles] = field(default_factory=dict)
    # of decode attention in Triton: where the partial results of each sequence begin, int32
    part_starts: dict[Window | None, torch.Tensor] = field(default_factory=dict)
