"""How the next token is chosen, and how an output must look: what a job may ask of each row's sampling.

Standard library only. Everybody imports these from `bulkrun.request`, the contract they are part of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

from bulkrun.sampling_structures import RepetitionStop, StructuredOutput, Thinking, ToolCalls

_BEAMS = "there is no beam search; sampling.best_of in a job file keeps the likeliest of several samples"
_SPECIAL_TOKENS = "texts are made of all tokens but the special ones"
# Parameters of vLLM's that are nowhere here, each with what is in their place.
ABSENT: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("use_beam_search", "length_penalty", "early_stopping", "num_beams"), _BEAMS),
        **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "detokenize"), _SPECIAL_TOKENS),
        "logits_processors": "no code runs between tokens; logit_bias, bad_words and allowed_token_ids are here",
        "truncate_prompt_tokens": "run.on_too_long in a job file says what becomes of prompts that are too long",
        "thinking_token_budget": "the key thinking has it: {max_tokens: ...}",
        "repetition_detection": "the key repetition_stop ends such outputs",
        "suppress_tokens": "the key logit_bias forbids tokens: -100",
    }
)
# Parameters that vLLM has here and an engine has no use for, each with where it belongs.
_NOT_HERE: Mapping[str, str] = MappingProxyType(
    {
        **ABSENT,
        "guided_decoding": "write structured_outputs",
        "n": "give a prompt n times, or set sampling.n in a job file",
        "best_of": "set sampling.best_of in a job file",
        "seed": 'give the sampling as a mapping, {"seed": 7, ...}, or the model its own: LLM(model, seed=7)',
    }
)
# Parameters that are lists, each with what None means.
_LISTS: Mapping[str, tuple[Any, ...] | None] = MappingProxyType(
    {"stop": (), "stop_token_ids": (), "bad_words": (), "allowed_token_ids": None}
)
_MOST_BIAS = 100  # OpenAI's and vLLM's
_LEAST_TEMPERATURE = 1e-5  # vLLM's; logits divided by much less are infinite in float32


class Bound(NamedTuple):
    """Which numbers a parameter may be: `kind` and limits; `want` says in words what is right."""

    kind: type[int] | type[float]
    want: str
    ge: float = -inf
    gt: float = -inf
    le: float = inf
    is_optional: bool = False  # None is a value too

    @property
    def limits(self) -> dict[str, Any]:
        """The limits that there are, by name."""
        return {name: limit for name in ("ge", "gt", "le") if abs(limit := getattr(self, name)) != inf}

    def holds(self, value: float) -> bool:
        """Whether a number, which may be NaN, is within the limits."""
        return self.ge <= value <= self.le and (self.gt == -inf or self.gt < value)


# Every parameter that is a number; those within a structure follow.
BOUNDS: Mapping[str, Bound] = MappingProxyType(
    {
        "max_tokens": Bound(int, "at least 1", ge=1),
        "min_tokens": Bound(int, "between 0 and max_tokens", ge=0),
        "temperature": Bound(float, "between 0 and 100", ge=0, le=100),
        "top_p": Bound(float, "above 0 and at most 1", gt=0, le=1),
        "top_k": Bound(int, "-1 or 0 (off), or a positive count below 2**31", ge=-1, le=2**31 - 1),
        "min_p": Bound(float, "between 0 and 1", ge=0, le=1),
        "presence_penalty": Bound(float, "between -2 and 2", ge=-2, le=2),
        "frequency_penalty": Bound(float, "between -2 and 2", ge=-2, le=2),
        "repetition_penalty": Bound(float, "between 0.01 and 10", ge=0.01, le=10),
        "logprobs": Bound(int, "between 0 and 20", ge=0, le=20, is_optional=True),
        "prompt_logprobs": Bound(int, "between 0 and 20", ge=0, le=20, is_optional=True),
        "timeout_s": Bound(float, "above 0", gt=0, is_optional=True),
    }
)
STRUCTURE_BOUNDS: Mapping[str, Mapping[str, Bound]] = MappingProxyType(
    {
        "thinking": {"max_tokens": Bound(int, "at least 0", ge=0, is_optional=True)},
        "repetition_stop": {
            "max_pattern": Bound(int, "between 1 and 512", ge=1, le=512),
            "repeats": Bound(int, "at least 2", ge=2),
            "min_tokens": Bound(int, "at least 2", ge=2),
        },
    }
)
# Abstract types behind the usual ones, which take a tenth of the time to tell.
_TYPES: Mapping[type, tuple[str, tuple[type, ...]]] = MappingProxyType(
    {int: ("whole number", (int, Integral)), float: ("number", (int, float, Real)), str: ("text", (str,))}
)


LogprobsOver = Literal["vocabulary", "allowed"]

_STRUCTURES = {
    "structured_outputs": StructuredOutput,
    "thinking": Thinking,
    "tool_calls": ToolCalls,
    "repetition_stop": RepetitionStop,
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Names and meanings are vLLM's.

    `temperature` 0 is greedy. `top_k` 0 or -1, `top_p` 1, `min_p` 0 and the penalties' defaults switch the
    respective filter off. `logit_bias`, a mapping or pairs, is added to the logits of token ids: -100 to 100, as good
    as never and always. `bad_words` are texts that do not come, `allowed_token_ids` (None: all) the only tokens that
    do, whether or not an end-of-sequence token is among them. `logprobs` None returns none, k >= 0 the chosen token's
    and the k most likely ones', among all tokens or, by `logprobs_over`, those that `structured_outputs` and the like
    allow in their place; `prompt_logprobs` the same for the tokens of the prompt, among all. `structured_outputs`,
    `thinking` and both lists constrain which tokens may come next (they need a `TokenConstraintFactory`). `tool_calls`
    and `include_stop_str_in_output` are for whoever reads the output. `timeout_s` counts from the request's first step.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: Sequence[str] = ()
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: Sequence[str] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_over: LogprobsOver = "vocabulary"
    structured_outputs: StructuredOutput | None = None
    thinking: Thinking | None = None
    tool_calls: ToolCalls | None = None
    repetition_stop: RepetitionStop | None = None
    timeout_s: float | None = None

    def __new__(cls, *args: Any, **named: Any) -> SamplingParams:
        """Raise for a name of vLLM's that belongs elsewhere, and say where; Python only says that it is unknown."""
        for name in named:
            if name in _NOT_HERE:
                raise TypeError(f"SamplingParams has no {name}: {_NOT_HERE[name]}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, default in _LISTS.items():  # vLLM takes none, one text (no sequence of letters) and lists too
            if not isinstance(value := getattr(self, name), tuple):
                is_many = isinstance(value, Iterable) and not isinstance(value, str | bytes)
                object.__setattr__(self, name, default if value is None else tuple(value) if is_many else (value,))
        try:
            object.__setattr__(self, "logit_bias", tuple(dict(self.logit_bias or ()).items()))
        except (TypeError, ValueError):
            raise ValueError(f"logit_bias: {self.logit_bias!r} is not a mapping of token ids to numbers") from None
        for problem in self.problems():
            raise ValueError(problem)

    def problems(self) -> list[str]:
        """Every wrong value, as ``name: value is not what is right``; empty when all is well."""
        return self._wrong_types() or self._out_of_range()

    def _wrong_types(self) -> list[str]:
        wrong = []
        for name, bound in BOUNDS.items():
            (kind, types), value = _TYPES[bound.kind], getattr(self, name)
            if not isinstance(value, types) and not (value is None and bound.is_optional):
                fix = "; LLM.max_model_len means: as many as fit" if name == "max_tokens" else ""
                wrong.append(f"{name}: {value!r} is not a {kind}{fix}")
        for name in _LISTS:
            wrong += self._wrong_entries(name)
        for token_id, bias in self.logit_bias:
            if not isinstance(token_id, (int, Integral)) or not isinstance(bias, (int, float, Real)):
                wrong.append(f"logit_bias: {token_id!r}: {bias!r} is not a token id and a number")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if getattr(self, name) not in (True, False):  # as a text that says no
                wrong.append(f"{name}: {getattr(self, name)!r} is not true or false")
        return wrong + self._wrong_structures()

    def _wrong_entries(self, name: str) -> list[str]:
        kind, types = _TYPES[int if name.endswith("_ids") else str]
        entries = getattr(self, name) or ()
        return [f"{name}: {entry!r} is not a {kind}" for entry in entries if not isinstance(entry, types)]

    def _wrong_structures(self) -> list[str]:
        wrong = []
        for name, kind in _STRUCTURES.items():
            if isinstance(value := getattr(self, name), dict):
                wrong.append(f'{name}: {value!r} goes with a mapping for all of the sampling: {{"{name}": ..., ...}}')
            elif value is not None and not isinstance(value, kind):
                wrong.append(f"{name}: {value!r} is not a {kind.__name__}")
        return wrong

    def _out_of_range(self) -> list[str]:
        wrong = []
        for name, bound in BOUNDS.items():
            value = getattr(self, name)
            if not (value is None or bound.holds(value)) or (name == "min_tokens" and value > self.max_tokens):
                wrong.append(f"{name}: {value!r} is not {bound.want}")
        if self.logprobs_over not in get_args(LogprobsOver):
            wrong.append(f"logprobs_over: {self.logprobs_over!r} is not one of {', '.join(get_args(LogprobsOver))}")
        for token_id, bias in self.logit_bias:
            if not abs(bias) <= _MOST_BIAS:
                wrong.append(f"logit_bias: {bias!r} for token {token_id} is not between -{_MOST_BIAS} and {_MOST_BIAS}")
        for name in ("stop", "bad_words"):
            if not all(texts := getattr(self, name)):
                wrong.append(f"{name}: {texts!r} is not free of empty strings")
        return wrong + self._wrong_allowed() + self._out_of_range_within()

    def _wrong_allowed(self) -> list[str]:
        if (allowed := self.allowed_token_ids) is None:
            return []
        if not allowed:
            return ["allowed_token_ids: an empty list allows no token at all; name some, or leave it out"]
        likelier = [token_id for token_id, bias in self.logit_bias if bias > 0]
        others = set(likelier).difference(allowed)
        what = "is made likelier and is not among allowed_token_ids; add it there, or take out its bias"
        return [f"logit_bias: token {token_id} {what}" for token_id in likelier if token_id in others]

    def _out_of_range_within(self) -> list[str]:
        """The wrong numbers of the structures that are there, of another type or beyond their limits."""
        wrong = []
        for name, bounds in STRUCTURE_BOUNDS.items():
            structure = getattr(self, name)
            for key, bound in bounds.items() if structure is not None else ():
                value = getattr(structure, key)
                is_number = isinstance(value, _TYPES[bound.kind][1])
                if not (bound.holds(value) if is_number else value is None and bound.is_optional):
                    wrong.append(f"{name}.{key}: {value!r} is not {bound.want}")
        return wrong

    @property
    def greedy(self) -> bool:
        """Whether the token is the most likely one, with no noise, as good as none included."""
        return self.temperature < _LEAST_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that occurred are more or less likely to come again."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def shapes_logits(self) -> bool:
        """Whether something comes between the logits and their temperature."""
        return self.has_penalties or self.min_tokens > 0 or bool(self.logit_bias)
