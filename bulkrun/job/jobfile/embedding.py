"""The section `embedding`: what becomes of a text with `task: embed`, and the keys of other sections that go with it.

A job of either task leaves alone what is for the other one: a key that would do nothing is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import Field, model_validator

from bulkrun.job.jobfile.sampling import SamplingSpec
from bulkrun.job.jobfile.section import Section
from bulkrun.settings import NOT_FOR_EMBEDDING, EmbeddingArgs, Pooling

Task = Literal["generate", "embed"]

# How rows that are embedded run: without noise, so that equal texts are one; the engine generates nothing.
NOTHING_SAMPLED = SamplingSpec(temperature=0, max_tokens=1)

_EMBEDDED_AS_IT_IS = "with task: embed a text is embedded as it is"
_AS_IT_IS = ("chat_template", "none")  # what such a job means anyway
_NOT_WITH_EMBED = {
    "prompt.messages": f"{_EMBEDDED_AS_IT_IS}; write prompt.column or prompt.template",
    "prompt.system": f"{_EMBEDDED_AS_IT_IS}; embedding.prompt is put before each",
    "prompt.chat_template": f"{_EMBEDDED_AS_IT_IS}, without a chat template; leave it out",
    "prompt.chat_template_kwargs": f"{_EMBEDDED_AS_IT_IS}, without a chat template; leave them out",
    "run.max_tokens_per_row": "nothing is generated with task: embed; engine.max_model_len bounds a text, and "
    "run.on_too_long says what becomes of a longer one",
    "run.row_timeout": "a text is embedded in one step (task: embed); leave it out",
    **{f"engine.{key}": f"with task: embed {why}; leave it out" for key, why in NOT_FOR_EMBEDDING.items()},
}


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


def problem_of_task(task: Task, sections: Mapping[str, Section]) -> str | None:
    """The first key that is of no use to a job with this task, and what to do about it. `sections` are the job's."""
    problems = _problems_of_embed(sections) if task == "embed" else _problems_of_generate(sections)
    return next(problems, None)


def _problems_of_generate(sections: Mapping[str, Section]) -> Iterator[str]:
    fix = "is for vectors, and this job generates text; write task: embed, or leave it out"
    return (f"embedding.{key}: {fix}" for key in _given(sections["embedding"]))


def _problems_of_embed(sections: Mapping[str, Section]) -> Iterator[str]:
    fix = "nothing is sampled with task: embed; leave it out, or write task: generate"
    yield from (f"sampling.{key}: {fix}" for key in _given(sections["sampling"]))
    for place, fix in _NOT_WITH_EMBED.items():
        name, _, key = place.partition(".")
        if key in _given(sections[name]) and (key, getattr(sections[name], key)) != _AS_IT_IS:
            yield f"{place}: {fix}"


def _given(section: Section) -> Iterator[str]:
    """The keys of a section that are not left as they are by default."""
    untouched = type(section)()
    return (key for key in type(section).model_fields if getattr(section, key) != getattr(untouched, key))
