"""`run.max_tokens_per_row`: a bound on what one row may cost, prompt and all its outputs together.

The prompt counts once, because the samples of a row share it; what it leaves is divided equally among the outputs.
An output that asks for less keeps what it asks for. Knows token counts only.
"""

from __future__ import annotations

import json
from typing import Any

from bulkrun.job.prompts.overrides import RowSampling
from bulkrun.request import RowError


class RowBudget:
    """Most tokens of a row that makes `outputs` outputs. Without a bound (None) nothing changes."""

    def __init__(self, max_tokens_per_row: int | None, outputs: int, min_tokens: int = 0) -> None:
        self._bound, self._outputs, self._min_tokens = max_tokens_per_row, outputs, min_tokens

    def prompt_room(self, max_tokens: int) -> int | None:
        """The length to cut a longer prompt to: it leaves room for all of `max_tokens`, but keeps half of the bound."""
        if self._bound is None:
            return None
        return self._bound - max(self._outputs, min(self._outputs * max_tokens, self._bound // 2))

    def limit(self, num_prompt_tokens: int, sampling: RowSampling) -> RowSampling | RowError:
        """The row's sampling with `max_tokens` cut to its share of what the prompt leaves, or a `too_long` error."""
        if self._bound is None:
            return sampling
        share = (self._bound - num_prompt_tokens) // self._outputs
        if share < 1:
            wanted = "an output" if self._outputs == 1 else f"{self._outputs} outputs"
            return RowError(
                "too_long",
                f"the prompt has {num_prompt_tokens} tokens, which leaves nothing for {wanted} in "
                f"run.max_tokens_per_row = {self._bound}; raise it, or shorten the prompt",
            )
        return sampling if sampling.max_tokens <= share else self._cut(sampling, share)

    def _cut(self, sampling: RowSampling, share: int) -> RowSampling:
        """The cut is a value of the row's own, so that it is planned once and resumes as it was."""
        values: dict[str, Any] = json.loads(sampling.overrides or "{}")
        values["max_tokens"] = share
        if values.get("min_tokens", self._min_tokens) > share:
            values["min_tokens"] = share
        overrides = json.dumps(values, separators=(",", ":"), ensure_ascii=False, sort_keys=True)
        return sampling._replace(overrides=overrides, max_tokens=share)
