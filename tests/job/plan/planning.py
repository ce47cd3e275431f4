"""What the planner's tests share: small inputs on disk, a tokenizer without files, and reading a whole plan back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bulkrun.data.inputs.reader import Dataset, open_input
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.plan.plan_input import PlanInput
from bulkrun.job.plan.planner import Planner
from bulkrun.job.plan.report import PlanReport
from bulkrun.job.plan.shard_file import ShardInfo, read_shard
from bulkrun.job.prompts.text_codec import TextCodec
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import Worker
from bulkrun.request import RowError

BOS = 1


class CharacterCodec:
    """One token a character (its code point), BOS before plain text, and a chat template made of brackets."""

    def __init__(self, *, chat: bool = False) -> None:
        self.has_chat_template = chat

    def chat_renderer(self, source: str | None = None, name: str = "") -> CharacterCodec:
        return self

    def render(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        continues = options.pop("continue_final_message", False)
        text = "".join(f"[{message['role']}]{_said(message['content'])}\n" for message in messages)
        told = "".join(f"[{name}={value}]" for name, value in sorted(options.items()))
        return told + text.removesuffix("\n") if continues else f"{text}{told}[assistant]"

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [[BOS] * add_special_tokens + [ord(character) for character in text] for text in texts]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], int, int] | RowError]:
        """BOS before each text, and one after both."""
        ids = [self.encode_batch(pair, add_special_tokens=True) for pair in pairs]
        return [([*first, *second, BOS], len(first) + 1, len(first) + len(second)) for first, second in ids]


def _said(content: str | Sequence[Mapping[str, str]]) -> str:
    return content if isinstance(content, str) else "|".join(part["text"] for part in content)


def job(path: Path | str, **sections: Any) -> JobSpec:
    """A job over `path` that prompts with column `text`; `sections` override."""
    document: dict[str, Any] = {
        "name": "test",
        "model": "none",
        "input": {"path": str(path)},
        "prompt": {"column": "text"},
        "sampling": {"max_tokens": 8, "temperature": 0},
        "output": {"path": "out"},
    }
    for name, section in sections.items():
        document[name] = {**document.get(name, {}), **section} if name != "prompt" else section
    return JobSpec.model_validate(document)


def write_parquet(path: Path, columns: Mapping[str, Sequence[Any]]) -> Path:
    """A Parquet file of several small row groups."""
    pq.write_table(pa.table(dict(columns)), path, row_group_size=700)
    return path


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_plan(
    root: Path, spec: JobSpec, *, max_model_len: int = 10_000, chat: bool = False, **options: Any
) -> PlanReport:
    """Plan into the run directory `root`."""
    with open_input(spec.input.path) as dataset:
        codec = CharacterCodec(chat=chat)
        return make_planner(RunDir(root), spec, dataset, codec, max_model_len, **options).plan()


def make_planner(
    run: RunDir,
    spec: JobSpec,
    dataset: Dataset,
    text: TextCodec,
    max_model_len: int,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> Planner:
    """A planner that nobody stops, of an input that nobody changes, unless options say more."""
    source = PlanInput(spec, dataset, text, max_model_len, should_stop)
    usual = {"worker": Worker.this_process(), "plan_hash": "", "check_input": lambda files: None}
    return Planner(run, source, **{**usual, **options})


def read_shards(root: Path) -> list[tuple[ShardInfo, list[dict[str, Any]]]]:
    """All shards in order, rows as dicts."""
    run = RunDir(root)
    pairs = [read_shard(run.shard(shard)) for shard in sorted(run.planned_shards())]
    return [(info, table.to_pylist()) for info, table in pairs]


def read_rows(root: Path) -> list[dict[str, Any]]:
    """All planned rows in input order."""
    return sorted((row for _, rows in read_shards(root) for row in rows), key=lambda row: row["row"])


def plan_bytes(root: Path) -> dict[str, bytes]:
    """The contents of every file of a plan (names with a dot: left unpublished by a kill)."""
    files = sorted(RunDir(root).plan.iterdir())
    return {path.name: path.read_bytes() for path in files if not path.name.startswith(".")}
