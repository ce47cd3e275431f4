"""The job file as types: every key, its default and its one-sentence description live here and nowhere else.

The models are frozen and strict (`"5"` is not 5); an unknown key is an error. `bulkrun.job.jobfile.load` turns YAML
into a `JobSpec` and problems into `file:line:col` messages; `bulkrun schema` prints the JSON schema made from this.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bulkrun.data.remote import is_remote
from bulkrun.request import RepetitionStop, SamplingParams, StructuredOutput, Thinking

PER_ROW_SAMPLING = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "structured_outputs",
)

# Sampling keys that go to the engine as they are.
_PLAIN_SAMPLING = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ChatMessage(_Section):
    """One message of a conversation; `content` is a Jinja template over the row."""

    role: Literal["system", "user", "assistant", "tool"] = Field(description="Who speaks.")
    content: str = Field(description="What is said: a Jinja template over the row's columns.")


class InputSpec(_Section):
    """Where the rows come from."""

    path: str | list[str] = Field(
        description="A file, a directory, a glob, or a list of them: .parquet, .jsonl, .csv (text also .gz, .zst); "
        "local or s3://."
    )
    sql: str | None = Field(
        None,
        description="A DuckDB SELECT over the files, which it sees as the view `input`; its result is the input.",
    )
    id: str | None = Field(None, description="The column that names a row. Default: the row's position.")
    columns: list[str] | None = Field(
        None, description="Input columns to pass through to the output. Default: all of them."
    )
    on_duplicate: Literal["keep", "fail"] = Field(
        "keep",
        description="What to do when two rows have one id: keep both (told apart by position), or refuse.",
    )
    max_row_bytes: int = Field(
        16 * 2**20,
        ge=1,
        description="A longer input line becomes an error row instead of filling the memory.",
    )
    hint: str | None = Field(None, description="A command to show when `path` matches no file: how to make the input.")


class PromptSpec(_Section):
    """How a row becomes a prompt: one of `template`, `messages`, `column`; with none, the input's columns tell.

    Looked for in this order: an OpenAI batch line (`custom_id`, `url`, `body`), `messages`, `prompt`, `text`.
    """

    template: str | None = Field(None, description="A Jinja template over the row's columns: the user's message.")
    messages: list[ChatMessage] | str | None = Field(
        None,
        description="A conversation of templates, or the name of a column that holds a list of messages.",
    )
    column: str | None = Field(None, description="The name of a column that holds the prompt text.")
    system: str | None = Field(None, description="A system message put before the conversation (a template too).")
    chat_template: str = Field(
        "auto",
        description="auto: the model's chat template where it has one. none: the text is the prompt as it is. "
        "Else the path of a Jinja file.",
    )

    @model_validator(mode="after")
    def _at_most_one(self) -> PromptSpec:
        given = [key for key in ("template", "messages", "column") if getattr(self, key) is not None]
        if len(given) > 1:
            raise ValueError(f"needs one of template, messages, column; has {' and '.join(given)}")
        if self.chat_template == "none" and (self.messages is not None or self.system is not None):
            raise ValueError("chat_template: none takes a template or column only: messages need a chat template")
        return self


class StructuredOutputsSpec(_Section):
    """What every output must look like: exactly one of `json`, `regex`, `choice`, `grammar`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, serialize_by_alias=True)

    # `json` is vLLM's name; as an attribute it would hide a method of pydantic's models.
    json_schema: dict[str, Any] | str | None = Field(
        None,
        alias="json",
        description="A JSON schema, or the path of a .json file with one. The result gets a typed column `parsed`. "
        "Objects have the properties that they declare, and others only where additionalProperties says so.",
    )
    regex: str | None = Field(None, description="A regular expression that the whole output matches.")
    choice: list[str] | None = Field(None, min_length=1, description="The output is one of these texts.")
    grammar: str | None = Field(None, description="A Lark grammar whose `start` rule is the whole output.")

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputsSpec:
        given = [name for name in ("json_schema", "regex", "choice", "grammar") if getattr(self, name) is not None]
        if len(given) != 1:
            have = " and ".join(given).replace("json_schema", "json") or "none of them"
            raise ValueError(f"needs exactly one of json, regex, choice, grammar; has {have}")
        return self

    def to_param(self) -> StructuredOutput:
        """The engine's parameter. A schema that is a path must have been read before (`launch.prepare` does)."""
        if self.json_schema is not None:
            assert isinstance(self.json_schema, dict), "a schema's path is read when the job is prepared"
            return StructuredOutput("json", json.dumps(self.json_schema))
        if self.regex is not None:
            return StructuredOutput("regex", self.regex)
        if self.choice is not None:
            return StructuredOutput("choice", json.dumps(self.choice))
        assert self.grammar is not None, "one of the four is given"
        return StructuredOutput("grammar", self.grammar)


