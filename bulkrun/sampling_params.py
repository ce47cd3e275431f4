"""How the next token is chosen, and how an output must look: what a job may ask of each row's sampling.

Standard library only. Everybody imports these from `bulkrun.request`, the contract they are part of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

# Parameters that vLLM has here and an engine has no use for, each with where it belongs.
_NOT_HERE: Mapping[str, str] = MappingProxyType(
    {
        "n": "give a prompt n times, or set sampling.n in a job file",
        "best_of": "set sampling.best_of in a job file",
        "seed": 'give the sampling as a mapping, {"seed": 7, ...}, or the model its own: LLM(model, seed=7)',
    }
)
_WHOLE = ("max_tokens", "min_tokens", "top_k", "logprobs", "prompt_logprobs")
_NUMBERS = (
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "timeout_s"),
)
_OPTIONAL = ("logprobs", "prompt_logprobs", "timeout_s")
_LEAST_TEMPERATURE = 1e-5  # vLLM's; logits divided by much less are infinite in float32


class StructuredOutput(NamedTuple):
    """What an output must look like. `value`: JSON schema text, a regex, a Lark grammar, or a JSON list of choices."""

    kind: Literal["json", "regex", "choice", "grammar"]
    value: str


class Thinking(NamedTuple):
    """How a reasoning model marks its thoughts, and how many tokens they may have (None: as many as the output)."""

    start: str
    end: str
    max_tokens: int | None = None


class RepetitionStop(NamedTuple):
    """When an output runs in circles: its tail is one pattern of at most `max_pattern` tokens, `repeats` times over,
    and at least `min_tokens` tokens long."""

    max_pattern: int
    repeats: int
    min_tokens: int


_STRUCTURES = {"structured_outputs": StructuredOutput, "thinking": Thinking, "repetition_stop": RepetitionStop}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Names and meanings are vLLM's.

    `temperature` 0 is greedy. `top_k` 0 or -1, `top_p` 1, `min_p` 0 and the penalties' defaults switch the
    respective filter off. `logprobs` None returns none, k >= 0 the chosen token's and the k most likely ones';
    `prompt_logprobs` the same for the tokens of the prompt. `structured_outputs` and `thinking` constrain which tokens
    may come next (they need a `TokenConstraintFactory`). `timeout_s` is counted from the first step of the request.
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
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutput | None = None
    thinking: Thinking | None = None
    repetition_stop: RepetitionStop | None = None
    timeout_s: float | None = None

    def __new__(cls, *args: Any, **named: Any) -> SamplingParams:
        """Say of a name that is none where it belongs; Python's own message only says that it is not here."""
        for name in named:
            if name in _NOT_HERE:
                raise TypeError(f"SamplingParams has no {name}: {_NOT_HERE[name]}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):  # vLLM takes none, one text (no sequence of letters) and lists too
            if not isinstance(value := getattr(self, name), tuple):
                is_many = isinstance(value, Iterable) and not isinstance(value, str | bytes)
                object.__setattr__(self, name, () if value is None else tuple(value) if is_many else (value,))
        for problem in self.problems():
            raise ValueError(problem)

    def problems(self) -> list[str]:
        """Every wrong value, as ``name: value is not what is right``; empty when all is well."""
        return self._wrong_types() or self._out_of_range()

    def _wrong_types(self) -> list[str]:
        wrong = []
        for names, kind, types in ((_WHOLE, "whole number", (int, Integral)), (_NUMBERS, "number", (int, float, Real))):
            for name in names:  # the abstract types take ten times as long to tell
                value = getattr(self, name)
                if not isinstance(value, types) and not (value is None and name in _OPTIONAL):
                    fix = "; LLM.max_model_len means: as many as fit" if name == "max_tokens" else ""
                    wrong.append(f"{name}: {value!r} is not a {kind}{fix}")
        wrong += [f"stop: {text!r} is not a text" for text in self.stop if not isinstance(text, str)]
        ids = self.stop_token_ids
        wrong += [f"stop_token_ids: {i!r} is not a whole number" for i in ids if not isinstance(i, (int, Integral))]
        return wrong + self._wrong_structures()

    def _wrong_structures(self) -> list[str]:
        wrong = []
        for name, kind in _STRUCTURES.items():
            value = getattr(self, name)
            if isinstance(value, dict):
                wrong.append(f'{name}: {value!r} goes with a mapping for all of the sampling: {{"{name}": ..., ...}}')
            elif value is not None and not isinstance(value, kind):
                wrong.append(f"{name}: {value!r} is not a {kind.__name__}")
        return wrong

    def _out_of_range(self) -> list[str]:
        ranges = [
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", -1 <= self.top_k < 2**31, "-1 or 0 (off), or a positive count below 2**31"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 10.0, "between 0.01 and 10"),
            ("stop", all(self.stop), "free of empty strings"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "between 0 and 20"),
            ("prompt_logprobs", self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20, "between 0 and 20"),
            ("timeout_s", self.timeout_s is None or self.timeout_s > 0, "above 0"),
        ]
        return [f"{name}: {getattr(self, name)!r} is not {want}" for name, ok, want in ranges if not ok]

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
        return self.has_penalties or self.min_tokens > 0
