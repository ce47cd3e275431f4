"""A job file's promises checked against the world, before anything heavy is loaded: model, input, prompt.

Loads no torch. Knows how facts become a run's record; knows no engine.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa

import bulkrun
from bulkrun.data.inputs.files import InputFile
from bulkrun.data.inputs.reader import Dataset, open_input
from bulkrun.data.inputs.subset import open_subset
from bulkrun.data.results.parts import read_part_schema
from bulkrun.data.storage.durable import encode_json
from bulkrun.errors import JobFileError, ResumeError, UsageError
from bulkrun.job.jobfile.sampling import SamplingSpec
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.plan.result_columns import result_fields
from bulkrun.job.prompts.detect import json_text_columns, needed_keys
from bulkrun.job.prompts.named_columns import named_columns
from bulkrun.job.store.difference_lines import difference_lines
from bulkrun.job.store.fingerprint import ADAPTERS, differences
from bulkrun.job.store.places import refuse_odd_place, run_dir_of
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_gate import open_run
from bulkrun.job.store.run_record import RunRecord, new_record, read_record, record_document
from bulkrun.launch.preparation.adapter import adapter_dir, adapter_dirs, tokenizer_dir
from bulkrun.launch.preparation.adapter_texts import check_tokenizers
from bulkrun.launch.preparation.input_files import (
    check_still_there,
    check_unchanged,
    facts_of,
    find_input,
    known_files,
    named_others,
)
from bulkrun.launch.preparation.models_of_texts import with_model_of_texts
from bulkrun.launch.preparation.origin import model_facts, prompt_facts
from bulkrun.launch.preparation.pool import refuse_small_pool
from bulkrun.launch.preparation.sampling_defaults import with_defaults
from bulkrun.launch.preparation.structured_output import (
    check_bad_words,
    check_thinking,
    warn_of_channels,
    with_markers,
    with_schema,
)
from bulkrun.launch.preparation.tool_calling import check_calls, warn_of_hidden_tools, with_tool_format
from bulkrun.launch.preparation.variables import refuse_variables
from bulkrun.models.config.adapter_fit import check_adapter
from bulkrun.models.config.find_model import resolve_model
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.text.tokenizer import Tokenizer

BUNDLED_ROOT = Path(bulkrun.__file__).parent / "bundled"
_VERSIONS_OF = ("torch", "transformers", "tokenizers", "pyarrow", "duckdb")


@dataclass(frozen=True)
class PreparedJob:
    """A job whose model and input are there. `spec` is resolved: what the model's own files say is filled in.

    `adapters` are directories by names; "" is that of an adapter that all rows have.
    """

    spec: JobSpec
    model_dir: Path
    adapters: Mapping[str, Path]
    model: ModelConfig
    tokenizer: Tokenizer
    files: list[InputFile]

    @property
    def run(self) -> RunDir:
        """The directory of its run, which may not be there yet."""
        return run_dir_of(self.spec.output.path, self.spec.output.state)

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together that the plan allows."""
        return self.model.model_len(self.spec.engine.max_model_len)

    def open_dataset(self, snapshot: Path | None = None) -> Dataset:
        """The input's rows. With `input.sql` they are fixed in `snapshot` once, or for this reading only.

        Raises InputError for an input without a row that can be read.
        """
        given = self.spec.input
        if self.run.is_staged:
            return open_subset(self.run.subset)
        dataset = open_input(
            given.path,
            sql=given.sql,
            sql_snapshot=snapshot,
            max_row_bytes=given.max_row_bytes,
            delimiter=given.delimiter,
            kept_as_text=partial(json_text_columns, self.spec),
            known_types={field.name: field.type for field in self._carried_fields()},
            needed_keys=needed_keys(self.spec),
        )
        dataset.refuse_unreadable()
        return dataset.of_no_rows(self._expected_schema(dataset)) if dataset.is_void else dataset

    def _expected_schema(self, dataset: Dataset) -> pa.Schema:
        """The columns of an input that does not tell: those of the results that go on, then what the job names."""
        fields = [*dataset.schema, *self._carried_fields()]
        named = named_columns(self.spec, [field.name for field in fields])
        fields += [pa.field(name, pa.string()) for name in named]
        return pa.schema(list({field.name: field for field in reversed(fields)}.values())[::-1])

    def _carried_fields(self) -> list[pa.Field]:
        """The input's columns in the results that an incremental run has; none where there are no results yet."""
        if not self.spec.run.incremental or not (parts := self.run.parts()):
            return []
        added = {field.name for field in result_fields(self.spec)}
        return [field for field in read_part_schema(parts[min(parts)]) if field.name not in added]

    def check_input(self, record: RunRecord) -> None:
        """Look at the files again that rows and prompts are made of.

        Raises ResumeError when they are no longer those that the run was entered with.
        """
        check_unchanged(self.spec, self.files, known_files(record))
        if record.prompt_facts and prompt_facts(self.spec.prompt) != record.prompt_facts:
            raise ResumeError(
                f"prompt.chat_template: {self.spec.prompt.chat_template} changed since the run began; bring it back "
                "and run the same command again, or start over with --fresh"
            )

    def check_model(self, record: RunRecord, adapter: str | None = None) -> None:
        """Look at the model and its adapters: a worker may start, or load again, long after the run was entered.

        `adapter`: of several the one that is loaded, which is looked at alone. Raises ResumeError when they are no
        longer those of the run, whose rows would be of two models.
        """
        names = self.adapters.keys() if adapter is None else self.adapters.keys() & {adapter}
        if changed := differences(known_model(record, names), {"model": self._model_facts(names)}):
            lines = [f"{self.run.root}: the model is no longer the one that the run began with:"]
            lines += difference_lines(changed)
            anew = "retry with --discard" if self.run.is_staged else "--fresh"
            lines.append(f"Bring it back and run the same command again, or start over: {anew}.")
            raise ResumeError("\n".join(lines))

    def check_files(self, record: RunRecord, numbers: range) -> None:
        """Refuse files of `numbers` that are not as they were found: asked for every window of a plan."""
        some = slice(numbers.start, numbers.stop)
        check_still_there(self.files[some], known_files(record)[some])

    def enter(self, wanted: RunRecord, *, resume_anyway: bool) -> RunRecord:
        """Enter the run of `wanted`. Raises what `open_run` raises; a ResumeError names the files that are others.

        Raises JobFileError for an output.path where no job's results can be.
        """
        refuse_odd_place(self.run)
        try:
            return open_run(self.run, wanted, resume_anyway=resume_anyway)
        except ResumeError as error:
            if not self.run.run_json.exists():  # a bucket whose run has its state elsewhere
                raise
            raise ResumeError(f"{error}{named_others(self.files, known_files(read_record(self.run)))}") from None

    def record(self, job_file: Path | None, overrides: Sequence[str] = ()) -> RunRecord:
        """What a new run of this job would be recorded as; file and `--set` values are those of the command."""
        made = new_record(
            self.spec.model_dump(mode="json"),
            input_facts={"files": facts_of(self.files)},
            model_facts=self._model_facts(self.adapters.keys()),
            prompt_facts=prompt_facts(self.spec.prompt),
            versions=versions(),
            job_file=str(job_file) if job_file else None,
            overrides=overrides,
        )
        _refuse_odd_names(made)
        return made

    def _model_facts(self, names: Collection[str]) -> dict[str, Any]:
        """With those of the adapters of these names."""
        return model_facts(self.spec, self.model_dir, {name: self.adapters[name] for name in names})