class ThinkingSpec(_Section):
    """How a reasoning model marks its thoughts; they go into the column `reasoning`, the rest into `response`."""

    start: str = Field("<think>", min_length=1, description="What begins the thoughts (it may stand in the prompt).")
    end: str = Field("</think>", min_length=1, description="What ends them.")
    max_tokens: int | None = Field(
        None, ge=1, description="Most tokens to think; then the end is written for the model, and it answers."
    )


class RepetitionStopSpec(_Section):
    """End an output that runs in circles: an error row `runaway` that keeps the text so far."""

    max_pattern: int = Field(64, ge=1, le=512, description="Longest pattern to look for, in tokens.")
    repeats: int = Field(4, ge=2, description="How often it stands at the end, one after the other.")
    min_tokens: int = Field(48, ge=2, description="How many tokens the repetitions have at least.")


class SamplingSpec(_Section):
    """How tokens are chosen. Names are vLLM's; what is not set comes from the model's generation_config.json."""

    n: int = Field(1, ge=1, le=1024, description="Samples per row; each is an output row of its own.")
    best_of: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Generate so many samples and keep the n with the highest cumulative log-probability, best first.",
    )
    max_tokens: int | None = Field(None, ge=1, description="Most tokens to generate. Default: the model's, else 256.")
    min_tokens: int = Field(0, ge=0, description="Fewest tokens to generate before an end or stop counts.")
    temperature: float | None = Field(None, ge=0, le=100, description="0 is greedy. Default: the model's, else 1.")
    top_p: float | None = Field(None, gt=0, le=1, description="Keep the smallest set of tokens with this probability.")
    top_k: int | None = Field(None, ge=-1, description="Keep the k most likely tokens; 0 or -1: all.")
    min_p: float | None = Field(
        None, ge=0, le=1, description="Drop tokens less likely than this share of the likeliest."
    )
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="Subtracted from tokens that were generated already.")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="The same, times how often.")
    repetition_penalty: float | None = Field(
        None, gt=0, le=10, description="Above 1: tokens of the prompt and the output become less likely."
    )
    stop: str | list[str] | None = Field(None, description="Text that ends the output; it is not part of it.")
    stop_token_ids: list[int] = Field(default_factory=list, description="Token ids that end the output.")
    ignore_eos: bool = Field(False, description="Go on after the end-of-sequence token (for benchmarks).")
    seed: int = Field(0, description="The job's seed. A row's noise depends on this, its id and the sample only.")
    logprobs: int | None = Field(
        None, ge=0, le=20, description="A column `logprobs`: each token's, and so many of the likeliest alternatives'."
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=20, description="A column `prompt_logprobs`: the same for the tokens of the prompt."
    )
    structured_outputs: StructuredOutputsSpec | None = Field(
        None, description="What every output must look like: a JSON schema, a regex, one of several texts, a grammar."
    )
    thinking: ThinkingSpec | None = Field(
        None, description="For reasoning models: thoughts in a column of their own, and a budget for them."
    )
    repetition_stop: RepetitionStopSpec | None = Field(
        None, description="End outputs that run in circles ({}: as usual)."
    )
    per_row: dict[str, str] = Field(
        default_factory=dict,
        description="Sampling key -> input column that overrides it where the column is not null: "
        f"any of {', '.join(PER_ROW_SAMPLING)}.",
    )

    @model_validator(mode="after")
    def _per_row_names(self) -> SamplingSpec:
        for key in self.per_row:
            if key not in PER_ROW_SAMPLING:
                raise ValueError(f"per_row: {key!r} cannot be set per row; these can: {', '.join(PER_ROW_SAMPLING)}")
        return self

    @model_validator(mode="after")
    def _best_of(self) -> SamplingSpec:
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of: {self.best_of} is less than n ({self.n}); generate at least what is kept")
        return self

    @property
    def generations(self) -> int:
        """How many outputs are generated for a row; `n` of them are kept."""
        return self.best_of or self.n

    @model_validator(mode="after")
    def _ranges(self) -> SamplingSpec:
        SamplingParams(**self._plain_params({}))
        return self

    @model_validator(mode="after")
    def _ends_when_whole(self) -> SamplingSpec:
        if self.structured_outputs is not None and self.ignore_eos:
            raise ValueError("ignore_eos: a structured output ends when it is whole; leave out one of the two")
        return self

    def to_params(self, overrides: dict[str, Any] | None = None) -> SamplingParams:
        """The engine's parameters; `overrides` (a row's own values) win over the job's. Raises ValueError."""
        values = self._plain_params(overrides or {})
        return SamplingParams(**self._structured_params(values.pop("structured_outputs", None)), **values)

    def _plain_params(self, overrides: dict[str, Any]) -> dict[str, Any]:
        """The parameters that are numbers and texts; and a row's `structured_outputs` as it is."""
        values: dict[str, Any] = {name: value for name in _PLAIN_SAMPLING if (value := getattr(self, name)) is not None}
        if self.best_of is not None:
            values.setdefault("logprobs", 0)  # to compare samples by
        values |= overrides
        values.pop("seed", None)
        stop = values.get("stop", ())
        values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        values["stop_token_ids"] = tuple(values.get("stop_token_ids", ()))
        return values

    def _structured_params(self, row_schema: str | None) -> dict[str, Any]:
        """The parameters that are values of their own; `row_schema` is a row's own JSON schema."""
        given: dict[str, Any] = {}
        if row_schema is not None:
            given["structured_outputs"] = StructuredOutput("json", row_schema)
        elif self.structured_outputs is not None:
            given["structured_outputs"] = self.structured_outputs.to_param()
        if self.thinking is not None:
            given["thinking"] = Thinking(self.thinking.start, self.thinking.end, self.thinking.max_tokens)
        if (circles := self.repetition_stop) is not None:
            given["repetition_stop"] = RepetitionStop(circles.max_pattern, circles.repeats, circles.min_tokens)
        return given


