"""Which keys the body of an OpenAI request may hold: what is honoured, what asks for nothing, what is ignored.

Names are OpenAI's and, for what OpenAI has not, vLLM's. `examples/openai_batch.md` shows these tables to people, and a
test keeps it in step. Knows names, and the values that ask for nothing; `body_params` reads the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, get_args

from bulkrun.errors import did_you_mean
from bulkrun.job.jobfile.sampling import Choosing, Flag
from bulkrun.job.jobfile.thinking import BUDGET
from bulkrun.job.prompts.conversations import shown
from bulkrun.request import BOUNDS

NUMBERS = tuple(key for key in get_args(Choosing) if BOUNDS[key].kind is float)
WHOLE_NUMBERS = (*(key for key in get_args(Choosing) if BOUNDS[key].kind is int), "max_completion_tokens", "seed")
FLAGS: tuple[str, ...] = get_args(Flag)
STRUCTURES = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
TEXT_FORMAT = "text.format"  # where /v1/responses has it
TOKEN_IDS, OVER_PROMPT = "return_token_ids", "prompt_logprobs"
CUT, CUT_SIDE = "truncate_prompt_tokens", "truncation_side"
CUT_OF_RESPONSE = "truncation"
# Honoured: a row's own values win over the job's.
_LISTS = ("stop", "stop_token_ids", "logit_bias", "bad_words", "allowed_token_ids")
_ONES = ("n", "logprobs", OVER_PROMPT, TOKEN_IDS, CUT, CUT_SIDE, BUDGET)
BOTH = (*NUMBERS, *WHOLE_NUMBERS, *_LISTS, *FLAGS, *_ONES, *STRUCTURES)
_OF_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
_OF_TEMPLATE = ("chat_template_kwargs", "reasoning_effort", "documents")
CONTINUE, ADD_PROMPT = "continue_final_message", "add_generation_prompt"
CHAT_ONLY = ("messages", "top_logprobs", *_OF_TEMPLATE, CONTINUE, ADD_PROMPT, *_OF_TOOLS)
COMPLETION_ONLY = ("prompt",)
# Of /v1/responses: how a token is drawn is said as in a chat, what is asked elsewhere.
_NOT_MOST = tuple(key for key in WHOLE_NUMBERS if not key.startswith("max_"))
RESPONSE_TOO = (*NUMBERS, *_NOT_MOST, *_LISTS, *FLAGS, "structured_outputs")
_RESPONSE_ONLY = ("input", "instructions", "max_output_tokens", "text", "reasoning", "include", CUT_OF_RESPONSE)
OF_RESPONSE = (*_RESPONSE_ONLY, "top_logprobs", "chat_template_kwargs", *_OF_TOOLS, *RESPONSE_TOO)
OF_EMBEDDING = ("input", "dimensions", "encoding_format", CUT, CUT_SIDE)
# vLLM's names for the two sides of pairs, the newest first.
SIDES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
ACTIVATIONS = ("use_activation", "activation", "softmax")  # one thing; the older two until vLLM 0.12
OF_SCORE = (*dict.fromkeys(key for sides in SIDES for key in sides), *ACTIVATIONS, CUT, CUT_SIDE)
OF_RERANK = ("query", "documents", "top_n", "return_documents", *ACTIVATIONS, CUT, CUT_SIDE)

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
RESPONSES_URL = "/v1/responses"
EMBEDDINGS_URL = "/v1/embeddings"
SCORE_URLS = ("/v1/score", "/score")
RERANK_URLS = ("/v1/rerank", "/rerank", "/v2/rerank")

# For OpenAI's or vLLM's service, or hints to OpenAI's own models: no answer of another model depends on them.
IGNORED = (
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "moderation", "priority"),
    *("stream_options", "verbosity", "prediction"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "request_id", "cache_salt"),
    "guided_decoding_backend",
)
# The same of /v1/responses alone: of tools that only OpenAI runs, and of images.
IGNORED_OF_RESPONSE = ("max_tool_calls", "access_programs", "image", "session_id")
# Would change the answer, and nothing here does it for a line: name -> the values that ask for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "stream": (False,),
        "tools": ([],),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "documents": ([],),
        "suffix": ("",),
        "echo": (False,),
        "best_of": (1,),
        "use_beam_search": (False,),
        "length_penalty": (1.0,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "include_reasoning": (True,),
        "return_tokens_as_token_ids": (False,),
        ADD_PROMPT: (True,),
        CONTINUE: (False,),
        "chat_template_kwargs": ({},),
        "reasoning_effort": (),
        "chat_template": (),
        "guided_whitespace_pattern": (),
        "repetition_detection": (),
        "vllm_xargs": ({},),
    }
)
NEUTRAL_OF_RESPONSE: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "stream": (False,),
        "background": (False,),
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
        "context_management": ([],),
        "previous_input_messages": ([],),
        "enable_response_messages": (False,),
        "include_reasoning": (True,),
        "skip_special_tokens": (True,),
        "mm_processor_kwargs": ({},),
        "media_io_kwargs": ({},),
        "vllm_xargs": ({},),
        "watermarking": (True, False),
        "messages": (),
        "max_tokens": (),
        "max_completion_tokens": (),
        "response_format": (),
        "reasoning_effort": (),
        "logprobs": (),
        "n": (),
    }
)
# Where the two endpoints' own habits differ: a chat template writes the special tokens, a plain text gets them.
_SPECIAL_TOKENS = "add_special_tokens"
NEUTRAL_OF_EMBEDDING: Mapping[str, tuple[Any, ...]] = MappingProxyType({_SPECIAL_TOKENS: (True,)})
NEUTRAL_OF_PAIRS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "max_tokens_per_query": (0,),
        "max_tokens_per_doc": (0,),
        "instruction": ("",),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "padding": ("do_not_pad",),
    }
)

_OLDER, _TEXT_ONLY = "these are OpenAI's older words for tools and tool_choice; write those", "only text is generated"
_NO_TEMPLATE = "a plain prompt goes through no chat template; leave it out"
_NO_TOOLS = f"tools are for {CHAT_URL}; leave it out"
_REASONS = {
    "stream": "a batch has no streams: leave it out",
    "tools": _NO_TOOLS,
    "functions": _OLDER,
    "function_call": _OLDER,
    "tool_choice": _NO_TOOLS,
    "modalities": _TEXT_ONLY,
    "audio": _TEXT_ONLY,
    "best_of": "set sampling.best_of in the job file",
    "include_reasoning": "sampling.thinking in the job file gives thoughts a column of their own",
    **dict.fromkeys((*_OF_TEMPLATE, CONTINUE, ADD_PROMPT), _NO_TEMPLATE),
    "repetition_detection": "set sampling.repetition_stop in the job file",
    "chat_template": "set prompt.chat_template in the job file",
}
_NOTHING_STORED = "nothing is kept between lines here; write all that was said into input"
_REASONS_OF_RESPONSE = {
    **_REASONS,
    **dict.fromkeys(("previous_response_id", "conversation", "previous_input_messages"), _NOTHING_STORED),
    "prompt": "OpenAI keeps such prompts, and they are not here; write instructions and input",
    "messages": f"{RESPONSES_URL} calls it input",
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), f"{RESPONSES_URL} calls it max_output_tokens"),
    "response_format": f"{RESPONSES_URL} has it as text: {{format: ...}}",
    "reasoning_effort": f"{RESPONSES_URL} has it as reasoning: {{effort: ...}}",
    "logprobs": f"{RESPONSES_URL} has it as include: [message.output_text.logprobs]",
    "n": "a line has one answer there; set sampling.n in the job file",
}


class BadBody(ValueError):
    """Why a line cannot be run: ``body.key: value is not supported; what is``."""


def as_object(place: str, value: Any, what: str) -> dict[str, Any]:
    """An object, given as one or as its JSON text. Raises BadBody: the value is not `what` it should be."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadBody(f"{place}: {shown(value)} is not JSON") from None
    if not isinstance(value, dict):
        raise BadBody(f"{place}: {shown(value)} is not {what}")
    return value


