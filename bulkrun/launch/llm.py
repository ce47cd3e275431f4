"""The Python API: an engine to ask (`LLM`), and a whole job (`run_job`). Importing this loads no torch; `LLM()` does.

Lists in, lists out; iterators in, iterators out. A prompt that cannot be answered is an output with an `error`, never
an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

import pyarrow as pa

from bulkrun.data.json_types import is_unicode
from bulkrun.errors import UsageError
from bulkrun.job.jobfile.load import job_of, load_job
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.prompts.conversations import BadMessages, read_messages
from bulkrun.job.work.answers import AnswerReader
from bulkrun.job.work.progress import ProgressSnapshot
from bulkrun.job.work.shard_work import row_seed
from bulkrun.launch.engine import load_engine
from bulkrun.launch.prepare import BUNDLED_ROOT, sampling_with_defaults
from bulkrun.launch.prompt_stream import Asked, PromptStream, RequestOutput, SharedEngine
from bulkrun.launch.queue import submit_job
from bulkrun.launch.run import Submitted
from bulkrun.launch.structure import with_schema
from bulkrun.models.model_dir import generation_defaults, resolve_model
from bulkrun.request import RowError, SamplingParams
from bulkrun.sandbox import TemplateFailed
from bulkrun.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Sampling = SamplingParams | Mapping[str, Any]
_P = TypeVar("_P", bound=Prompt)  # a list[str] is no list[str | Sequence[int]]
_C = TypeVar("_C", bound=Sequence[Message])

_COLUMNS = [pa.field(name, pa.null()) for name in ("reasoning", "logprobs", "prompt_logprobs", "cumulative_logprob")]
_NOT_HERE = ("n", "best_of", "per_row")  # they make rows of rows: a job's matter


class EngineSettings(TypedDict, total=False):
    """The keys of a job file's `engine` section, which has their descriptions and defaults."""

    device: Literal["auto", "cpu", "cuda"]
    dtype: Literal["auto", "bfloat16", "float16", "float32"]
    load_format: Literal["auto", "dummy"]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "float32", "fp8"]
    quantization: Literal["fp8"] | None
    deterministic: bool
    enable_prefix_caching: bool
    batching: Literal["continuous", "static", "dynamic"]
    batching_window_s: float
    async_scheduling: bool | None
    enforce_eager: bool