def prepare(spec: JobSpec, *, now: Callable[[], datetime] = datetime.now, warns: bool = True) -> PreparedJob:
    """Resolve the model, its defaults and the input files.

    `now` is the clock of chat templates that write the date: a run's plan must not change at midnight. `warns`: of what
    the results may not be meant to hold; False where that was said when the run began. Raises
    JobFileError, UsageError, ModelError or InputError that says what is wrong or missing and how to fix it.
    """
    refuse_variables(spec)
    spec = with_schema(spec)
    files = [] if run_dir_of(spec.output.path, spec.output.state).is_staged else find_input(spec)
    return _of_outputs(spec, files, now, warns=warns) if spec.generates else _of_texts(spec, files, now)


def _of_texts(spec: JobSpec, files: list[InputFile], now: Callable[[], datetime]) -> PreparedJob:
    """A job that embeds or classifies."""
    adapter = adapter_dir(spec.engine)
    spec, model_dir, model = with_model_of_texts(spec, adapter, BUNDLED_ROOT)
    check_adapter(adapter, model_dir)
    texts = tokenizer_dir(model_dir, adapter)
    tokenizer = Tokenizer.from_dir(texts, now=now, of_pairs=spec.of_pairs)
    return PreparedJob(spec, model_dir, {} if adapter is None else {"": adapter}, model, tokenizer, files)