def flag_of(body: Mapping[str, Any], key: str) -> bool | None:
    """What a body says of something that is true or false; None: nothing. Raises BadBody."""
    value = body.get(key)
    if not isinstance(value, bool | None):
        raise BadBody(f"body.{key}: {shown(value)} is not true or false")
    return value


def whole_number(key: str, value: Any) -> int:
    """What a body says under `key`, where that is a whole number. Raises BadBody."""
    whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    if not whole:
        raise BadBody(f"body.{key}: {shown(value)} is not a whole number")
    return int(value)


def check_chat_keys(body: Mapping[str, Any]) -> None:
    """Raise BadBody for what a /v1/chat/completions body cannot hold."""
    _check(body, (*CHAT_ONLY, *BOTH), {**NEUTRAL, _SPECIAL_TOKENS: (False,)})


def check_completion_keys(body: Mapping[str, Any]) -> None:
    """Raise BadBody for what a /v1/completions body cannot hold."""
    _check(body, (*COMPLETION_ONLY, *BOTH), {**NEUTRAL, _SPECIAL_TOKENS: (True,)})


def check_response_keys(body: Mapping[str, Any]) -> None:
    """Raise BadBody for what a /v1/responses body cannot hold."""
    given = {key: value for key, value in body.items() if key not in IGNORED_OF_RESPONSE}
    _check(given, OF_RESPONSE, NEUTRAL_OF_RESPONSE, _REASONS_OF_RESPONSE)


def check_embedding_keys(body: Mapping[str, Any]) -> None:
    """Raise BadBody for what a /v1/embeddings body cannot hold."""
    _check(body, OF_EMBEDDING, NEUTRAL_OF_EMBEDDING)


def check_score_keys(body: Mapping[str, Any]) -> None:
    """Raise BadBody for what a /v1/score body cannot hold."""
    _check(body, OF_SCORE, NEUTRAL_OF_PAIRS)


def check_rerank_keys(body: Mapping[str, Any]) -> None:
    """Raise BadBody for what a /v1/rerank body cannot hold."""
    _check(body, OF_RERANK, NEUTRAL_OF_PAIRS)


def _check(
    body: Mapping[str, Any],
    honoured: tuple[str, ...],
    neutral: Mapping[str, tuple[Any, ...]],
    reasons: Mapping[str, str] = _REASONS,
) -> None:
    known = {*honoured, *neutral}
    for key, value in body.items():
        if key in honoured or key in IGNORED:
            continue
        if key not in neutral:
            hint = did_you_mean(key, known) or "leave it out"
            raise BadBody(f"body.{shown(key)[1:-1]}: {shown(value)}: this parameter is not supported; {hint}")
        if value not in neutral[key]:
            raise BadBody(f"body.{key}: {shown(value)} is not supported; {reasons.get(key, 'leave it out')}")
