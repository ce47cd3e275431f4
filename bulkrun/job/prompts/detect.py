"""A job that does not say how a row becomes a prompt: the input's columns tell. Knows names and shapes, no values.

Looked for in this order: an OpenAI batch line, then columns `messages`, `prompt`, `text`, `conversations`; of a job
that generates nothing `text`, then `prompt`. A mapping in the job file always wins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from bulkrun.data.types.json_types import Shape
from bulkrun.errors import JobFileError
from bulkrun.job.jobfile.prompt import PromptSpec
from bulkrun.job.jobfile.spec import JobSpec

# The columns that make a line an OpenAI batch line; `method` may be missing and is POST then.
BATCH_COLUMNS = ("custom_id", "url", "body")
_OF_PROMPTS = {  # column -> the key that names it
    "messages": "messages",
    "prompt": "column",
    "text": "column",
    "conversations": "messages",
}
_OF_TEXTS = {"text": "column", "prompt": "column"}
_PAIRS_IN_COLUMNS: Mapping[str, str] = {
    "classify": "For pairs in columns write prompt.column and prompt.text_pair",
    "embed": "For pairs in columns embed each column, and compare the vectors by array_cosine_similarity in DuckDB",
}


def has_mapping(prompt: PromptSpec) -> bool:
    """Whether the job file says how a row becomes a prompt."""
    return any(given is not None for given in (prompt.template, prompt.messages, prompt.column, prompt.token_ids))


def is_openai_batch(prompt: PromptSpec, columns: Iterable[str]) -> bool:
    """Whether the rows are OpenAI batch lines to be run as they are."""
    return not has_mapping(prompt) and set(BATCH_COLUMNS) <= set(columns)


def json_text_columns(spec: JobSpec, columns: Mapping[str, Shape]) -> list[str]:
    """The columns to read as JSON text, because their shapes differ from line to line.

    Those of a batch line (bodies), and those with a row's own schema, biases or stop strings: one type for all lines
    would give a schema the keys of the others, and refuse or rewrite a string among lists. Messages where a sample of
    them has contents of text and of text parts: one type would refuse whichever is rarer; or where they call tools: one
    type would give every call the arguments of all, or refuse objects among texts. So are lists of tools. Texts that
    are alone in some rows and listed in others: one type would refuse whichever is rarer.
    """
    batch = (*BATCH_COLUMNS, "method") if is_openai_batch(spec.prompt, columns) else ()
    own = [spec.sampling.per_row.get(key) for key in ("structured_outputs", "stop", "logit_bias")]
    own.append(spec.prompt.tools if isinstance(spec.prompt.tools, str) else None)
    messages, texts = _conversation_column(spec.prompt), _column_of_lists(spec, columns)
    return [
        name
        for name, shape in columns.items()
        if name in (*batch, *own)
        or (name == messages and (_has_text_and_parts(shape) or _has_calls(shape)))
        or (name == texts and _is_text_and_lists(shape))
    ]


def _column_of_lists(spec: JobSpec, columns: Iterable[str]) -> str | None:
    """The column of texts of which a row may have several."""
    if not spec.prompt.text_lists:
        return None
    return spec.prompt.column or next((name for name in _telling(spec) if name in columns), None)


def _is_text_and_lists(shape: Shape) -> bool:
    return {"string", "list"} <= shape.counts.keys()


def _conversation_column(prompt: PromptSpec) -> str | None:
    """The column of conversations that the job names, or that is taken for them where it names nothing."""
    messages = prompt.messages if has_mapping(prompt) else "messages"
    return messages if isinstance(messages, str) else None


def _has_text_and_parts(messages: Shape) -> bool:
    content = messages.item and messages.item.fields.get("content")
    return content is not None and _is_text_and_lists(content)


def _has_calls(messages: Shape) -> bool:
    calls = messages.item and messages.item.fields.get("tool_calls")
    return bool(calls and calls.item)


def needed_keys(spec: JobSpec) -> dict[str, list[str]]:
    """Of columns, the keys without which a row would be another: a conversation's calls.

    Where the sample of an input has none, its columns have no place for them (else they are `json_text_columns`).
    """
    messages = _conversation_column(spec.prompt)
    return {} if messages is None else {messages: ["tool_calls"]}


def detected_job(spec: JobSpec, columns: Sequence[str]) -> JobSpec:
    """The job with what the columns tell filled in: the prompt's mapping, and `custom_id` as the id of batch lines.

    A prompt section that is still without a mapping means OpenAI batch lines. Raises JobFileError when the columns do
    not tell, and for a system prompt beside batch lines.
    """
    if has_mapping(spec.prompt):
        return spec
    if is_openai_batch(spec.prompt, columns):
        return _as_batch(spec)
    if spec.prompt.score_lines:
        missing = ", ".join(name for name in BATCH_COLUMNS if name not in columns)
        raise JobFileError(
            [
                f"prompt.score_lines: the input is no OpenAI batch: it has no {missing}; it has: "
                f"{', '.join(columns) or 'none'}. {_PAIRS_IN_COLUMNS[spec.task]}"
            ]
        )
    telling = _telling(spec)
    for name, key in telling.items():
        if name in columns:
            if key == "messages" and spec.prompt.chat_template == "none":
                raise JobFileError([f"prompt.chat_template: none, but the input's column {name!r} needs one"])
            if key == "column" and spec.prompt.continue_final_message:
                raise JobFileError(
                    [
                        f"prompt.continue_final_message: the input's column {name!r} holds texts, which have no last "
                        "message; write prompt.messages, or leave it out"
                    ]
                )
            return spec.with_keys(prompt={key: name})
    raise JobFileError(
        [
            "prompt: does not say how a row becomes a prompt, and the input has none of the columns that tell: "
            f"custom_id, url and body (an OpenAI batch), {', '.join(telling)}. It has: {', '.join(columns) or 'none'}"
            f". Set one of prompt.template, {'prompt.messages, ' if spec.generates else ''}prompt.column"
        ]
    )


def _telling(spec: JobSpec) -> Mapping[str, str]:
    return _OF_PROMPTS if spec.generates else _OF_TEXTS


def is_told_by(spec: JobSpec, columns: Collection[str]) -> bool:
    """Whether the columns tell how a row of a job without a mapping becomes a prompt."""
    by_column = not spec.prompt.score_lines and any(name in columns for name in _telling(spec))
    return is_openai_batch(spec.prompt, columns) or by_column


def _as_batch(spec: JobSpec) -> JobSpec:
    if spec.task == "classify":
        _check_pairs(spec)
    if spec.prompt.system is not None:
        raise JobFileError(
            ["prompt.system: the input is an OpenAI batch, whose lines bring their own messages; put it into them"]
        )
    if spec.prompt.tools is not None:
        raise JobFileError(
            ["prompt.tools: the input is an OpenAI batch, whose lines bring their own tools (body.tools)"]
        )
    if spec.input.id is not None:
        return spec
    return spec.with_keys(input={"id": "custom_id"})


def _check_pairs(spec: JobSpec) -> None:
    """Raise JobFileError for a batch whose lines are not said to be pairs, and for a model of several scores."""
    if not spec.prompt.score_lines:
        raise JobFileError(
            [
                "prompt: the input is an OpenAI batch. With task: classify write prompt.score_lines: true where its "
                "lines are of vLLM's /v1/score and /v1/rerank; else prompt.template or prompt.column"
            ]
        )
    labels = spec.classification.labels or [""]  # none yet before the model was looked at
    if len(labels) > 1:
        raise JobFileError(
            [
                f"prompt.score_lines: the model {spec.model!r} has {len(labels)} labels ({', '.join(labels)}), and a "
                "line asks for one score of each pair; take a model with one, as rerankers have, or write prompt.column"
                " and prompt.text_pair"
            ]
        )


def describe_prompt(spec: JobSpec, columns: Sequence[str]) -> str:
    """How a row becomes a prompt, in a few words, and whether the columns told. Raises as `detected_job` does."""
    prompt = detected_job(spec, columns).prompt
    second = "" if prompt.text_pair is None else ", and prompt.text_pair"
    continued = ", the last message continued" if prompt.continue_final_message else ""
    return _first_text(prompt, told="" if has_mapping(spec.prompt) else " (detected)") + second + continued


def _first_text(prompt: PromptSpec, told: str) -> str:
    if prompt.template is not None:
        return "prompt.template"
    if prompt.messages is not None:
        return f"column {prompt.messages!r}: messages{told}" if isinstance(prompt.messages, str) else "prompt.messages"
    if prompt.column is not None:
        return f"column {prompt.column!r}: text{told}"
    if prompt.token_ids is not None:
        return f"column {prompt.token_ids!r}: token ids"
    if prompt.score_lines:
        return f"lines of /v1/score and /v1/rerank: {', '.join(BATCH_COLUMNS)}"
    return f"OpenAI batch lines: {', '.join(BATCH_COLUMNS)}{told}"