def _of_outputs(spec: JobSpec, files: list[InputFile], now: Callable[[], datetime], *, warns: bool) -> PreparedJob:
    """A job that generates."""
    adapters = adapter_dirs(spec.engine)
    model_dir = resolve_model(spec.model, bundled_root=BUNDLED_ROOT)
    model = ModelConfig.from_dir(model_dir)
    for adapter in adapters.values():
        check_adapter(adapter, model_dir)
    tokenizer = Tokenizer.from_dir(tokenizer_dir(model_dir, adapters.get("")), now=now)
    check_tokenizers(tokenizer, adapters, has_template=spec.prompt.chat_template != "auto")
    spec = with_markers(with_tool_format(spec, tokenizer), model.architecture)
    if warns:
        warn_of_channels(spec, model.architecture)
        warn_of_hidden_tools(spec, tokenizer)
    check_thinking(spec, tokenizer)
    check_bad_words(spec, tokenizer)
    check_calls(spec)
    model.model_len(spec.engine.max_model_len)
    refuse_small_pool(spec.engine, model)
    own = tokenizer.vocab_size if adapters else 0  # it may have grown with an adapter
    _check_token_ids(spec.sampling, max(model.vocab_size, own))
    return PreparedJob(with_defaults(spec, model_dir), model_dir, adapters, model, tokenizer, files)


def known_model(record: RunRecord, adapters: Collection[str]) -> dict[str, dict[str, Any]]:
    """The facts of the model that a run was entered with, wherever it lies, and of these of its several adapters; a
    staged run has them one level deeper."""
    known = record.identity["model"]
    facts = {**known, **known.get("model", {})}
    if ADAPTERS in facts:
        facts[ADAPTERS] = {name: fact for name, fact in facts[ADAPTERS].items() if name in adapters}
    return {"model": {key: value for key, value in facts.items() if key not in ("name", "model")}}


def prepare_as_of(record: RunRecord, spec: JobSpec, root: Path | None = None) -> PreparedJob:
    """Prepare a job with the clock of a run's beginning: a prompt that holds the date must not change overnight.

    `root` is where the run is found now, if not under the path of its job.
    """
    began = record.began
    if root is not None:
        spec = spec.with_keys(output={"path": str(root)})
    return prepare(spec, now=lambda: began, warns=False)


def _check_token_ids(sampling: SamplingSpec, vocab_size: int) -> None:
    """Raise JobFileError for an id that the model does not have: the engine would refuse every row for it."""
    for key in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        for token_id in getattr(sampling, key) or ():
            if not 0 <= token_id < vocab_size:
                what = f"{token_id} is not a token id of the model; ids go from 0 to {vocab_size - 1}"
                raise JobFileError([f"sampling.{key}: {what}"])


def _refuse_odd_names(record: RunRecord) -> None:
    """Raise UsageError for a record that JSON cannot hold, before anything is made for it."""
    try:
        encode_json(record_document(record))
    except UnicodeEncodeError as error:
        shown = ascii(error.object[max(0, error.start - 40) : error.end])
        raise UsageError(f"{shown}: a file name or value that is not UTF-8; rename the file, or write it so") from None


def versions() -> dict[str, str]:
    """What made the results: bulkrun, Python and the packages that matter."""
    packages = {name: version(name) for name in _VERSIONS_OF}
    return {"bulkrun": bulkrun.__version__, "python": platform.python_version(), **packages}
