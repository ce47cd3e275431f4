"""The FLOPs and bytes an op cannot do without, worked out from shapes. Torch-free.

Bytes are those of tensors read and written once: weights, activations, and of attention the keys and values that some
query sees. A prefix that sequences share counts for each of them, so reading it once can pass a ceiling. What an op
recomputes, gathers or pads counts for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from bulkrun.launch.bench.ceilings import FLOPS_PER_PAIR, FLOPS_PER_WEIGHT, attended
from bulkrun.windows import Window, first_seen


class OpCost(NamedTuple):
    """What one call of an op must compute and move."""

    flops: float = 0.0
    num_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call: the op's name, how many rows (tokens, or sequences that sample) it was given, and its cost.

    `prefill`: the part that a GPU's kernels of that name do, where one call launches several; the rest is the call's.
    """

    name: str
    rows: int
    cost: OpCost
    prefill: OpCall | None = None

    def part(self, kernel: str) -> OpCall:
        """The part of the cost that a kernel of this name accounts for."""
        return self.prefill if self.prefill is not None and "prefill" in kernel else self


@dataclass(frozen=True, slots=True)
class StepSequences:
    """A step's sequences: where each one's query tokens start and end. The first `num_decode_seqs` have one."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    num_decode_seqs: int

    @property
    def decode(self) -> StepSequences:
        """Its sequences in decode."""
        n = self.num_decode_seqs
        return StepSequences(self.starts[:n], self.counts[:n], n)

    @property
    def prefill(self) -> StepSequences:
        """Its chunks of prompts."""
        n = self.num_decode_seqs
        return StepSequences(self.starts[n:], self.counts[n:], 0)

    @property
    def kind(self) -> str:
        """decode, prefill or mixed."""
        if self.num_decode_seqs == len(self.starts):
            return "decode"
        return "mixed" if self.num_decode_seqs else "prefill"


def product_cost(rows: int, num_weights: int, *, weight_itemsize: float, activation_bytes: int) -> OpCost:
    """A matrix product with weights; `activation_bytes`: what goes in and comes out."""
    return OpCost(FLOPS_PER_WEIGHT * rows * num_weights, num_weights * weight_itemsize + activation_bytes)


def experts_cost(rows: int, *, num_experts: int, experts_per_tok: int, expert_weights: int, itemsize: float) -> OpCost:
    """The gated MLPs that tokens are sent to; of the weights those that some token can need."""
    sent = rows * experts_per_tok
    return OpCost(FLOPS_PER_WEIGHT * sent * expert_weights, min(sent, num_experts) * expert_weights * itemsize)


def attention_cost(
    shape: StepSequences, *, attention_width: int, kv_bytes: int, window: Window | None, itemsize: int
) -> OpCost:
    """One layer's attention. attention_width: query heads times their dimension; kv_bytes: of one token."""
    flops = num_bytes = 0.0
    for start, count in zip(shape.starts, shape.counts, strict=True):
        end = start + count
        first = 0 if window is None else max(0, first_seen(start, window))
        flops += FLOPS_PER_PAIR * attention_width * (attended(end, window) - attended(start, window))
        num_bytes += (end - first) * kv_bytes + 2 * count * attention_width * itemsize
    return OpCost(flops, num_bytes)
