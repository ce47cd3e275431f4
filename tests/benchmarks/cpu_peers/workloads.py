"""The workloads the CPU engines are compared on: real text as token ids, lengths as real jobs have them, all seeded.

| name | requests | prompt tokens (median, most) | output tokens (median, most) |
|---|---|---|---|
| small | 64 | 128, 1500 | 80, 600 |
| medium | 256 | 128, 1500 | 80, 600 |
| shared-prefix | 64 | 650, 800, of which the first 600 are everybody's | 8 each |
| short-output | 128 | 128, 1500 | 1 to 8 |
| structured | 64 | 128, 1500 | what an invoice in JSON takes (`invoice.py`), at most 256 |
| long-prompt | 16 | 2500, 3500 | 60, 200 |
| agree | 12 | 80, 384 | 32 each: for the check of the tokens, never timed |

Prompts are chat messages, 8 tokens of which are the template's.
"""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer

from tests.benchmarks.checkpoints import corpus
from tests.benchmarks.work import Work, lognormal_lengths, write_work

STRUCTURED = "structured"
TIMED = ("small", "medium", "shared-prefix", "short-output", "long-prompt", STRUCTURED)
_LONGEST_DOCUMENT = 256
_PREFIX_TOKENS = 600


class Text:
    """Stretches of real text as token ids: user messages of an exact length, each from another place."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._rng = random.Random(seed)
        self._ids = [token for page in corpus() for token in tokenizer.encode(page, add_special_tokens=False).ids]
        self._head = tokenizer.encode("<|im_start|>user\n", add_special_tokens=False).ids
        self._tail = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False).ids

    def message(self, num_tokens: int, prefix: list[int] | None = None) -> list[int]:
        """A prompt of `num_tokens`, the template included, whose text starts with `prefix`."""
        prefix = prefix or []
        body = self.stretch(num_tokens - len(prefix) - len(self._head) - len(self._tail))
        return self._head + prefix + body + self._tail

    def stretch(self, num_tokens: int) -> list[int]:
        """So many tokens of running text."""
        start = self._rng.randrange(len(self._ids) - num_tokens)
        return self._ids[start : start + num_tokens]


def make_workload(name: str, tokenizer: Tokenizer) -> list[Work]:
    """The requests of one workload, the same on every call."""
    rng, text = random.Random(0), Text(tokenizer, seed=1)
    if name == "shared-prefix":
        prefix = text.stretch(_PREFIX_TOKENS)
        own = lognormal_lengths(64, median=50, sigma=0.6, longest=200, shortest=12, rng=rng)
        return [Work(text.message(_PREFIX_TOKENS + length, prefix), 8) for length in own]
    if name == "agree":
        prompts = lognormal_lengths(12, median=80, sigma=0.9, longest=384, shortest=16, rng=rng)
        return [Work(text.message(length), 32) for length in prompts]
    if name == "long-prompt":
        prompts = lognormal_lengths(16, median=2500, sigma=0.3, longest=3500, rng=rng)
        outputs = lognormal_lengths(16, median=60, sigma=0.6, longest=200, rng=rng)
        return [Work(text.message(prompt), output) for prompt, output in zip(prompts, outputs, strict=True)]
    count = {"small": 64, "medium": 256, "short-output": 128, STRUCTURED: 64}[name]
    prompts = [min(1500, 8 + n) for n in lognormal_lengths(count, median=120, sigma=1.0, longest=1500, rng=rng)]
    outputs = lognormal_lengths(count, median=80, sigma=0.9, longest=600, rng=rng)
    if name == "short-output":
        outputs = [rng.randint(1, 8) for _ in range(count)]
    if name == STRUCTURED:
        outputs = [_LONGEST_DOCUMENT] * count
    return [Work(text.message(prompt), output) for prompt, output in zip(prompts, outputs, strict=True)]


def write_workloads(model_dir: Path, folder: Path) -> None:
    """Every workload for the model's tokenizer, as `<name>.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    for name in (*TIMED, "agree"):
        write_work(folder / f"{name}.jsonl", make_workload(name, tokenizer))
