"""The section `sampling.repetition_stop`: when an output runs in circles."""

from __future__ import annotations

from pydantic import Field

from bulkrun.job.jobfile.section import Section
from bulkrun.request import STRUCTURE_BOUNDS, RepetitionStop

_BOUNDS = STRUCTURE_BOUNDS["repetition_stop"]


class RepetitionStopSpec(Section):
    """End an output that runs in circles: an error row `runaway` that keeps the text so far."""

    max_pattern: int = Field(
        64, **_BOUNDS["max_pattern"].limits, description="Maximum length of a repeated pattern, in tokens."
    )
    repeats: int = Field(
        4, **_BOUNDS["repeats"].limits, description="How many times in a row it stands at the end of the output."
    )
    min_tokens: int = Field(
        48, **_BOUNDS["min_tokens"].limits, description="Minimum number of tokens in the repetitions together."
    )

    def to_param(self) -> RepetitionStop:
        """The engine's parameter."""
        return RepetitionStop(self.max_pattern, self.repeats, self.min_tokens)
