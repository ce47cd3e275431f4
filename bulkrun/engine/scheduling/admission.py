"""How much KV memory the running sequences will still want: the guess behind admitting one more.

Pure arithmetic over observed output lengths; knows nothing of blocks, queues or tensors. Reserving `max_tokens` for
everyone leaves most of the memory empty (limits are generous, outputs short); reserving nothing makes sequences
throw each other out. So: expect what was seen, and after being wrong expect more for a while.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from bulkrun.engine.scheduling.sequence import Sequence

MIN_SAMPLES = 16  # fewer finished outputs than this say nothing yet
WINDOW = 512  # the inputs of a job drift: only the latest outputs count
QUANTILE = 0.6  # of the outputs that got as long as this one; a little above the middle, for headroom
CAUTION_DECAY = 0.98  # per finished sequence: a preemption is forgotten after about a hundred


class Growth(NamedTuple):
    """What one sequence holds for itself alone now, and how many tokens it will still add."""

    held_tokens: int
    remaining_tokens: int


class OutputLengthEstimator:
    """Predicts output lengths from those of finished sequences; `caution` (0 to 1) moves it towards the limit."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._caution = 0.0

    def observe(self, num_output_tokens: int) -> None:
        """Learn from one sequence that ended by itself."""
        self._recent.append(num_output_tokens)
        insort(self._sorted, num_output_tokens)
        if len(self._recent) > WINDOW:
            self._sorted.pop(bisect_right(self._sorted, self._recent.popleft()) - 1)
        self._caution *= CAUTION_DECAY

    def observe_preemption(self) -> None:
        """The guess was too low: reserve up to the limit again, and relax only as sequences finish."""
        self._caution = 1.0

    def remaining_tokens(self, seq: Sequence) -> int:
        """How many tokens the sequence will probably still generate; at least 1, at most its limit allows."""
        limit = seq.max_num_tokens - seq.num_tokens
        guess = min(self._guess(seq, limit), limit)
        return max(1, round(guess + self._caution * (limit - guess)))

    def _guess(self, seq: Sequence, limit: int) -> int:
        if not seq.stop_token_ids and seq.stop_matcher is None:
            return limit  # nothing can end it earlier
        done = seq.num_output_tokens
        first_longer = bisect_right(self._sorted, done)
        num_longer = len(self._sorted) - first_longer
        if len(self._sorted) < MIN_SAMPLES or not num_longer:
            return limit
        return self._sorted[first_longer + int(QUANTILE * num_longer)] - done


class Growths:
    """What the running sequences hold and will hold, in order: asking about one more looks at none of them anew."""

    def __init__(self, growths: Iterable[Growth], block_size: int) -> None:
        self._block_size = block_size
        self._longest_first = sorted(growths, key=_shortness)
        self._held_tokens = sum(growth.held_tokens for growth in self._longest_first)
        self._remaining_tokens = sum(growth.remaining_tokens for growth in self._longest_first)
        self._held_blocks = sum(self._blocks(growth.held_tokens) for growth in self._longest_first)
        self._final_blocks = sum(self._blocks(sum(growth)) for growth in self._longest_first)

    def __len__(self) -> int:
        return len(self._longest_first)

    def add(self, growth: Growth) -> None:
        """One more is running."""
        insort(self._longest_first, growth, key=_shortness)
        self._held_tokens += growth.held_tokens
        self._remaining_tokens += growth.remaining_tokens
        self._held_blocks += self._blocks(growth.held_tokens)
        self._final_blocks += self._blocks(sum(growth))

    def fit_with(self, growth: Growth, num_blocks: int, num_used: int) -> bool:
        """Whether they and one more can grow to their ends in a pool of `num_blocks`.

        num_used: blocks that they have, each counted once whoever shares it.
        """
        num_shared = max(0, num_used - self._held_blocks)
        if self._final_blocks + self._blocks(sum(growth)) <= num_blocks - num_shared:
            return True
        tokens_left_over = max(0, num_used * self._block_size - self._held_tokens)  # shared, or in half-empty blocks
        room = (num_blocks - 1) * self._block_size - tokens_left_over  # without its own half-empty last block
        return self._bound_with(growth) <= room or self._peak_tokens_with(growth) <= room

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _bound_with(self, growth: Growth) -> int:
        """No less than `_peak_tokens_with`, without going through them: as if all were there at their ends."""
        return self._held_tokens + self._remaining_tokens + sum(growth)

    def _peak_tokens_with(self, growth: Growth) -> int:
        """The most KV tokens they and one more will hold at one time, if each grows by one per step and then ends.

        Just before the sequence with the k-th largest remainder r ends, k sequences are alive and each has grown by r;
        the peak is at one of those moments.
        """
        longest_first = self._longest_first.copy()
        insort(longest_first, growth, key=_shortness)
        peak = held = 0
        for alive, (held_tokens, remaining_tokens) in enumerate(longest_first, start=1):
            held += held_tokens
            peak = max(peak, held + alive * remaining_tokens)
        return peak


def _shortness(growth: Growth) -> int:
    return -growth.remaining_tokens