class LLM:
    """A model that answers prompts. Not thread-safe.

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
        if type(seed) is not int:
            raise UsageError(f"seed: {seed!r:.60} is not a whole number")
        self._job = {"name": "python", "model": model, "input": {"path": "-"}, "output": {"path": "-"}}
        settings = job_of({**self._job, "engine": dict(engine)}).engine
        model_dir = resolve_model(model, bundled_root=BUNDLED_ROOT)
        self._seed = seed
        self._defaults = generation_defaults(model_dir)
        self._tokenizer = Tokenizer.from_dir(model_dir)
        self._shared = SharedEngine(load_engine(model_dir, self._tokenizer, settings))
        self._reader = AnswerReader(self._tokenizer.decode_batch, _COLUMNS)

    @overload  # a list is an iterable too: the first overload that fits says what comes
    def generate(  # type: ignore[overload-overlap]
        self, prompts: list[_P] | str, sampling_params: Sampling | Sequence[Sampling] | None = None
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self, prompts: Iterable[Prompt], sampling_params: Sampling | None = None, *, ordered: bool = True
    ) -> Iterator[RequestOutput]: ...

    def generate(
        self,
        prompts: Iterable[Prompt] | str,
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        ordered: bool = True,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Continue prompts as they are: texts, or lists of token ids.

        `sampling_params` are for all prompts, or a list with those of each: `SamplingParams`, or a mapping with the
        keys of a job file's `sampling` section (what it leaves open comes from the model's defaults).

        A list of prompts gives a list of outputs in its order. Any other iterable gives an iterator, which reads at
        most 2 x `max_num_seqs` prompts ahead of what it has handed out. Its outputs come in the order of the prompts,
        so that one very long output holds up the reading; with `ordered=False` they come as they end.
        """
        asked = [prompts] if isinstance(prompts, str) else prompts
        return self._run(asked, self._ask_text, sampling_params, ordered, add_special_tokens=True)

    @overload
    def chat(  # type: ignore[overload-overlap]
        self, messages: list[_C], sampling_params: Sampling | Sequence[Sampling] | None = None
    ) -> list[RequestOutput]: ...

    @overload
    def chat(
        self, messages: Iterable[Sequence[Message]], sampling_params: Sampling | None = None, *, ordered: bool = True
    ) -> Iterator[RequestOutput]: ...

    def chat(
        self,
        messages: Iterable[Sequence[Message]],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        ordered: bool = True,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Answer conversations, each a list of {role, content}, through the model's chat template.

        Lists, iterators and `sampling_params` as for `generate`. Raises UsageError for a model without a template.
        """
        if not self._tokenizer.has_chat_template:
            raise UsageError(f"{self._job['model']}: has no chat template; use generate() with the prompt's text")
        renderer = self._tokenizer.chat_renderer()

        def ask(conversation: Any, sampling: SamplingParams, seed: int) -> Asked:
            try:
                messages = read_messages(conversation)
                if not any(message["content"].strip() for message in messages if message["role"] != "system"):
                    return Asked(None, None, sampling, seed, RowError("empty_prompt", "the prompt is empty"))
                text = renderer.render(messages)
            except (BadMessages, TemplateFailed) as problem:
                code = "bad_template" if isinstance(problem, TemplateFailed) else "bad_input"
                return Asked(None, None, sampling, seed, RowError(code, f"messages{problem}"))
            return self._ask_text(text, sampling, seed)

        return self._run(messages, ask, sampling_params, ordered, add_special_tokens=False)

    def _run(
        self,
        given: Iterable[Any],
        ask: Callable[[Any, SamplingParams, int], Asked],
        sampling_params: Sampling | Sequence[Sampling] | None,
        ordered: bool,
        add_special_tokens: bool,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        self._shared.check_process()
        sampling = self._sampling_of_each(given, sampling_params)
        asked = (
            ask(prompt, params, row_seed(self._seed if seed is None else seed, str(index), 0))
            for index, (prompt, (params, seed)) in enumerate(zip(given, sampling, strict=False))
        )
        stream = PromptStream(
            self._shared,
            self._reader,
            lambda texts: self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens),
            asked,
            ordered=ordered or isinstance(given, list),
        )
        return list(stream.outputs()) if isinstance(given, list) else stream.outputs()

    def _sampling_of_each(
        self, given: Iterable[Any], sampling: Sampling | Sequence[Sampling] | None
    ) -> Iterable[tuple[SamplingParams, int | None]]:
        """The parameters of each prompt, and the seed where it was given. Raises UsageError, before anything runs."""
        if sampling is None or isinstance(sampling, SamplingParams | Mapping):
            return repeat(self._params(sampling or {}))
        if not isinstance(sampling, Sequence) or isinstance(sampling, str | bytes):
            raise _not_sampling(sampling)
        if not isinstance(given, list) or len(sampling) != len(given):
            prompts = f"{len(given)} prompts" if isinstance(given, list) else "an iterator of prompts"
            raise UsageError(f"sampling_params: {len(sampling)} of them for {prompts}; give one for all, or one each")
        return [self._params(one) for one in sampling]

    def _params(self, sampling: Sampling) -> tuple[SamplingParams, int | None]:
        if isinstance(sampling, SamplingParams):
            return sampling, None
        if not isinstance(sampling, Mapping):
            raise _not_sampling(sampling)
        if refused := [name for name in _NOT_HERE if name in sampling]:
            raise UsageError(f"sampling_params: {refused[0]!r} is for jobs (bulkrun.run_job); give a prompt n times")
        spec = with_schema(job_of({**self._job, "sampling": dict(sampling)})).sampling
        return sampling_with_defaults(spec, self._defaults).to_params(), sampling.get("seed")

    def _ask_text(self, prompt: Any, sampling: SamplingParams, seed: int) -> Asked:
        """A text or token ids as a request, or why it is none."""
        if isinstance(prompt, str):
            error = None
            if not prompt.strip():
                error = RowError("empty_prompt", "the prompt is empty")
            elif not is_unicode(prompt):
                error = RowError("bad_input", "the prompt holds half a surrogate pair, which is not text")
            return Asked(prompt, None, sampling, seed, error)
        if (
            isinstance(prompt, Sequence)
            and not isinstance(prompt, bytes | bytearray)
            and all(type(token_id) is int and token_id >= 0 for token_id in prompt)
        ):
            return Asked(None, list(prompt), sampling, seed)
        error = RowError("bad_input", f"{repr(prompt)[:60]} is neither a text nor a list of token ids")
        return Asked(None, None, sampling, seed, error)


def _not_sampling(given: object) -> UsageError:
    return UsageError(
        f"sampling_params: {given!r:.60} is neither SamplingParams nor a mapping with the keys of a job file's "
        "sampling section, like {'max_tokens': 64}"
    )


class _Quiet:
    """A view that shows nothing, or calls back."""

    def __init__(self, on_progress: Callable[[ProgressSnapshot], None] | None) -> None:
        self._on_progress = on_progress

    def phase(self, text: str) -> None:
        """Nothing to show."""

    def update(self, snapshot: ProgressSnapshot) -> None:
        if self._on_progress is not None:
            self._on_progress(snapshot)


def run_job(
    job: JobSpec | Mapping[str, Any] | str | Path,
    *,
    fresh: bool = False,
    resume_anyway: bool = False,
    on_progress: Callable[[ProgressSnapshot], None] | None = None,
) -> Submitted:
    """What `bulkrun submit` does: run a job, or continue it; `job` is a job file's path, or its content.

    Runs it where its `run.executor` says; with Slurm this waits until the run is finished. Returns the finished run:
    `totals` (rows, errors, tokens), `run.root`, `worked` (False: it was finished before).
    `on_progress` gets the numbers about once a second. In the main thread Ctrl-C and SIGTERM save and raise
    Interrupted, and the same call continues; in another thread signals are left alone. Raises the BulkrunErrors of
    `bulkrun.errors`, each with the exit code that the command would have ended with.
    """
    if isinstance(job, str | Path):
        spec, job_file = load_job(Path(job)), Path(job)
    else:
        spec, job_file = (job if isinstance(job, JobSpec) else job_of(job)), None
    view = _Quiet(on_progress)
    done = submit_job(spec, view, wait=True, job_file=job_file, fresh=fresh, resume_anyway=resume_anyway)
    assert isinstance(done, Submitted), "it was waited for"
    return done
