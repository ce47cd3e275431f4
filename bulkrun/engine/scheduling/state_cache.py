"""Which prefixes have their recurrent state kept, for models that keep one of each sequence; as numbers of rows.

Keys and values say what every token of a prefix was; a state says only what it came to after the last one. So a
sequence can begin behind a prefix only where its state was copied just then, to a row beyond those of sequences. That
is done where the next one in the queue, which waits for it, has the same tokens and then others; and where those had
others that came before. Where both had them, little is enough: then a whole job may begin so. Knows no tensors and no
budgets.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf

from bulkrun.engine.scheduling.sequence import Sequence

MIN_GAIN = 32  # tokens that the next one need not compute; less is not worth that it waits,
MIN_OF_MANY = 16  # unless those before had them too


class StateCache:
    """The rows of kept states; without rows nothing is ever kept."""

    def __init__(self, rows: range) -> None:
        self._unused = list(reversed(rows))
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # by the hash of the prefix's last block, latest use last
        self._saved: dict[bytes, int] = {}  # by the step that is being scheduled: the one after it can load them
        self._coming: dict[bytes, Sequence] = {}  # who computes that far

    @property
    def is_enabled(self) -> bool:
        """Whether there are rows for any."""
        return bool(self._unused or self._kept or self._saved)

    def begin_step(self) -> None:
        """What the step before saves is there for this one, and who has left saves nothing more."""
        self._kept |= self._saved
        self._saved = {}
        self._coming = {last_hash: seq for last_hash, seq in self._coming.items() if seq.saves_state_at}

    def find(self, hashes: SequenceOf[bytes]) -> tuple[int, int | None]:
        """Of the blocks of this chain so many, and the row with the state behind them; (0, None): none is kept."""
        for index in range(len(hashes), 0, -1):
            if hashes[index - 1] in self._kept:
                return index, self._kept[hashes[index - 1]]
        return 0, None

    def is_coming(self, hashes: SequenceOf[bytes]) -> bool:
        """Whether somebody runs who will save a state of this chain, or does so in this step."""
        return any(one in self._saved or one in self._coming for one in hashes)

    def plan_saves(self, seq: Sequence, next_seq: Sequence | None, num_known: int, block_size: int) -> None:
        """Have a sequence that begins to run stop where states are worth keeping.

        `next_seq` is the next one in the queue; somebody before has had the tokens of the first `num_known` blocks.
        """
        if not (self.is_enabled and seq.shares_prefix):
            return
        num_common = 0 if next_seq is None else _num_common(seq, next_seq, block_size)
        done = seq.num_computed_tokens
        for num_blocks, least in zip(sorted((num_known, num_common)), (MIN_OF_MANY, MIN_GAIN), strict=True):
            if num_blocks * block_size - done >= least:
                done = num_blocks * block_size
                seq.saves_state_at.append(done)
                self._coming[seq.block_hashes[num_blocks - 1]] = seq

    def save(self, seq: Sequence, block_size: int) -> int | None:
        """The row for the state of a sequence that has come as far as it should; None: all are written in this step.

        None too where another one, which did not wait for it, brings the same state in this step.
        """
        last_hash = seq.block_hashes[seq.saves_state_at.pop(0) // block_size - 1]
        self._coming.pop(last_hash, None)
        if last_hash in self._saved:
            return None
        row = self._kept.pop(last_hash, None)
        if row is None:
            row = self._row()
        if row is not None:
            self._saved[last_hash] = row
        return row

    def use(self, row: int) -> None:
        """Note that the state in this row is loaded: it is the last to go."""
        self._kept.move_to_end(next(key for key, kept in self._kept.items() if kept == row))

    def _row(self) -> int | None:
        """One that nobody needs any more; what is loaded from it in this step is, before it is written."""
        if self._unused:
            return self._unused.pop()
        return self._kept.popitem(last=False)[1] if self._kept else None


def _num_common(seq: Sequence, next_seq: Sequence, block_size: int) -> int:
    """Blocks with which both begin, and behind which both have something to compute."""
    if not next_seq.reads_prefix:
        return 0
    num_blocks = (min(seq.num_tokens, next_seq.num_tokens) - 1) // block_size
    pairs = zip(*(one.hash_full_blocks(num_blocks, block_size) for one in (seq, next_seq)), strict=True)
    return sum(ours == theirs for ours, theirs in pairs)
