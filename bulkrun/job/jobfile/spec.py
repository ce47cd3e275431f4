"""The job file as types: a key, its default and its one-sentence description live in one place.

The larger sections have modules of their own: `prompt`, `sampling`, `embedding`, `classification`, `engine`, and
`cluster` for Slurm and Ray; `task` knows which go together. The models are frozen and strict (`"5"` is not 5); an
unknown key is an error. `load` turns YAML into a `JobSpec` and problems into `file:line:col`; `bulkrun schema` prints
its JSON schema.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from bulkrun.data.storage.remote import is_remote
from bulkrun.job.jobfile.classification import ClassificationSpec
from bulkrun.job.jobfile.cluster import RaySpec, SlurmSpec
from bulkrun.job.jobfile.embedding import EmbeddingSpec
from bulkrun.job.jobfile.engine import EngineSpec
from bulkrun.job.jobfile.prompt import PromptSpec
from bulkrun.job.jobfile.sampling import SamplingSpec
from bulkrun.job.jobfile.section import Section
from bulkrun.job.jobfile.task import NOTHING_SAMPLED, problem_of_task
from bulkrun.job.jobfile.tools import AUTO, NONE
from bulkrun.request import PartKind
from bulkrun.settings import Task


class InputSpec(Section):
    """Where the rows come from, and what is read of them."""

    path: str | list[str] = Field(
        description="A file, a directory, a glob, or a list of them: .parquet, .jsonl or .ndjson, .csv or .tsv (text "
        "also .gz, .zst); local, s3://, or hf://datasets/OWNER/NAME[@REVISION]/PATH, which is in a dataset of the "
        "Hugging Face hub and is downloaded first. A file named twice is read once. CSV columns are all text. A JSON "
        "column has the type of nine in ten of its first values; a row with any other value is an error row, except "
        "that a number, true or false in a column of strings becomes text. Without such a majority the column is "
        "text, and other values become JSON text."
    )
    sql: str | None = Field(
        None,
        description="A DuckDB SELECT over the files, which it sees as the view `input`; its result is the input. It "
        "reads no other files: to join two Parquet files, list both in `path` and name both in the SQL (FROM "
        "'docs.parquet' d JOIN 'authors.parquet' a ON ...). Its time zone is UTC. Default: all rows of the files.",
    )
    delimiter: str | None = Field(
        None,
        description='The character between the fields of a CSV file, as ";" (a tab is "\\t", in double quotes). '
        "Default: a tab in .tsv files, a comma in .csv.",
    )
    id: str | None = Field(None, description="The column that names a row. Default: the row's position.")
    priority: str | None = Field(
        None,
        description="A column of integers (or of text that is one, as in CSV): rows with a smaller number run first. "
        "Default: all are equal.",
    )
    adapter: str | None = Field(
        None,
        description="The column that names each row's adapter among `engine.adapters`; a row without a value runs "
        "without one. Default: OpenAI's lines name it as their `model`.",
    )
    columns: list[str] | None = Field(
        None,
        description="Input columns to pass through to the output, in addition to that of `id`. Default: all of them.",
    )
    on_duplicate: Literal["keep", "fail"] = Field(
        "keep",
        description="What to do when two rows have the same id. keep: run both (the output column `row` tells them "
        "apart, and their number is reported; sampling noise follows the id, so equal prompts get equal texts). fail: "
        "refuse the job.",
    )
    max_row_bytes: int = Field(
        16 * 2**20,
        ge=1,
        description="An input row larger than this becomes an error row instead of filling the memory.",
    )
    hint: str | None = Field(
        None, description="A command to suggest when `path` matches no file: how to create the input. Default: none."
    )

    @field_validator("delimiter")
    @classmethod
    def _one_character(cls, value: str | None) -> str | None:
        if value is not None and (len(value) != 1 or value in '"\r\n\0'):
            raise ValueError('must be one character other than a quote, as ";" (a tab is "\\t", in double quotes)')
        return value


class OutputSpec(Section):
    """Where the results go, and in what form."""

    path: str = Field(
        min_length=1,
        description="The result directory, which is also the run. Or s3://BUCKET/PREFIX, for the results only.",
    )
    state: str | None = Field(
        None,
        description="With results in a bucket: the directory of the run (its state, and a copy of the parts); all "
        "nodes must share it. Default: one below XDG_STATE_HOME or ~/.local/state, named by the URL.",
    )
    partition_by: list[str] = Field(
        [],
        description="Columns whose values become folders (lang=en/part-00000.parquet), as Hive and DuckDB read them.",
    )
    compression: Literal["zstd", "snappy", "gzip", "lz4", "none"] = Field(
        "zstd", description="Compression of the result files."
    )
    rows_per_file: int | None = Field(
        None,
        ge=1,
        description="Maximum number of input rows in a part, the unit of commit. Default: by the size of the input, at "
        "most 4096.",
    )

    @model_validator(mode="after")
    def _place(self) -> OutputSpec:
        if "://" in self.path and not re.match(r"s3://[^/@:*?\[]+(/|$)", self.path):
            raise ValueError("path: a directory or s3://BUCKET/PREFIX, without keys (they come from the environment)")
        if is_remote(self.path) and ("//" in self.path.removeprefix("s3://") or "?versionId=" in self.path):
            raise ValueError("path: no name between two slashes, and no ?versionId=, can be in s3://BUCKET/PREFIX")
        if self.state is not None and not is_remote(self.path):
            raise ValueError("state: only with path: s3://...; a result directory holds its own state")
        return self


class RunSpec(Section):
    """How the run goes on: limits, safety, progress."""

    limit: int | None = Field(None, ge=1, description="Only the first N rows of the input. Default: all.")
    checkpoint_every: float = Field(5.0, gt=0, description="Maximum seconds of finished work that a kill may lose.")
    max_error_rate: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Stop the run when more than this share of the last 1000 rows failed (checked from 100 rows on). "
        "In an incremental run, N rows that failed before raise it by N / 100.",
    )
    on_too_long: Literal["error", "truncate_left", "truncate_right"] = Field(
        "error",
        description="What to do with a prompt that does not fit: make it an error row, or cut its start or its end (of "
        "a pair of texts, that of the second).",
    )
    window_rows: int = Field(
        1_000_000,
        ge=1,
        description="Number of rows planned (sorted, grouped) together; the next window is planned while this one "
        "runs.",
    )
    workers: int = Field(
        1,
        ge=1,
        le=1024,
        description="Number of workers: processes on this machine (one per GPU; on a CPU they divide the threads), "
        "elements of the Slurm array unless slurm.array is set, or Ray actors.",
    )
    executor: Literal["local", "slurm", "ray"] = Field(
        "local", description="Who starts the workers: this machine, Slurm (inside a Slurm job: this machine), or Ray."
    )
    walltime: float | None = Field(
        None,
        gt=0,
        description="Maximum seconds that a worker runs; under Slurm the job's own time limit applies too. Default: no "
        "limit.",
    )
    row_timeout: float | None = Field(
        None,
        gt=0,
        description="Maximum seconds that a row runs in the engine; then it becomes a `timeout` error row with its "
        "text so far. Default: no limit.",
    )
    max_tokens_per_row: int | None = Field(
        None,
        ge=2,
        description="Maximum number of tokens of one row, prompt and outputs together: outputs are cut to what the "
        "prompt leaves. Default: no limit.",
    )
    incremental: bool = Field(
        False,
        description="When the same command is run again, run only new, changed and failed rows. Needs input.id.",
    )
    on_vanished: Literal["keep", "drop"] = Field(
        "keep", description="With incremental: what to do with the results of rows that the input no longer has."
    )


class JobSpec(Section):
    """One bulk inference job."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="A short name: letters, digits, dot, dash, underscore.",
    )
    model: str = Field(
        min_length=1,
        description="A hub id (with @REVISION behind it that branch, tag or commit), a local directory, or "
        "bundled:tiny.",
    )
    task: Task = Field(
        "generate",
        description="generate: the model continues prompts; the results are texts. embed: one vector for each text, in "
        "a column `embedding`. classify: a label for each text, with scores, in columns `label`, `score`, `scores`.",
    )
    input: InputSpec = Field(description="Where the rows come from.")
    prompt: PromptSpec = Field(default_factory=PromptSpec, description="How a row becomes a prompt.")
    sampling: SamplingSpec = Field(default_factory=SamplingSpec, description="How tokens are chosen.")
    embedding: EmbeddingSpec = Field(
        default_factory=EmbeddingSpec, description="With task: embed, how a text becomes a vector."
    )
    classification: ClassificationSpec = Field(
        default_factory=ClassificationSpec, description="With task: classify, how a text becomes a label and scores."
    )
    output: OutputSpec = Field(description="Where the results go.")
    engine: EngineSpec = Field(default_factory=EngineSpec, description="How the engine works.")
    slurm: SlurmSpec = Field(default_factory=SlurmSpec, description="What to ask Slurm for.")
    ray: RaySpec = Field(default_factory=RaySpec, description="How Ray places the workers.")
    run: RunSpec = Field(default_factory=RunSpec, description="Limits, workers and checkpoints of the run.")

    @property
    def generates(self) -> bool:
        """Whether a model continues its rows; else it reads them as they are, and makes something of each."""
        return self.task == "generate"

    @property
    def sampled(self) -> SamplingSpec:
        """How its rows run: as `sampling` says, or as rows do of which nothing is generated."""
        return self.sampling if self.generates else NOTHING_SAMPLED

    @property
    def of_pairs(self) -> bool:
        """Whether the model reads two texts at once."""
        return self.task == "classify" and (self.prompt.text_pair is not None or self.prompt.score_lines)

    @property
    def several(self) -> PartKind | None:
        """Of what a row may have several; None: it is one text, or one pair."""
        if self.prompt.score_lines:
            return "pair" if self.task == "classify" else "side"
        return "text" if self.prompt.text_lists else None

    def with_keys(self, **sections: Mapping[str, Any]) -> JobSpec:
        """This job with new, unchecked values for some keys: `with_keys(run={"workers": 2})`."""
        changed = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=changed)

    @model_validator(mode="after")
    def _of_one_task(self) -> JobSpec:
        names = ("prompt", "sampling", "embedding", "classification", "engine", "run")
        if (problem := problem_of_task(self.task, {name: getattr(self, name) for name in names})) is not None:
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _adapters_to_name(self) -> JobSpec:
        if self.input.adapter is not None and not self.engine.adapters:
            raise ValueError("input.adapter: there are none to name; list them in engine.adapters")
        if self.model in self.engine.adapters:
            raise ValueError(
                f"engine.adapters: {self.model!r} is the model, and rows that name it run without an adapter; give "
                "this one another name"
            )
        return self

    @model_validator(mode="after")
    def _tools_can_be_called(self) -> JobSpec:
        if not self.generates or self.prompt.tools is None:
            return self
        calls = self.sampling.tool_calls
        if calls is None and self.sampling.has_structure:
            raise ValueError("prompt.tools: a structured output has no room for calls; leave out one of the two")
        has_to_call = self.prompt.tool_choice not in (AUTO, NONE)
        if has_to_call and self.sampling.ignore_eos:
            raise ValueError("prompt.tool_choice: an output ends with its calls; leave out sampling.ignore_eos")
        if has_to_call and calls is not None and not calls.are_read:
            raise ValueError("prompt.tool_choice: what has to be called has a form; set sampling.tool_calls.format")
        return self

    @model_validator(mode="after")
    def _incremental(self) -> JobSpec:
        """Check that the rest of the job fits `run.incremental`."""
        if not self.run.incremental:
            if self.run.on_vanished == "drop":
                raise ValueError("run.on_vanished: drop needs run.incremental; without it nothing is dropped")
            return self
        if self.input.id is None:
            raise ValueError("run.incremental: needs input.id, the column that identifies a row")
        if self.output.partition_by:
            raise ValueError(
                "run.incremental: cannot be combined with output.partition_by: a row that changes folders could not be "
                "seen exactly once at every moment"
            )
        return self
