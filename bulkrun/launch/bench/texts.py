"""Throughput of models that embed or classify: every text at once, the time until the last one has its numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bulkrun.errors import UsageError
from bulkrun.job.jobfile.load import override_job
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.launch.bench.engine import machine_facts, name_of
from bulkrun.launch.bench.measure import bar
from bulkrun.launch.bench.workload import Lengths, check_dataset, random_work, read_dataset
from bulkrun.launch.engine import load_embedding_engine
from bulkrun.launch.model_list import task_of_texts
from bulkrun.launch.preparation.adapter import adapter_dir, tokenizer_dir
from bulkrun.launch.preparation.models_of_texts import with_model_of_texts
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from bulkrun.models.config.find_model import resolve_model
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.request import Request, SamplingParams
from bulkrun.settings import Task
from bulkrun.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from bulkrun.engine.embedding_engine import EmbeddingEngine

_DEFAULT_LEN, _DEFAULT_REQUESTS, _WARM_UP_TEXTS = "128", 3000, 64
_SECTIONS = ("engine", "embedding", "classification")
_BEFORE_TEXTS = ("embedding.prompt", "embedding.prompt_name")
_NO_OUTPUT = Lengths(1, 1)


@dataclass(frozen=True, slots=True)
class TextModelChoice:
    """Which model, what it makes (None: what it was made for), and how it is loaded. Raises UsageError."""

    model: str
    task: Task | None
    engine: dict[str, Any]
    overrides: Sequence[str] = ()

    def __post_init__(self) -> None:
        for override in self.overrides:
            if override.partition(".")[0] not in _SECTIONS:
                raise UsageError(f"--set {override}: this benchmark takes keys of {', '.join(_SECTIONS)} only")

    @property
    def keys(self) -> list[str]:
        """Those that are overridden."""
        return [override.partition("=")[0].strip() for override in self.overrides]

    def job(self) -> JobSpec:
        """The job that would load it so. Raises JobFileError for settings that no job file could have."""
        task = self.task or task_of_texts(resolve_model(self.model, bundled_root=BUNDLED_ROOT, task="embed"))
        places = {"input": {"path": "-"}, "output": {"path": "-"}}
        return override_job({"name": "bench", "model": self.model, "task": task, **places, "engine": self.engine},
                            self.overrides)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AskedTexts:
    """A file of texts, or lengths to draw them by; None stands for a default."""

    dataset: Path | None = None
    input_len: str | None = None
    num_requests: int | None = None

    def __post_init__(self) -> None:
        if self.dataset is None:
            Lengths.parse(self.input_len or _DEFAULT_LEN, "--input-len")  # said before a model is loaded
        elif self.input_len is not None or self.num_requests is not None:
            raise UsageError("--dataset says what is asked; leave out --input-len and --num-requests")
        else:
            check_dataset(self.dataset, generates=False)

    @property
    def facts(self) -> dict[str, Any]:
        """The lengths as they were asked for."""
        return {"input_len": self.input_len or _DEFAULT_LEN} if self.dataset is None else {"dataset": self.dataset.name}

    def texts(self, spec: JobSpec, vocab_size: int, tokenizer_of: Path) -> list[list[int]]:
        """The token ids of each. Raises InputError for what is no text, UsageError for one that is too long."""
        max_model_len, before = spec.engine.max_model_len, spec.embedding.prompt or ""
        assert max_model_len is not None, "the model completes the job"
        if self.dataset is None:
            lengths = Lengths.parse(self.input_len or _DEFAULT_LEN, "--input-len")
            _check_length(lengths.high, max_model_len)
            count = self.num_requests or _DEFAULT_REQUESTS
            work = random_work(count, lengths, _NO_OUTPUT, shared_prefix=0, vocab_size=vocab_size)
        else:

            def encode(texts: list[str]) -> list[list[int]]:  # only where there are texts: ids need no tokenizer
                tokenizer = Tokenizer.from_dir(tokenizer_of)
                return tokenizer.encode_batch([before + text for text in texts], add_special_tokens=True)

            work = read_dataset(self.dataset, vocab_size=vocab_size, encode=encode, generates=False)
            _check_length(max(len(one.prompt_token_ids) for one in work), max_model_len)
        return [one.prompt_token_ids for one in work]


def bench_texts(choice: TextModelChoice, asked: AskedTexts) -> dict[str, Any]:
    """Load, warm up, run. Raises ModelError for a model that cannot be used, UsageError for what cannot work."""
    if asked.dataset is None and (put := [key for key in _BEFORE_TEXTS if key in choice.keys]):
        raise UsageError(f"--set {put[0]}: goes before texts, and there are random tokens; give texts with --dataset")
    job = choice.job()
    adapter = adapter_dir(job.engine)
    spec, model_dir, config = with_model_of_texts(job, adapter, BUNDLED_ROOT)
    texts = asked.texts(spec, config.vocab_size, tokenizer_dir(model_dir, adapter))
    engine, load_s = _loaded(spec, model_dir, adapter)
    _run(engine, texts[:_WARM_UP_TEXTS], "warming up")
    wall_s, num_tokens = _run(engine, texts, "measuring"), sum(map(len, texts))
    return {
        "engine": "bulkrun",
        "model": choice.model,
        "task": spec.task,
        **_engine_facts(spec, config, engine),
        **asked.facts,
        "requests": len(texts),
        "load_s": round(load_s, 2),
        "wall_s": round(wall_s, 3),
        "input_tokens": num_tokens,
        "texts_s": round(len(texts) / wall_s, 1),
        "input_tok_s": round(num_tokens / wall_s, 1),
    }


def _check_length(num_tokens: int, max_model_len: int) -> None:
    if num_tokens > max_model_len:
        raise UsageError(
            f"a text has {num_tokens} tokens, and the model takes {max_model_len}; give shorter ones, or a higher "
            "--max-model-len where the model has more positions"
        )


def _loaded(spec: JobSpec, model_dir: Path, adapter: Path | None) -> tuple[EmbeddingEngine, float]:
    """The engine, and how long it took, torch's import not counted."""
    from bulkrun.engine.embedding_engine import EmbeddingEngine

    made = spec.embedding.to_args() if spec.task == "embed" else spec.classification.to_args()
    start = time.perf_counter()
    engine = load_embedding_engine(model_dir, spec.engine, made, adapter)
    load_s = time.perf_counter() - start
    assert isinstance(engine, EmbeddingEngine)
    return engine, load_s


