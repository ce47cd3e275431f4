"""The section `embedding`: how a text becomes a vector with `task: embed`."""

from __future__ import annotations

from pydantic import Field, model_validator

from bulkrun.job.jobfile.section import Section
from bulkrun.settings import EmbeddingArgs, Pooling


class EmbeddingSpec(Section):
    """How a text becomes a vector. What is not set comes from the model's own files (sentence-transformers')."""

    pooling: Pooling | None = Field(
        None,
        description="Which hidden states become the vector. cls: that of the first token; mean: the mean over all "
        "tokens; last: that of the last token. Default: the model's.",
    )
    normalize: bool | None = Field(
        None,
        description="Scale each vector to a length of 1, so that a dot product is the cosine. Default: the model's.",
    )
    dimensions: int | None = Field(
        None,
        ge=1,
        description="Keep the first so many numbers of each vector, for models that were trained for that "
        "(Matryoshka); cut before it is normalized. Default: all.",
    )
    prompt_name: str | None = Field(
        None,
        min_length=1,
        description="Put this one of the model's own prompts (`prompts` in config_sentence_transformers.json), as "
        "query or document, before each text. Default: the one that the model names as its default, if any.",
    )
    prompt: str | None = Field(
        None,
        description='Text to put before each text, as "query: "; "" for none. Default: that of prompt_name.',
    )

    @model_validator(mode="after")
    def _one_prompt(self) -> EmbeddingSpec:
        if self.prompt is not None and self.prompt_name is not None:
            raise ValueError("prompt_name: given together with prompt; keep one of the two")
        return self

    def to_args(self) -> EmbeddingArgs:
        """What the engine is told."""
        return EmbeddingArgs(pooling=self.pooling, normalize=self.normalize, dimensions=self.dimensions)
