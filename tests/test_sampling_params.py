"""One table says which numbers sampling parameters may be: what is beyond is refused in its words."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from typing import Any, get_args

import numpy as np
import pytest

from bulkrun.job.jobfile.repetition_stop import RepetitionStopSpec
from bulkrun.job.jobfile.sampling import Choosing, SamplingSpec
from bulkrun.job.jobfile.thinking import ThinkingSpec
from bulkrun.request import ABSENT, BOUNDS, STRUCTURE_BOUNDS, RepetitionStop, SamplingParams, Thinking


def test_every_number_is_in_the_table() -> None:
    numbers = [field.name for field in fields(SamplingParams) if str(field.type).split(" |")[0] in ("int", "float")]
    assert list(BOUNDS) == numbers
    assert {*get_args(Choosing), "logprobs", "prompt_logprobs", "timeout_s"} == set(BOUNDS)


@pytest.mark.parametrize("name", BOUNDS)
def test_the_limits_themselves_are_values_and_what_is_beyond_is_not(name: str) -> None:
    bound, step = BOUNDS[name], 1 if BOUNDS[name].kind is int else 1e-6
    beyond = [bound.gt, bound.ge - step, bound.le + step, math.nan if bound.kind is float else bound.ge - step]
    for value in beyond:
        if not math.isinf(value):
            with pytest.raises(ValueError, match=f"^{name}: {value!r} is not {bound.want.split('(')[0]}"):
                SamplingParams(**{name: value})
    for value in (bound.gt + step, bound.ge, bound.le):
        if not math.isinf(value):
            SamplingParams(**{"max_tokens": 2**31, name: value})


@pytest.mark.parametrize("name", [*get_args(Choosing), "logprobs", "prompt_logprobs"])
def test_a_job_s_keys_have_the_same_limits(name: str) -> None:
    metadata, limits = SamplingSpec.model_fields[name].metadata, BOUNDS[name].limits
    if name == "top_k":
        del limits["le"]  # 2**31 - 1 as a limit says less than the words of the table
    for kind, limit in limits.items():
        assert [getattr(one, kind) for one in metadata if hasattr(one, kind)] == [limit]


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"logit_bias": 5}, "logit_bias: 5 is not a mapping of token ids to numbers"),
        ({"logit_bias": [5]}, "logit_bias: [5] is not a mapping"),
        ({"logit_bias": "5"}, "logit_bias: '5' is not a mapping"),
        ({"ignore_eos": "no"}, "ignore_eos: 'no' is not true or false"),
        ({"ignore_eos": None}, "ignore_eos: None is not true or false"),
        ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output: 'no' is not true or false"),
        ({"stop": 5}, "stop: 5 is not a text"),
        ({"bad_words": ["a", 5]}, "bad_words: 5 is not a text"),
        ({"bad_words": ["a", ""]}, "bad_words: ('a', '') is not free of empty strings"),
        ({"stop_token_ids": ["5"]}, "stop_token_ids: '5' is not a whole number"),
        ({"allowed_token_ids": [5, 6.5]}, "allowed_token_ids: 6.5 is not a whole number"),
        ({"allowed_token_ids": []}, "allowed_token_ids: an empty list allows no token at all"),
        (
            {"allowed_token_ids": [5], "logit_bias": {6: 1.0}},
            "logit_bias: token 6 is made likelier and is not among allowed_token_ids; add it there",
        ),
    ],
)
def test_a_value_of_another_type_is_told_in_one_line(params: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}"):
        SamplingParams(**params)


@pytest.mark.parametrize("name", [*ABSENT, "guided_decoding", "n", "seed"])
def test_a_parameter_of_vllm_that_is_not_here_is_told_what_is(name: str) -> None:
    with pytest.raises(TypeError, match=f"^SamplingParams has no {name}: [a-z]"):
        SamplingParams(**{name: None})


def test_lists_may_be_anything_that_has_entries() -> None:
    made = SamplingParams(bad_words="a", allowed_token_ids=np.array([5, 6]), logit_bias={7: -1.0}, ignore_eos=np.True_)
    assert (made.bad_words, made.allowed_token_ids) == (("a",), (5, 6))
    assert SamplingParams(bad_words=None, allowed_token_ids=None) == SamplingParams()


@pytest.mark.parametrize(
    ("prompt_end", "begun"),
    [
        ("Hi<think>\n", "thoughts"),
        ("Hi<think>\n\n</think>\n\n", "answer"),
        ("Hi<think>a", None),
        ("Hi", None),
    ],
)
def test_where_a_prompt_leaves_an_output_is_told_by_its_end_or_by_the_message(
    prompt_end: str, begun: str | None
) -> None:
    marked = Thinking("<think>", "</think>")
    assert marked.begun_by(prompt_end) == begun
    assert marked._replace(begun="answer").begun_by(prompt_end) == "answer"
    nested = Thinking("think>", "</think>")
    assert nested.begun_by("Hi</think>") == "answer", "the longer marker is the one that stands there"


STRUCTURES = {"thinking": Thinking("<think>", "</think>"), "repetition_stop": RepetitionStop(4, 3, 12)}
SPECS = {"thinking": ThinkingSpec, "repetition_stop": RepetitionStopSpec}
INNER = [(name, key) for name, bounds in STRUCTURE_BOUNDS.items() for key in bounds]


@pytest.mark.parametrize(("name", "key"), INNER)
def test_numbers_within_a_structure_have_their_limits_too(name: str, key: str) -> None:
    """A budget of no thoughts would be a token that must come next and is none."""
    bound = STRUCTURE_BOUNDS[name][key]
    for value in (bound.ge - 1, bound.le + 1, "7"):
        if value != math.inf:
            with pytest.raises(ValueError, match=rf"^{name}\.{key}: {value!r} is not {bound.want}"):
                SamplingParams(**{name: STRUCTURES[name]._replace(**{key: value})})
    SamplingParams(**{name: STRUCTURES[name]._replace(**{key: bound.ge})})
    metadata = SPECS[name].model_fields[key].metadata
    assert {kind: getattr(one, kind) for one in metadata for kind in ("ge", "le") if hasattr(one, kind)} == bound.limits
