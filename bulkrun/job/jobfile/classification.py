"""The section `classification`: how a text becomes scores of labels with `task: classify`."""

from __future__ import annotations

from pydantic import Field

from bulkrun.job.jobfile.section import Section
from bulkrun.settings import ClassificationArgs, ScoreActivation


class ClassificationSpec(Section):
    """How what the model makes of a text becomes a label and scores. What is not set comes from its config.json."""

    activation: ScoreActivation | None = Field(
        None,
        description="softmax: the scores of all labels sum to 1; sigmoid: each label by itself, from 0 to 1; none: the "
        "model's numbers as they come, for regressions. Default: the model's: by its problem_type, else softmax for "
        "several labels and for one what its cross-encoder key says, or sigmoid.",
    )
    labels: list[str] | None = Field(
        None,
        min_length=1,
        description="Names for the labels, in the model's order. Default: the model's (`id2label` in config.json).",
    )

    def to_args(self, pair_separator: int | None = None) -> ClassificationArgs:
        """What the engine is told; `pair_separator` is the tokenizer's, of a job of pairs of texts."""
        return ClassificationArgs(activation=self.activation, pair_separator=pair_separator)
