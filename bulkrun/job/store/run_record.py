"""`.bulkrun/run.json`: which job a directory holds the run of. How a run is entered: `run_gate`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta, timezone
from types import MappingProxyType
from typing import Any

from bulkrun.data.storage.documents import from_document
from bulkrun.data.storage.durable import read_json
from bulkrun.data.storage.remote import is_remote
from bulkrun.errors import RunError
from bulkrun.job.store.events import utc_now
from bulkrun.job.store.fingerprint import (
    CHAT_TEMPLATE,
    TENSORS,
    Facts,
    KeySalt,
    fingerprint,
    identity_of,
    key_salt,
    task_of,
)
from bulkrun.job.store.object_store import ObjectPrefix
from bulkrun.job.store.replaced import replaced_error
from bulkrun.job.store.run_dir import RunDir
from bulkrun.settings import Task

FORMAT = 2
_NO_FACTS: Facts = MappingProxyType({})


@dataclass(frozen=True)
class RunRecord:
    """A run's birth certificate. `job` is the resolved spec as plain data, `identity` what results depend on."""

    run_id: str
    created: str
    job: dict[str, Any]
    identity: dict[str, dict[str, Any]]
    job_file: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT
    overrides: list[str] = field(default_factory=list)  # the --set values of the command
    utc_offset_s: int | None = None  # of local time where it began; None: an earlier version did not say

    @property
    def fingerprints(self) -> dict[str, str]:
        """A hash of each section of what decides the results: says where a job differs."""
        return {section: fingerprint(values) for section, values in self.identity.items()}

    @property
    def began(self) -> datetime:
        """When it began, by the clock on the wall there: prompts that hold the date go by it, wherever it goes on."""
        there = None if self.utc_offset_s is None else timezone(timedelta(seconds=self.utc_offset_s))
        return datetime.fromisoformat(self.created).astimezone(there)

    def as_old_as(self, other: RunRecord) -> RunRecord:
        """The same, begun when and where `other` was."""
        return replace(self, created=other.created, utc_offset_s=other.utc_offset_s)

    @property
    def prompt_facts(self) -> Facts:
        """What the files said that prompts are made with."""
        prompt = self.identity["prompt"]
        return {CHAT_TEMPLATE: prompt[CHAT_TEMPLATE]} if CHAT_TEMPLATE in prompt else {}

    @property
    def plan_hash(self) -> str:
        """One hash over everything that decides the plan and the results."""
        return fingerprint(self.identity)

    @property
    def samples(self) -> int:
        """Output rows of each input row."""
        return int(self.job["sampling"]["n"])

    @property
    def task(self) -> Task:
        """What it makes of its rows."""
        return task_of(self.job)

    @property
    def has_random_weights(self) -> bool:
        """Whether its texts are noise."""
        return bool(self.job["engine"].get("load_format") == "dummy")

    @property
    def key_salt(self) -> KeySalt | None:
        """What the row keys of an incremental run have in common; None where rows have no keys."""
        return key_salt(self.identity) if self.job["run"].get("incremental") else None

    def as_known_to(self, earlier: RunRecord) -> RunRecord:
        """Without what an earlier bulkrun did not ask of the model: the keys of `earlier`'s rows were made without."""
        model = self.identity["model"]
        known = {name: fact for name, fact in model.items() if name != TENSORS or TENSORS in earlier.identity["model"]}
        return replace(self, identity={**self.identity, "model": known})

    @property
    def bucket_url(self) -> str | None:
        """Where the results go beside the run's directory; None for most runs."""
        url = str(self.job["output"]["path"]).rstrip("/")
        return url if is_remote(url) else None

    def bucket(self) -> ObjectPrefix | None:
        """The objects there. Raises RunError where s3fs is not installed."""
        return ObjectPrefix(self.bucket_url) if self.bucket_url else None

    def id_column(self, columns: Sequence[str]) -> str | None:
        """The one of the results' columns that names rows: the job's own, or that of an OpenAI batch."""
        wanted = self.job["input"]["id"] or "custom_id"
        return wanted if wanted in columns else None


def new_record(
    job: Mapping[str, Any],
    *,
    input_facts: Facts,
    model_facts: Facts,
    prompt_facts: Facts = _NO_FACTS,
    versions: Mapping[str, str],
    job_file: str | None = None,
    overrides: Sequence[str] = (),
) -> RunRecord:
    """The record a new run of this resolved job (`JobSpec.model_dump()`) would get."""
    identity = identity_of(job, input_facts, model_facts, prompt_facts)
    made = RunRecord(secrets.token_hex(8), utc_now(), dict(job), identity, job_file, dict(versions))
    return replace(made, overrides=list(overrides), utc_offset_s=_utc_offset_s(made.created))


def _utc_offset_s(instant: str) -> int:
    """That of local time at an instant."""
    offset = datetime.fromisoformat(instant).astimezone().utcoffset()
    assert offset is not None, "it has a time zone"
    return round(offset.total_seconds())


def read_record(run: RunDir) -> RunRecord:
    """The record of an existing run. Raises RunError when the directory is no run, or of another bulkrun."""
    document = read_json(run.run_json)
    if document is None:
        raise RunError(f"{run.root}: not a run: it has no .bulkrun/run.json; RUN is the output.path of a job")
    found = document.pop("format", None)
    document.pop("fingerprints", None)
    if found != FORMAT:
        raise RunError(
            f"{run.run_json}: has format {found}, this bulkrun knows {FORMAT}; use the version it was made with, or "
            "start over with --fresh, which moves it aside"
        )
    return from_document(RunRecord, document, run.run_json, "a run record")


def read_own_record(run: RunDir, run_id: str) -> RunRecord:
    """The record of a run for a process that was started for it. Raises RunError when the directory holds another."""
    if not run.run_json.exists():
        raise replaced_error(run)
    record = read_record(run)
    if record.run_id != run_id:
        raise replaced_error(run)
    return record


def record_document(record: RunRecord) -> dict[str, Any]:
    """The contents of run.json."""
    return {**asdict(record), "fingerprints": record.fingerprints}
