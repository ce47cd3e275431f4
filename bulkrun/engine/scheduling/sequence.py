"""One sequence inside the engine: its tokens, how far they are computed, and which blocks hold their KV.

Pure Python; knows nothing of batches, budgets or tensors. `num_computed_tokens` chases `num_tokens`: there is no
prefill or decode state, only a distance, and a sequence one token behind happens to be "in decode".
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from bulkrun.engine.scheduling.block_manager import ROOT_HASH, hash_block
from bulkrun.engine.scheduling.repetition import RepetitionWatch
from bulkrun.request import Request, StopMatcher, TokenConstraint, TokenLogprob


class PromptTail(NamedTuple):
    """The tokens of a prompt behind its full blocks, without the last one, whose logits everybody computes."""

    block_index: int  # in the block table
    num_tokens: int
    hash: bytes


class Sequence:
    """A request on its way. It starts with its prompt alone: whoever makes it appends tokens, old ones and new.

    `eos_token_ids` are empty where they are ignored; `stop_token_ids` are all ids that end it, those included;
    `max_num_tokens` is where it ends at the latest, prompt included. `prompt_logprobs` grows with the computed prompt.

    `num_pending` counts tokens that steps under way will bring: the device has them in time for the next step, the host
    does not know them yet. `num_unsent_tokens` counts the other way round: the last tokens that the host knows (forced
    ones: see `append_forced_tokens`) and that its row on the device lacks.
    """

    __slots__ = (
        "arrival",
        "arrived_at",
        "block_hashes",
        "block_table",
        "constraint",
        "eos_token_ids",
        "has_ended",
        "has_offered_tail",
        "late_token_ids",
        "logprobs",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_pending",
        "num_preemptions",
        "num_prompt_tokens",
        "num_registered_blocks",
        "num_shared_tokens",
        "num_unsent_tokens",
        "priority",
        "prompt_logprobs",
        "repetition",
        "request",
        "row",
        "saves_state_at",
        "shares_prefix",
        "stop_matcher",
        "stop_token_ids",
        "tail",
        "takes_raw_logits",
        "token_ids",
    )

    def __init__(
        self,
        request: Request,
        *,
        arrival: int,
        arrived_at: float = 0.0,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        stop_matcher: StopMatcher | None = None,
        constraint: TokenConstraint | None = None,
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.arrival = arrival
        self.priority = request.priority
        self.arrived_at = arrived_at  # seconds, on the engine's clock
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_num_tokens = min(self.num_prompt_tokens + sampling.max_tokens, max_model_len)
        # after the end of a structured output nothing can follow, whatever else is ignored
        ignores_eos = sampling.ignore_eos and sampling.structured_outputs is None
        self.eos_token_ids = frozenset() if ignores_eos else eos_token_ids
        self.stop_token_ids = self.eos_token_ids.union(sampling.stop_token_ids)
        # what `min_tokens` holds back: as in vLLM an end does not come early where it is ignored either
        self.late_token_ids = eos_token_ids.union(sampling.stop_token_ids)
        self.stop_matcher = stop_matcher
        self.constraint = constraint
        self.repetition = None if sampling.repetition_stop is None else RepetitionWatch(sampling.repetition_stop)
        self.token_ids = array("i", request.prompt_token_ids)
        self.logprobs: list[TokenLogprob] | None = None if sampling.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprob | None] | None = None if sampling.prompt_logprobs is None else [None]
        # nothing changes the logits before a token is chosen, and nobody asks for log-probabilities
        self.takes_raw_logits = constraint is None and not sampling.shapes_logits and sampling.logprobs is None
        self.row: int | None = None  # its permanent row in the device tensors while it runs
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []
        self.tail: PromptTail | None = None  # computed when first asked for
        self.has_offered_tail = False  # nothing is left to offer at this admission
        self.num_registered_blocks = 0
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0  # prompt tokens the prefix cache held at its first admission
        self.num_shared_tokens = 0  # tokens the prefix cache held at its latest admission
        self.num_preemptions = 0
        self.num_pending = 0
        self.num_unsent_tokens = 0
        self.saves_state_at: list[int] = []  # tokens after which its state is kept for others, still to come
        self.shares_prefix = True  # may read what others computed, and others may read what it computes
        self.has_ended = False  # what steps under way still bring for it is dropped

    @property
    def order(self) -> tuple[int, int]:
        """Waiting order: priority, then arrival."""
        return self.priority, self.arrival

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far, pending ones included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens to compute, up to where its state is to be kept next."""
        end = self.saves_state_at[0] if self.saves_state_at else self.num_tokens
        return end - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Known output tokens, those brought along included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        """Known output tokens, those brought along included."""
        return tuple(self.token_ids[self.num_prompt_tokens :])

    @property
    def ends_when_known(self) -> bool:
        """Whether its pending tokens are its last ones, whatever they are."""
        return self.num_pending > 0 and self.num_tokens >= self.max_num_tokens

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt or output are asked for, so that every token has to be computed."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether log-probabilities of its prompt are still missing, so that no cache can stand in for computing."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def reads_prefix(self) -> bool:
        """Whether what others have computed of its beginning stands in for computing it."""
        return self.shares_prefix and not self.needs_prompt_logits

    @property
    def running_row(self) -> int:
        """Its permanent row in the device tensors; only a running sequence has one."""
        assert self.row is not None, "it does not run"
        return self.row

    def leave_pool(self) -> None:
        """Own no row and no blocks any more: nothing of it is computed."""
        self.row = None
        self.block_table = []
        self.num_computed_tokens = self.num_registered_blocks = 0
        self.num_unsent_tokens = 0
        self.saves_state_at = []
        self.has_offered_tail = False

    def hash_full_blocks(self, count: int, block_size: int) -> list[bytes]:
        """The hash chain of the first `count` blocks, all of whose tokens must be known; remembered, not redone."""
        assert count * block_size <= len(self.token_ids), "only full blocks have a hash"
        hashes = self.block_hashes
        for index in range(len(hashes), count):
            tokens = self.token_ids[index * block_size : (index + 1) * block_size]
            hashes.append(hash_block(hashes[-1] if hashes else ROOT_HASH, tokens))
        return hashes[:count]

    def prompt_tail(self, block_size: int) -> PromptTail:
        """The end of the prompt behind its full blocks (none: `num_tokens` 0); remembered, not redone."""
        if self.tail is None:
            block_index, num_tokens = divmod(self.num_prompt_tokens - 1, block_size)
            parent = self.hash_full_blocks(block_index, block_size)[-1] if block_index else ROOT_HASH
            first = block_index * block_size
            tail_hash = hash_block(parent, self.token_ids[first : first + num_tokens])
            self.tail = PromptTail(block_index, num_tokens, tail_hash)
        return self.tail
