"""The section `sampling`: its keys, and how they become the engine's parameters. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from bulkrun.job.jobfile.repetition_stop import RepetitionStopSpec
from bulkrun.job.jobfile.section import Section
from bulkrun.job.jobfile.structured_outputs import StructuredOutputsSpec
from bulkrun.job.jobfile.thinking import ThinkingSpec, take_thinking
from bulkrun.job.jobfile.thought_markers import ANALYSIS
from bulkrun.job.jobfile.tool_calls import ToolCallsSpec
from bulkrun.request import BOUNDS, LogprobsOver, SamplingParams, StructuredOutput

Choosing = Literal[
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
]
Flag = Literal["ignore_eos", "include_stop_str_in_output"]
_TokenIds = Literal["stop_token_ids", "allowed_token_ids", "logit_bias"]
PerRow = Literal[Choosing, "seed", "stop", "bad_words", _TokenIds, Flag, "structured_outputs"]

# Sampling keys that go to the engine as they are.
_PLAIN_SAMPLING = (
    *get_args(Choosing),
    "stop",
    "stop_token_ids",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    *get_args(Flag),
    "logprobs",
    "prompt_logprobs",
    "logprobs_over",
)
_ENDS_WHEN_WHOLE = "ignore_eos: a structured output ends when it is complete; leave out one of the two"


def with_ids(biases: Mapping[Any, Any]) -> dict[Any, Any]:
    """A mapping whose keys are token ids, with those as numbers that are digits."""
    return {int(key) if isinstance(key, str) and key.isdecimal() else key: value for key, value in biases.items()}


class SamplingSpec(Section):
    """How tokens are chosen. Names are vLLM's; what is not set comes from the model's generation_config.json."""

    n: int = Field(1, ge=1, le=1024, description="Number of samples per row; each is a separate output row.")
    best_of: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Generate this many samples and keep the n with the highest cumulative log-probability, best "
        "first. Default: n.",
    )
    max_tokens: int | None = Field(
        None,
        **BOUNDS["max_tokens"].limits,
        description="Maximum number of tokens to generate; an output is cut there (finish_reason length). Default: the "
        "model's max_new_tokens, else 256.",
    )
    min_tokens: int = Field(
        0,
        **BOUNDS["min_tokens"].limits,
        description="Minimum number of tokens to generate before an end or a stop takes effect.",
    )
    temperature: float | None = Field(
        None, **BOUNDS["temperature"].limits, description="Randomness; 0 is greedy. Default: the model's, else 1."
    )
    top_p: float | None = Field(
        None,
        **BOUNDS["top_p"].limits,
        description="Keep the smallest set of tokens with at least this probability. Default: the model's, else 1 "
        "(all).",
    )
    top_k: int | None = Field(
        None,
        ge=BOUNDS["top_k"].ge,  # beyond its other limit the words of the table are clearer
        description="Keep the k most likely tokens; 0 or -1: all. Default: the model's, else all.",
    )
    min_p: float | None = Field(
        None,
        **BOUNDS["min_p"].limits,
        description="Drop tokens less likely than this fraction of the likeliest one's probability. Default: the "
        "model's, else 0 (none).",
    )
    presence_penalty: float = Field(
        0.0,
        **BOUNDS["presence_penalty"].limits,
        description="Subtracted from the logits of tokens that were already generated.",
    )
    frequency_penalty: float = Field(
        0.0, **BOUNDS["frequency_penalty"].limits, description="The same, multiplied by how often they were generated."
    )
    repetition_penalty: float | None = Field(
        None,
        **BOUNDS["repetition_penalty"].limits,
        description="Above 1: tokens of the prompt and the output become less likely. Default: the model's, else 1.",
    )
    stop: str | list[str] | None = Field(
        None,
        description="Text that ends the output, without being part of it (unless include_stop_str_in_output is set); "
        "of several that one token completes, the one that begins first. A structured output that it cuts short is an "
        "invalid_schema error. Default: none.",
    )
    stop_token_ids: list[int] = Field([], description="Token ids that end the output.")
    logit_bias: dict[int, float] | None = Field(
        None,
        description='Token id, in quotes, -> a number from -100 to 100 that is added to its logit, as {"50256": -100}: '
        "-100 forbids the token as good as always, 100 allows no other one. Default: none.",
    )
    bad_words: list[str] = Field(
        [],
        description="Texts that do not come, as the tokenizer writes them with a space before and without: the last "
        "token of one is forbidden where its others stand before it. Other tokens may spell it (`files` for `file`).",
    )
    allowed_token_ids: list[int] | None = Field(
        None,
        description="The only token ids that may come; an output ends by itself only where an end-of-sequence token is "
        "among them. Default: all.",
    )
    ignore_eos: bool = Field(False, description="Continue after the end-of-sequence token (for benchmarks).")
    include_stop_str_in_output: bool = Field(
        False,
        description="Texts keep the stop that ended them: the text of `stop`, and that of a token of `stop_token_ids` "
        "unless it is a special token, which has none. Tokens and log-probabilities are as without it.",
    )
    seed: int = Field(
        0, description="The job's seed. A row's sampling noise depends only on this, its id and the sample."
    )
    logprobs: int | None = Field(
        None,
        **BOUNDS["logprobs"].limits,
        description="Add a column `logprobs`: the log-probability of each token, and of this many of the likeliest "
        "alternatives. Default: no column.",
    )
    prompt_logprobs: int | None = Field(
        None,
        **BOUNDS["prompt_logprobs"].limits,
        description="Add a column `prompt_logprobs`: the same for the tokens of the prompt. Default: no column.",
    )
    logprobs_over: LogprobsOver = Field(
        "vocabulary",
        description="Whose probabilities sum to 1 in `logprobs`: all tokens', or (allowed) those of the tokens that "
        "structured_outputs and allowed_token_ids allow in that place: how sure the model is of one among them.",
    )
    return_token_ids: bool = Field(
        False,
        description="Add the columns `prompt_token_ids`, the tokens that the model was given, and `token_ids`, those "
        "that it wrote, without the end-of-sequence or stop token that ended them.",
    )
    structured_outputs: StructuredOutputsSpec | None = Field(
        None,
        description="What every output must look like: a JSON schema, a regex, one of several texts, a grammar. "
        "Default: any text.",
    )
    thinking: ThinkingSpec | None = Field(
        None,
        description="For reasoning models: put the thoughts into a separate column, with a token budget. Default: they "
        "stay in the text.",
    )
    tool_calls: ToolCallsSpec | None = Field(
        None,
        description="Put the calls of tools that the model writes into a column `tool_calls`: a list of {id, name, "
        "arguments (JSON text)}, null where there are none; finish_reason is tool_calls then. Default: {} where "
        "prompt.tools offers tools, else they stay in the text.",
    )
    repetition_stop: RepetitionStopSpec | None = Field(
        None, description="End outputs that repeat themselves ({}: with the defaults). Default: they go on."
    )
    per_row: dict[PerRow, str] = Field(
        {},
        description="Sampling key -> input column that overrides it in rows where the column is not null or empty: "
        f"any of {', '.join(get_args(PerRow))}. Of structured_outputs a cell is a JSON schema, or {{choice: [...]}}, "
        '{regex: ...}, {grammar: ...}, {json: ...}; of logit_bias a mapping, as {"5": -100}; each may be text.',
    )

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _ids_as_json_has_them(cls, value: Any) -> Any:
        """JSON has no numbers for keys: OpenAI's lines, and the record of a run."""
        return with_ids(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _best_of(self) -> SamplingSpec:
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(
                f"best_of: {self.best_of} is less than n ({self.n}); generate at least as many as are kept"
            )
        return self

    @property
    def generations(self) -> int:
        """How many outputs are generated for a row; `n` of them are kept."""
        return self.best_of or self.n

    @model_validator(mode="after")
    def _ranges(self) -> SamplingSpec:
        values = self._plain_params({})
        if self.max_tokens is None:  # the model's own may be what min_tokens needs: `prepare` compares them
            values["max_tokens"] = max(1, self.min_tokens)
        SamplingParams(**values)
        return self

    @model_validator(mode="after")
    def _ends_when_whole(self) -> SamplingSpec:
        if self.structured_outputs is not None and self.ignore_eos:
            raise ValueError(_ENDS_WHEN_WHOLE)
        return self

    @model_validator(mode="after")
    def _logprobs_over_what_is_allowed(self) -> SamplingSpec:
        if self.logprobs_over == "allowed" and (self.logprobs is None or not self._allows_some):
            needed = "logprobs" if self.logprobs is None else "structured_outputs or allowed_token_ids"
            raise ValueError(
                f"logprobs_over: allowed says nothing without sampling.{needed}; set that, or leave it out"
            )
        return self

    @property
    def has_calls(self) -> bool:
        """Whether there is a column for tool calls."""
        return self.tool_calls is not None and self.tool_calls.are_read

    @property
    def has_structure(self) -> bool:
        """Whether outputs, or those of some rows, have to look like something."""
        return self.structured_outputs is not None or "structured_outputs" in self.per_row

    @property
    def _allows_some(self) -> bool:
        """Whether in some rows not every token may come next."""
        keys = ("structured_outputs", "allowed_token_ids", "bad_words")
        return any(getattr(self, key) or key in self.per_row for key in keys)

    @model_validator(mode="after")
    def _calls_or_structure(self) -> SamplingSpec:
        if self.has_calls and self.has_structure:
            raise ValueError("tool_calls: a structured output has no room for calls; leave out structured_outputs")
        return self

    def to_params(self, overrides: dict[str, Any] | None = None) -> SamplingParams:
        """The engine's parameters; `overrides` (a row's own values) win over the job's. Raises ValueError."""
        values = self._plain_params(overrides or {})
        of_row, calls_of_row = values.pop("structured_outputs", None), values.pop("tool_calls", None)
        structures, of_thoughts = self._structured_params(of_row), take_thinking(values)
        if of_row is None:  # else the answer has no room for calls
            structures |= self._tool_params(calls_of_row)
        if overrides and overrides.get("ignore_eos") and structures.get("structured_outputs") is not None:
            raise ValueError(_ENDS_WHEN_WHOLE)
        if "thinking" in structures:  # a retry may leave it out
            structures["thinking"] = structures["thinking"]._replace(**of_thoughts)
        return SamplingParams(**structures, **values)

    def _plain_params(self, overrides: dict[str, Any]) -> dict[str, Any]:
        """The parameters that are numbers and texts; and a row's `structured_outputs` and `tool_calls` as they are."""
        values: dict[str, Any] = {name: value for name in _PLAIN_SAMPLING if (value := getattr(self, name)) is not None}
        if self.best_of is not None:
            values.setdefault("logprobs", 0)  # to compare samples by
        values |= overrides
        values.pop("seed", None)
        stop = values.get("stop", ())
        values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        values["stop_token_ids"] = tuple(values.get("stop_token_ids", ()))
        values["logit_bias"] = tuple(sorted(with_ids(values.get("logit_bias", {})).items()))
        return values

    def _structured_params(self, of_row: str | dict[str, Any] | None) -> dict[str, Any]:
        """The parameters that are values of their own. `of_row`: a row's JSON schema as text, or {regex: ...} etc."""
        given: dict[str, Any] = {}
        if isinstance(of_row, str):
            given["structured_outputs"] = StructuredOutput("json", of_row)
        elif of_row is not None:
            given["structured_outputs"] = StructuredOutputsSpec(**of_row).to_param()
        elif self.structured_outputs is not None:
            given["structured_outputs"] = self.structured_outputs.to_param()
        if self.thinking is not None:
            given["thinking"] = self.thinking.to_param()
        if self.repetition_stop is not None:
            given["repetition_stop"] = self.repetition_stop.to_param()
        return given

    def _tool_params(self, of_row: str | dict[str, Any] | None) -> dict[str, Any]:
        """What concerns calls. `of_row`: "none" where a row wants none, or what it says of them (`tools.Offer`)."""
        if self.tool_calls is None or isinstance(of_row, str):
            return {}
        params = self.tool_calls.to_params(of_row or {})
        if self.thinking is not None and self.tool_calls.format == "harmony":
            params["thinking"] = self.thinking.to_param()._replace(start=ANALYSIS[0], end=ANALYSIS[1])
        return params
