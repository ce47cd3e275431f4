"""The Python API's `LLM`: an engine to ask. Importing this loads no torch; `LLM()` does.

Lists in, lists out; iterators in, iterators out. A prompt that cannot be answered is an output with an `error`, never
an exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from os import PathLike, fspath
from typing import Any, TypeVar, Unpack, overload

import pyarrow as pa

from bulkrun.errors import UsageError
from bulkrun.job.jobfile.load import job_of
from bulkrun.job.jobfile.python_values import as_yaml
from bulkrun.job.jobfile.sampling import SamplingSpec
from bulkrun.job.jobfile.tools import AUTO, NO_OFFER, Offer, Tool
from bulkrun.job.work.answers import AnswerReader
from bulkrun.job.work.shard_work import row_seed
from bulkrun.launch.engine import load_engine
from bulkrun.launch.preparation.adapter import adapter_dir, tokenizer_dir
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from bulkrun.launch.preparation.sampling_defaults import sampling_with_defaults
from bulkrun.launch.preparation.structured_output import with_markers, with_schema
from bulkrun.launch.preparation.tool_calling import with_tool_format
from bulkrun.launch.python_api.calls import EngineSettings, Shown, refuse_one
from bulkrun.launch.python_api.prompt_stream import PromptStream, SharedEngine
from bulkrun.launch.python_api.prompts import (
    Ask,
    ask_prompt,
    check_continuation,
    conversation_asker,
    offer_of,
    sampling_with,
)
from bulkrun.launch.python_api.text_outputs import RequestOutput, TextOutputs
from bulkrun.models.config.find_model import resolve_model
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.config.model_dir import generation_defaults
from bulkrun.request import SamplingParams
from bulkrun.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
Sampling = SamplingParams | Mapping[str, Any]
_P = TypeVar("_P", bound=Prompt)  # a list[str] is not a list[str | Sequence[int]]
_C = TypeVar("_C", bound=Sequence[Message] | Message)

_COLUMNS = [
    pa.field(name, pa.null())
    for name in ("reasoning", "tool_calls", "logprobs", "prompt_logprobs", "cumulative_logprob")
]
_OTHER_TASKS = ("task", "runner", "convert")  # as vLLM is told that a model embeds or classifies
_AGAIN = "give a prompt n times"
# they make rows of rows, or columns: a job's matter
_NOT_HERE = {
    "n": _AGAIN,
    "best_of": _AGAIN,
    "per_row": "give a list of parameters, one for each prompt",
    "return_token_ids": "an output has its token_ids anyway",
}


class LLM:
    """A model that answers prompts. Several threads may call it and share its steps; an iterator is for one at a time.

    `model` is a hub id, a directory or `bundled:tiny`. Noise is a function of (`seed`, the prompt's position in its
    call), so equal calls give equal outputs. Raises ModelError for a model that cannot be used, UsageError for
    settings that cannot work.

    >>> from bulkrun import LLM
    >>> llm = LLM("bundled:tiny", max_num_seqs=8)
    >>> asked = "Summarize this Python code in one sentence:\\ndef close(self):\\n    self.file.close()"
    >>> [output] = llm.chat([[{"role": "user", "content": asked}]], {"temperature": 0, "max_tokens": 32})
    >>> output.error is None, output.finish_reason
    (True, 'stop')
    >>> outputs = llm.generate((f"def f{i}():" for i in range(1000)), {"max_tokens": 4})
    >>> next(outputs).index  # an iterator of prompts is read as it is needed
    0
    >>> [output.error.code for output in llm.generate(["", None])]
    ['empty_prompt', 'bad_input']
    """

    def __init__(self, model: str | PathLike[str], *, seed: int = 0, **engine: Unpack[EngineSettings]) -> None:
        model = fspath(model) if isinstance(model, PathLike) else model
        if type(seed := as_yaml(seed)) is not int:
            raise UsageError(f"seed: {seed!r:.60} is not a whole number")
        if other := [name for name in _OTHER_TASKS if name in engine]:
            raise UsageError(
                f"{other[0]}: an LLM writes text; bulkrun.Embedder makes vectors of texts, Classifier labels"
            )
        if "adapters" in engine:
            raise UsageError("adapters: an LLM has one for all prompts, adapter=; a job has several (engine.adapters)")
        self._job = {"name": "python", "model": model, "input": {"path": "-"}, "output": {"path": "-"}}
        settings = job_of({**self._job, "engine": engine}).engine
        model_dir = resolve_model(model, bundled_root=BUNDLED_ROOT)
        self._seed = seed
        self._defaults = generation_defaults(model_dir)
        self._architecture = ModelConfig.from_dir(model_dir).architecture
        adapter = adapter_dir(settings)
        self._tokenizer = Tokenizer.from_dir(tokenizer_dir(model_dir, adapter))
        self._shared = SharedEngine(load_engine(model_dir, self._tokenizer, settings, adapter))

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt and its output together; as `max_tokens` it means: as many as fit."""
        return self._shared.engine.max_model_len

    @overload  # a list is an iterable too: the first overload that fits says what comes
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: list[_P] | str | Mapping[str, Any],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling_params: Sampling | None = None,
        *,
        ordered: bool = True,
        use_tqdm: bool = False,
    ) -> Iterator[RequestOutput]: ...

    def generate(
        self,
        prompts: Iterable[Prompt] | str | Mapping[str, Any],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        ordered: bool = True,
        use_tqdm: bool = False,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Continue prompts as they are: texts, lists of token ids, or vLLM's {prompt: ...} and {prompt_token_ids: ...}.

        `sampling_params` are for all prompts, or a list with those of each: `SamplingParams`, or a mapping with the
        keys of a job file's `sampling` section (what it leaves open comes from the model's defaults).

        A list of prompts gives a list of outputs in its order. Any other iterable gives an iterator, which reads at
        most 2 x `max_num_seqs` prompts ahead of what it has handed out. Its outputs come in the order of the prompts,
        so that one very long output holds up the reading; with `ordered=False` they come as they end. `use_tqdm`
        counts them on a bar, in a terminal.
        """
        asked = [prompts] if isinstance(prompts, str | Mapping) else prompts
        show = Shown(ordered, use_tqdm)
        return self._run(asked, ask_prompt, sampling_params, show, add_special_tokens=True)

    @overload
    def chat(  # type: ignore[overload-overlap]
        self,
        messages: list[_C] | Message,
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: str | Mapping[str, Any] = AUTO,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]: ...

    @overload
    def chat(
        self,
        messages: Iterable[Sequence[Message]],
        sampling_params: Sampling | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: str | Mapping[str, Any] = AUTO,
        ordered: bool = True,
        use_tqdm: bool = False,
    ) -> Iterator[RequestOutput]: ...

    def chat(
        self,
        messages: Iterable[Sequence[Message]] | list[Any] | Message,
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: str | Mapping[str, Any] = AUTO,
        ordered: bool = True,
        use_tqdm: bool = False,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Answer conversations, each a list of {role, content}, through the model's chat template.

        A message, or a list of them, is one conversation. `chat_template_kwargs` are values that the template reads, as
        {"enable_thinking": False}. `tools` are OpenAI's function tools, which the template shows to the model, and
        `tool_choice` says whether it has to call some: "required", or {"type": "function", "function": {"name": ...}}.
        What it calls is in `tool_calls` of the output, in the form that the template tells, or that the sampling names:
        {"tool_calls": {"format": "hermes"}}. With `add_generation_prompt=False, continue_final_message=True` the model
        goes on with the text of the last message, an assistant's, and the output is what is new. Lists, iterators and
        the rest as for `generate`. Raises UsageError for a model without a template, for tools that are none or cannot
        be called, for values that no template can be given, and for both of these two being true.
        """
        messages = [messages] if isinstance(messages, Mapping) else messages
        one = isinstance(messages, list) and bool(messages) and all(isinstance(each, Mapping) for each in messages)
        asked: Iterable[Any] = [messages] if one else messages
        if not self._tokenizer.has_chat_template:
            raise UsageError(f"{self._job['model']}: has no chat template; use generate() with the prompt's text")
        offer = offer_of(tools, tool_choice)
        check_continuation(add_generation_prompt, continue_final_message)
        ask = conversation_asker(
            self._tokenizer,
            chat_template_kwargs or {},
            offer,
            asks=add_generation_prompt,
            continues=continue_final_message,
        )
        show = Shown(ordered, use_tqdm)
        return self._run(asked, ask, sampling_params, show, add_special_tokens=False, offer=offer)

    def _run(
        self,
        given: Iterable[Any],
        ask: Ask,
        sampling_params: Sampling | Sequence[Sampling] | None,
        show: Shown,
        add_special_tokens: bool,
        offer: Offer = NO_OFFER,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        refuse_one(given, "prompts (chat: of conversations)")
        self._shared.check_process()
        sampling = self._sampling_of_each(given, sampling_params, offer)
        asked = (
            ask(prompt, params, row_seed(self._seed if seed is None else seed, str(index), 0))
            for index, (prompt, (params, seed)) in enumerate(zip(given, sampling, strict=False))
        )
        stream = PromptStream(
            self._shared,
            TextOutputs(AnswerReader(self._tokenizer.decode_batch, _COLUMNS)),
            lambda some: self._tokenizer.encode_batch([one.text or "" for one in some], add_special_tokens),
            asked,
            ordered=show.ordered or isinstance(given, list),
        )
        outputs = show.counted(stream.outputs(), len(given) if isinstance(given, list) else None)
        return list(outputs) if isinstance(given, list) else outputs

    def _sampling_of_each(
        self, given: Iterable[Any], sampling: Sampling | Sequence[Sampling] | None, offer: Offer
    ) -> Iterable[tuple[SamplingParams, int | None]]:
        """The parameters of each prompt, and the seed where it was given. Raises UsageError, before anything runs."""
        if not isinstance(sampling, Sequence) or isinstance(sampling, str | bytes):
            return repeat(self._params({} if sampling is None else sampling, offer))
        if not isinstance(given, list) or len(sampling) != len(given):
            prompts = f"{len(given)} prompts" if isinstance(given, list) else "an iterator of prompts"
            raise UsageError(f"sampling_params: {len(sampling)} of them for {prompts}; give one for all, or one each")
        return [self._params(one, offer) for one in sampling]

    def _params(self, sampling: Any, offer: Offer) -> tuple[SamplingParams, int | None]:
        params, seed = self._params_and_seed(sampling, has_tools=bool(offer.tools))
        return sampling_with(offer, params), seed

    def _params_and_seed(self, sampling: Any, has_tools: bool) -> tuple[SamplingParams, int | None]:
        implied: dict[str, Any] = {"tool_calls": {}} if has_tools else {}
        if isinstance(sampling, SamplingParams):
            if has_tools and sampling.tool_calls is None:
                made = self._spec_of(implied).to_params()
                thinking = sampling.thinking or made.thinking  # which some formats of tool calls imply
                sampling = replace(sampling, tool_calls=made.tool_calls, thinking=thinking)
            return sampling, None
        if not isinstance(sampling, Mapping):
            raise _not_sampling(sampling)
        for name, instead in _NOT_HERE.items():
            if name in sampling:
                raise UsageError(f"sampling_params: {name!r} is for jobs (bulkrun.run_job); {instead}")
        spec = self._spec_of({**implied, **sampling})
        return sampling_with_defaults(spec, self._defaults).to_params(), spec.seed if "seed" in sampling else None

    def _spec_of(self, sampling: Mapping[str, Any]) -> SamplingSpec:
        job = with_schema(job_of({**self._job, "sampling": dict(sampling)}))
        return with_markers(with_tool_format(job, self._tokenizer), self._architecture).sampling


def _not_sampling(given: object) -> UsageError:
    return UsageError(
        f"sampling_params: {given!r:.60} is neither SamplingParams nor a mapping with the keys of a job file's "
        "sampling section, like {'max_tokens': 64}"
    )