class OutputSpec(_Section):
    """Where the results go."""

    path: str = Field(description="The result directory: this is the run. Or s3://BUCKET/PREFIX for the results alone.")
    state: str | None = Field(
        None,
        description="With results in a bucket, the directory of the run (state, and the parts too); several nodes "
        "need to share it. Default: one below XDG_STATE_HOME or ~/.local/state, named by the URL.",
    )
    partition_by: list[str] = Field(
        default_factory=list,
        description="Columns whose values become folders (lang=en/part-00000.parquet), as Hive and DuckDB read them.",
    )
    compression: Literal["zstd", "snappy", "gzip", "lz4", "none"] = Field("zstd", description="Codec of the parts.")
    rows_per_file: int | None = Field(
        None,
        ge=1,
        description="Most input rows in a part, the unit of commit. Default: by the size of the input, at most 4096.",
    )

    @model_validator(mode="after")
    def _place(self) -> OutputSpec:
        if "://" in self.path and not re.match(r"s3://[^/@:*?\[]+(/|$)", self.path):
            raise ValueError("path: a directory or s3://BUCKET/PREFIX, without keys (they come from the environment)")
        if self.state is not None and not is_remote(self.path):
            raise ValueError("state: only with path: s3://...; a result directory holds its own state")
        return self


