"""Offline throughput: every request at once, the time until the last one has ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bulkrun.errors import UsageError
from bulkrun.launch.bench.engine import LoadedModel, ModelChoice, load_for_bench
from bulkrun.launch.bench.measure import Measured, check_length, check_lengths, run_workload, warm_up
from bulkrun.launch.bench.workload import Lengths, Work, check_dataset, random_work, read_dataset

_DEFAULT_INPUT, _DEFAULT_OUTPUT, _DEFAULT_REQUESTS = "1024", "512", 3000


@dataclass(frozen=True, slots=True)
class Asked:
    """A file of requests, or lengths to draw them by (`512` or `100-1024`); None stands for a default."""

    dataset: Path | None = None
    input_len: str | None = None
    output_len: str | None = None
    num_requests: int | None = None
    shared_prefix: int | None = None

    def __post_init__(self) -> None:
        drawn = (self.input_len, self.output_len, self.num_requests, self.shared_prefix)
        if self.dataset is not None and any(value is not None for value in drawn):
            raise UsageError(
                "--dataset says what is asked; leave out --input-len, --output-len, --num-requests and --shared-prefix"
            )
        self._lengths()  # report bad lengths before a model is loaded
        if self.dataset is not None:
            check_dataset(self.dataset)

    @property
    def facts(self) -> dict[str, Any]:
        """The lengths as they were asked for."""
        if self.dataset is not None:
            return {"dataset": self.dataset.name}
        return {
            "input_len": self.input_len or _DEFAULT_INPUT,
            "output_len": self.output_len or _DEFAULT_OUTPUT,
            "shared_prefix": self.shared_prefix or 0,
        }

    def check(self, max_model_len: int) -> None:
        """Raises UsageError for lengths to draw that are more than so many tokens."""
        if self.dataset is not None:
            return
        input_len, output_len = self._lengths()
        fix = f"give a shorter {'--shared-prefix, ' if self.shared_prefix else ''}--input-len or --output-len"
        check_length(input_len.high + (self.shared_prefix or 0), output_len.high, max_model_len, fix=fix)

    def work(self, loaded: LoadedModel, seed: int = 0) -> list[Work]:
        """The requests; with another seed they have other tokens, of the same lengths and as many of them shared.

        Raises InputError or UsageError for what is not a request.
        """
        vocab_size = loaded.config.vocab_size
        if self.dataset is not None:
            work = read_dataset(self.dataset, vocab_size=vocab_size, encode=_encoder(loaded.tokenizer_of))
            return [Work([(token + seed) % vocab_size for token in tokens], count) for tokens, count in work]
        self.check(loaded.engine.max_model_len)
        input_len, output_len = self._lengths()
        return random_work(
            _DEFAULT_REQUESTS if self.num_requests is None else self.num_requests,
            input_len,
            output_len,
            shared_prefix=self.shared_prefix or 0,
            vocab_size=vocab_size,
            seed=seed,
        )

    def _lengths(self) -> tuple[Lengths, Lengths]:
        return (
            Lengths.parse(self.input_len or _DEFAULT_INPUT, "--input-len"),
            Lengths.parse(self.output_len or _DEFAULT_OUTPUT, "--output-len"),
        )


def bench_throughput(choice: ModelChoice, asked: Asked) -> dict[str, Any]:
    """Load, warm up, run; the names of the result are those of the script that measures vLLM."""
    return throughput_of(choice, asked, load_for_bench(choice, lambda config: asked.check(choice.model_len(config))))


def throughput_of(choice: ModelChoice, asked: Asked, loaded: LoadedModel, seed: int = 0) -> dict[str, Any]:
    """One workload on a loaded engine; another seed where an earlier one's prompts may still be in the prefix cache."""
    work = asked.work(loaded, seed)
    check_lengths(work, loaded.engine.max_model_len)
    warm_up(loaded.engine, work)
    return throughput_facts(choice, asked, loaded, run_workload(loaded.engine, work))


def throughput_facts(choice: ModelChoice, asked: Asked, loaded: LoadedModel, measured: Measured) -> dict[str, Any]:
    """What ran and how fast."""
    wall_s, n_in, n_out = measured.wall_s, measured.input_tokens, measured.output_tokens
    return {
        "engine": "bulkrun",
        **choice.facts,
        **loaded.facts,
        "batching": loaded.engine.config.batching,
        **asked.facts,
        "requests": len(measured.latencies_s),
        "load_s": round(loaded.load_s, 2),
        "wall_s": round(wall_s, 3),
        "input_tokens": n_in,
        "output_tokens": n_out,
        "output_tok_s": round(n_out / wall_s, 1),
        "total_tok_s": round((n_in + n_out) / wall_s, 1),
    }


def _encoder(tokenizer_of: Path | None) -> Any:
    if tokenizer_of is None:
        return None

    def encode(texts: list[str]) -> list[list[int]]:  # only where there are texts: token ids need no tokenizer
        from bulkrun.text.tokenizer import Tokenizer

        return Tokenizer.from_dir(tokenizer_of).encode_batch(texts, add_special_tokens=True)

    return encode
