"""What a benchmark asks of an engine: prompts as token ids and how many tokens each must generate.

Everything random is seeded, so that two engines, or one engine twice, get the same requests. Torch-free.
"""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bulkrun.data.inputs.json_line import BadLine, parse_line
from bulkrun.data.inputs.lines import Line, read_lines
from bulkrun.data.types.json_types import is_unicode
from bulkrun.errors import InputError, UsageError

_FIRST_TOKEN = 100  # below are the special tokens of most vocabularies
_MAX_LINE_BYTES = 64 * 2**20
_MEDIAN_PROMPT, _LONGEST_PROMPT, _PROMPT_SIGMA = 120, 1500, 1.0
_MEDIAN_OUTPUT, _LONGEST_OUTPUT, _OUTPUT_SIGMA = 80, 600, 0.9


class Work(NamedTuple):
    """One request; it generates exactly `num_output_tokens` tokens."""

    prompt_token_ids: list[int]
    num_output_tokens: int


class Lengths(NamedTuple):
    """A length from `low` to `high`, both included, drawn uniformly."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, option: str) -> Lengths:
        """Read `512` or `100-1024`. Raises UsageError that names the option."""
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= low <= high:
            raise UsageError(f"{option} {text!r}: not a length; give a number (512) or a range (100-1024), at least 1")
        return cls(low, high)

    def draw(self, rng: random.Random) -> int:
        """One length."""
        return rng.randint(self.low, self.high) if self.high > self.low else self.low


def random_work(
    count: int, input_len: Lengths, output_len: Lengths, *, shared_prefix: int, vocab_size: int, seed: int = 0
) -> list[Work]:
    """Random tokens; every prompt starts with the same `shared_prefix` tokens, on top of its own length."""
    rng = random.Random(seed)
    head = _tokens(shared_prefix, vocab_size, rng)
    return [Work(head + _tokens(input_len.draw(rng), vocab_size, rng), output_len.draw(rng)) for _ in range(count)]


def heavy_tailed_work(count: int, *, vocab_size: int, max_model_len: int, seed: int = 0) -> list[Work]:
    """Lengths as real jobs have them: lognormal, prompts of median 120 (to 1500), outputs of median 80 (to 600).

    Taken at even quantiles, so that every size of the workload has the same shape; shorter where the model is.
    """
    rng = random.Random(seed)
    longest_prompt = min(_LONGEST_PROMPT, 2 * max_model_len // 3)
    longest_output = min(_LONGEST_OUTPUT, max_model_len // 3)
    prompts = _lognormal(count, _MEDIAN_PROMPT, _PROMPT_SIGMA, longest_prompt, rng)
    outputs = _lognormal(count, _MEDIAN_OUTPUT, _OUTPUT_SIGMA, longest_output, rng)
    return [Work(_tokens(i, vocab_size, rng), o) for i, o in zip(prompts, outputs, strict=True)]


def poisson_arrivals(count: int, rate: float, seed: int = 0) -> list[float]:
    """Seconds at which requests come that know nothing of each other, `rate` of them per second on average."""
    rng, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        arrivals.append(now)
    return arrivals


def padded(work: Sequence[Work], batch_size: int, *, prompts: bool = True, seed: int = 0) -> list[Work]:
    """The requests as an engine that pads computes them: in each batch of `batch_size`, in order, every output and,
    with `prompts`, every prompt is as long as the longest one."""
    rng, all_tokens = random.Random(seed), [token for one in work for token in one.prompt_token_ids]
    longer = []
    for first in range(0, len(work), batch_size):
        batch = work[first : first + batch_size]
        num_input = max(len(one.prompt_token_ids) for one in batch)
        num_output = max(one.num_output_tokens for one in batch)
        for one in batch:
            filler = rng.choices(all_tokens, k=num_input - len(one.prompt_token_ids)) if prompts else []
            longer.append(Work(filler + one.prompt_token_ids, num_output))
    return longer


def read_dataset(
    path: Path, *, vocab_size: int, encode: Callable[[list[str]], list[list[int]]] | None, generates: bool = True
) -> list[Work]:
    """The rows of a JSONL file: `prompt_token_ids` or `prompt`, and, where it `generates`, `max_tokens`.

    `encode` is None without a tokenizer. Raises InputError with file and line for anything that is not such a row.
    """
    rows = list(_rows(path, generates))
    texts = [(place, row["prompt"]) for place, row in rows if "prompt_token_ids" not in row]
    if texts and encode is None:
        raise InputError(f"{texts[0][0]}: a prompt as text, but a shape has no tokenizer; give prompt_token_ids")
    encoded = iter(encode([text for _, text in texts]) if texts and encode else [])
    work = []
    for place, row in rows:
        token_ids = row.get("prompt_token_ids") or next(encoded)
        if not token_ids or max(token_ids) >= vocab_size:
            raise InputError(f"{place}: the prompt is empty or has ids above the model's vocabulary of {vocab_size}")
        work.append(Work(token_ids, row["max_tokens"] if generates else 0))
    return work


def check_dataset(path: Path, *, generates: bool = True) -> None:
    """Raise InputError for what is not a dataset, whatever the model is. Takes no time beside loading one."""
    for _ in _rows(path, generates):
        pass


def _rows(path: Path, generates: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        stream = path.open("rb")
    except OSError as error:
        raise InputError(f"--dataset {path}: {error.strerror}") from None
    found = False
    with stream:
        for line in read_lines(stream, _MAX_LINE_BYTES):
            if line.data is None or line.data.strip():
                found = True
                place = f"{path}:{line.number}"
                yield place, _row(place, line, generates)
    if not found:
        raise InputError(f"--dataset {path}: no rows")


def _row(place: str, line: Line, generates: bool) -> dict[str, Any]:
    try:
        row = parse_line(line, _MAX_LINE_BYTES)
    except BadLine as problem:
        raise InputError(f"{place}: {problem}") from None
    if not _is_prompt(row) or (generates and not _is_count(row.get("max_tokens"))):
        output = ', "max_tokens": 128' if generates else ""
        raise InputError(f'{place}: a row is {{"prompt_token_ids": [1, 2] or "prompt": "text"{output}}}')
    return row


def _is_prompt(row: dict[str, Any]) -> bool:
    if "prompt_token_ids" not in row:
        return isinstance(row.get("prompt"), str) and row["prompt"] != "" and is_unicode(row["prompt"])
    ids = row["prompt_token_ids"]
    return isinstance(ids, list) and bool(ids) and all(type(one) is int and one >= 0 for one in ids)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _tokens(count: int, vocab_size: int, rng: random.Random) -> list[int]:
    return [rng.randrange(min(_FIRST_TOKEN, vocab_size // 2), vocab_size) for _ in range(count)]


def _lognormal(count: int, median: int, sigma: float, longest: int, rng: random.Random) -> list[int]:
    normal = statistics.NormalDist()
    quantiles = [normal.inv_cdf((number + 0.5) / count) for number in range(count)]
    lengths = [max(1, min(longest, round(median * math.exp(sigma * quantile)))) for quantile in quantiles]
    rng.shuffle(lengths)
    return lengths