class EngineSpec(_Section):
    """How the engine works, never what it answers: changing these does not invalidate a run. Names are vLLM's."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: the GPU where there is one.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="auto: the model's own; on a CPU without bf16 units float32."
    )
    max_num_seqs: int | None = Field(None, ge=1, description="Most sequences that run at once. Default: by memory.")
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="Most tokens one step computes (prompts are chunked to fit). Default: by device.",
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Most tokens of prompt and output together. Default: the model's, if memory allows.",
    )
    block_size: int | None = Field(None, ge=1, le=1024, description="Tokens per KV cache block.")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of the GPU's memory that weights and KV cache may take."
    )
    kv_cache_memory_bytes: int | None = Field(
        None,
        ge=1,
        description="Bytes of KV cache. Default: what gpu_memory_utilization leaves; on CPU a share of RAM.",
    )
    enable_prefix_caching: bool = Field(True, description="Compute a prefix that several prompts share only once.")


class RunSpec(_Section):
    """How the run goes on: limits, safety, progress."""

    limit: int | None = Field(None, ge=1, description="Only the first N rows of the input.")
    checkpoint_every: float = Field(5.0, gt=0, description="Seconds of finished work that a kill may lose at most.")
    max_error_rate: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Stop the run when more than this share of the last 1000 rows failed.",
    )
    on_too_long: Literal["error", "truncate_left", "truncate_right"] = Field(
        "error", description="A prompt that does not fit: an error row, or cut at its start or its end."
    )
    window_rows: int = Field(
        1_000_000,
        ge=1,
        description="Rows that are planned (sorted, grouped) together; the next window is planned while this one runs.",
    )
    workers: int = Field(
        1,
        ge=1,
        le=1024,
        description="Processes on this machine: one per GPU, or that many on CPU with threads divided.",
    )
    executor: Literal["local", "slurm", "ray"] = Field(
        "local", description="Who starts the workers: this machine, Slurm (inside a Slurm job: this machine), or Ray."
    )
    walltime: float | None = Field(
        None, gt=0, description="Seconds a worker may run; under Slurm the job's own end counts too."
    )
    row_timeout: float | None = Field(
        None,
        gt=0,
        description="Seconds a row may run in the engine; then it is an error row `timeout` with its text so far.",
    )
    max_tokens_per_row: int | None = Field(
        None,
        ge=2,
        description="Most tokens of prompt and outputs of one row together: outputs are cut to what the prompt leaves.",
    )
    incremental: bool = Field(
        False,
        description="The same command again runs only rows that are new, changed or failed. Needs input.id.",
    )
    on_vanished: Literal["keep", "drop"] = Field(
        "keep", description="With incremental, what to do with results whose row the input no longer has."
    )


_LINE = Field(pattern=r"^[^\r\n]+$")


class SlurmSpec(_Section):
    """How `submit --executor slurm` asks for machines: an array of identical workers. Names are sbatch's."""

    array: int | None = Field(None, ge=1, le=4096, description="Workers (array elements). Default: run.workers.")
    partition: str | None = Field(None, pattern=r"^[^\r\n]+$", description="sbatch --partition.")
    account: str | None = Field(None, pattern=r"^[^\r\n]+$", description="sbatch --account.")
    qos: str | None = Field(None, pattern=r"^[^\r\n]+$", description="sbatch --qos.")
    time: str | None = Field(None, pattern=r"^[0-9:-]+$", description='sbatch --time, in quotes: "04:00:00".')
    gpus: int | str | None = Field(None, description="GPUs per element (1), or type and count (a100:1).")
    cpus: int | None = Field(None, ge=1, description="CPUs per element.")
    mem: str | None = Field(None, pattern=r"^[0-9]+[KMGT]?$", description="Memory per node: 64G.")
    constraint: str | None = Field(None, pattern=r"^[^\r\n]+$", description="sbatch --constraint.")
    warn: int = Field(
        120, ge=10, le=3600, description="Seconds before the time limit at which Slurm says so (SIGUSR1)."
    )
    extra: list[Annotated[str, _LINE]] = Field(
        default_factory=list, description="More sbatch options, one a line: --exclude=node7."
    )
    setup: list[Annotated[str, _LINE]] = Field(
        default_factory=list, description="Shell lines before the worker starts: module load cuda."
    )


class RaySpec(_Section):
    """How `submit --executor ray` places its workers: one Ray actor each (Ray Core, the extra `bulkrun[ray]`)."""

    address: str | None = Field(
        None, description="An existing cluster: auto, HOST:PORT or ray://HOST:10001. Default: a local one of its own."
    )
    gpus: float | None = Field(None, ge=0, description="GPUs per worker. Default: 1 where the cluster has any, else 0.")
    cpus: float = Field(1, ge=0, description="CPUs per worker.")


class JobSpec(_Section):
    """One bulk inference job."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="A short name: letters, digits, dot, dash, underscore.",
    )
    model: str = Field(min_length=1, description="A hub id, a local directory, or bundled:tiny.")
    input: InputSpec = Field(description="Where the rows come from.")
    prompt: PromptSpec = Field(default_factory=PromptSpec, description="How a row becomes a prompt.")
    sampling: SamplingSpec = Field(default_factory=SamplingSpec, description="How tokens are chosen.")
    output: OutputSpec = Field(description="Where the results go.")
    engine: EngineSpec = Field(default_factory=EngineSpec, description="How the engine works.")
    slurm: SlurmSpec = Field(default_factory=SlurmSpec, description="What to ask Slurm for.")
    ray: RaySpec = Field(default_factory=RaySpec, description="How Ray places the workers.")
    run: RunSpec = Field(default_factory=RunSpec, description="How the run goes on.")

    @model_validator(mode="after")
    def _incremental(self) -> JobSpec:
        """What a run that goes on night after night cannot do without."""
        if not self.run.incremental:
            return self
        if self.input.id is None:
            raise ValueError("run.incremental needs input.id: the column by which it knows a row again")
        if self.input.columns is not None and self.input.id not in self.input.columns:
            raise ValueError(f"run.incremental needs {self.input.id!r} (input.id) among input.columns")
        if self.output.partition_by:
            raise ValueError(
                "run.incremental does not go with output.partition_by: a row that changes folders could not be seen "
                "exactly once at every moment"
            )
        return self