def _run(engine: EmbeddingEngine, texts: Sequence[Sequence[int]], what: str) -> float:
    """Seconds until the last text has its numbers."""
    with bar(what, len(texts), "text") as shown:
        start = time.perf_counter()
        for number, token_ids in enumerate(texts):
            engine.add_request(Request(str(number), token_ids, SamplingParams(max_tokens=1, temperature=0), seed=0))
        while engine.has_unfinished():
            ended = engine.step()
            for done in ended:
                assert done.error is None, f"text {done.request_id}: {done.error}"
            shown.update(len(ended))
        return time.perf_counter() - start


def _engine_facts(spec: JobSpec, config: ModelConfig, engine: EmbeddingEngine) -> dict[str, Any]:
    """What ran, and on what."""
    from bulkrun.models.loading.kept_quantized import kept_quantization

    sizes, asked = engine.sizes, spec.engine
    kept = asked.quantization or kept_quantization(config, sizes.device, deterministic=asked.deterministic)
    return {
        **machine_facts(sizes.device),
        "load_format": asked.load_format,
        "deterministic": asked.deterministic,
        "async_scheduling": sizes.async_scheduling,
        "dtype": name_of(engine.dtype),
        **({} if kept is None else {"quantization": kept}),
        **_made(spec),
    }


def _made(spec: JobSpec) -> dict[str, Any]:
    """What a text becomes."""
    if spec.task == "classify":
        return {"labels": len(spec.classification.labels or ()), "activation": spec.classification.activation}
    return {"dimensions": spec.embedding.dimensions, "pooling": spec.embedding.pooling}
