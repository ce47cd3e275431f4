"""What a job does with its rows, and which keys go with that.

A job of any task leaves alone what is for another one: a key that would do nothing is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bulkrun.job.jobfile.sampling import SamplingSpec
from bulkrun.job.jobfile.section import Section
from bulkrun.settings import NOT_FOR_EMBEDDING, Task

# How rows run of which nothing is generated: without noise, so that equal texts are one.
NOTHING_SAMPLED = SamplingSpec(temperature=0, max_tokens=1)

_SECTIONS: Mapping[str, tuple[Task, str]] = {  # those of one task alone, and what it makes
    "embedding": ("embed", "vectors"),
    "classification": ("classify", "labels"),
}
_MAKES: Mapping[Task, str] = {"generate": "generates text", "embed": "makes vectors", "classify": "makes labels"}
_AS_IT_IS = ("chat_template", "none")  # what a job that generates nothing means anyway


def problem_of_task(task: Task, sections: Mapping[str, Section]) -> str | None:
    """The first key that is of no use to a job with this task, and what to do about it. `sections` are the job's."""
    return next(_problems(task, sections), None)


def _problems(task: Task, sections: Mapping[str, Section]) -> Iterator[str]:
    for name, (other, made) in _SECTIONS.items():
        if task != other:
            fix = f"is for {made}, and this job {_MAKES[task]}; write task: {other}, or leave it out"
            yield from (f"{name}.{key}: {fix}" for key in _given(sections[name]))
    of_pairs = ("text_pair",) if task == "embed" else ("text_pair", "score_lines")  # of lines there are cosines too
    given = [key for key in _given(sections["prompt"]) if key in of_pairs]
    for key in given if task != "classify" else ():
        yield (
            f"prompt.{key}: is for labels of pairs of texts, and this job {_MAKES[task]}; write task: classify, or "
            "leave it out"
        )
    if task != "embed" and "text_lists" in _given(sections["prompt"]):
        yield (
            f"prompt.text_lists: is for vectors of lists of texts, and this job {_MAKES[task]}; write task: embed, or "
            "leave it out"
        )
    if task != "generate":
        yield from _problems_of_texts(task, sections)


def _problems_of_texts(task: Task, sections: Mapping[str, Section]) -> Iterator[str]:
    """Of a job that generates nothing."""
    fix = f"nothing is sampled with task: {task}; leave it out, or write task: generate"
    yield from (f"sampling.{key}: {fix}" for key in _given(sections["sampling"]))
    prompt = {*_given(sections["prompt"])}
    is_conversation = task == "classify" and "messages" in prompt
    if is_conversation and "text_pair" in prompt:
        yield "prompt.text_pair: goes with prompt.column or prompt.template, not with a conversation; leave one out"
    tools = f"nothing is called with task: {task}; leave it out"
    refused = {
        **dict.fromkeys(("prompt.tools", "prompt.tool_choice"), tools),
        "prompt.continue_final_message": f"nothing goes on with a message with task: {task}; leave it out",
        **({} if is_conversation else _of_conversations(task)),
        **_not_with_texts(task),
    }
    for place, fix in refused.items():
        name, _, key = place.partition(".")
        if key in _given(sections[name]) and (key, getattr(sections[name], key)) != _AS_IT_IS:
            yield f"{place}: {fix}"


def _of_conversations(task: Task) -> Mapping[str, str]:
    """What is of no use without one, and with vectors there is none."""
    as_it_is = f"with task: {task} a text is {'embedded' if task == 'embed' else 'classified'} as it is"
    system = "embedding.prompt is put before each" if task == "embed" else "write it into prompt.template"
    only = "" if task == "embed" else ", or write prompt.messages"
    return {
        **dict.fromkeys(("prompt.messages", "prompt.token_ids"), f"{as_it_is}; write prompt.column or prompt.template"),
        "prompt.system": f"{as_it_is}; {system}{only}",
        "prompt.chat_template": f"{as_it_is}, without a chat template; leave it out{only}",
        "prompt.chat_template_kwargs": f"{as_it_is}, without a chat template; leave them out{only}",
    }


def _not_with_texts(task: Task) -> Mapping[str, str]:
    return {
        "run.max_tokens_per_row": f"nothing is generated with task: {task}; engine.max_model_len bounds a text, and "
        "run.on_too_long says what becomes of a longer one",
        "engine.adapters": f"with task: {task} all rows have one model; run a job for each, with engine.adapter",
        "run.row_timeout": f"a text takes one step (task: {task}); leave it out",
        **{f"engine.{key}": f"with task: {task} {why}; leave it out" for key, why in NOT_FOR_EMBEDDING.items()},
    }


def _given(section: Section) -> Iterator[str]:
    """The keys of a section that are not left as they are by default."""
    untouched = type(section)()
    return (key for key in type(section).model_fields if getattr(section, key) != getattr(untouched, key))
