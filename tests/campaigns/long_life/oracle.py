"""What every row's result must be, from the documents alone: a plain dictionary that each command changes by its rule.

Where a command was cut short a row may have one of several results, absent (None) among them, until the next command
that ends shows which. Knows no run and no files; of bulkrun it asks the tokens of a prompt and the noise of a row.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from bulkrun.job.work.shard_work import row_seed
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from bulkrun.request import Request, SamplingParams, StructuredOutput
from bulkrun.text.tokenizer import Tokenizer
from tests.job.fake_engine import decode, expected_logprob, expected_tokens

ANY = "*"  # a text that the oracle does not know: of a prompt that was cut
_CHECK = "{% if text == 'zero' %}{{ 1 // 0 }}{% endif %}"
TEMPLATES = (
    f"Say {{{{ text }}}}{_CHECK}",
    f"Tell {{{{ text }}}}{_CHECK}",
    f"Rate {{{{ text }}}} {{{{ score }}}}{_CHECK}",
)
LENIENT = "Mend {{ text or id }}"  # of a retry: no row's values are wrong for it

# What an output may have to be, and what the fake model says then: not always that.
STRUCTURES: dict[str, Any] = {
    "choice": ["yes", "no"],
    "json": {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
}
_STRUCTURED = {"choice": ["yes", "no", "no", "maybe"], "json": ["{}", '{"a":1}', '{"a":1}', '{"b":1}', "{"]}

Values = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Settings:
    """Those keys of the job that results depend on."""

    template: str = TEMPLATES[0]
    max_tokens: int = 6
    temperature: float = 0.0
    seed: int = 0
    samples: int = 1
    max_model_len: int = 96
    truncate: bool = False
    per_row: bool = False
    best_of: int | None = None
    structure: str | None = None  # a key of STRUCTURES

    @property
    def salt(self) -> tuple[Any, ...]:
        """What all keys of rows have in common."""
        return self.max_tokens, self.temperature, self.seed, self.samples

    def params(self, most: int) -> SamplingParams:
        """Those of a row whose max_tokens are `most`."""
        structured = (
            StructuredOutput(self.structure, json.dumps(STRUCTURES[self.structure])) if self.structure else None
        )
        return SamplingParams(max_tokens=most, temperature=self.temperature, structured_outputs=structured)


@dataclass(frozen=True)
class Sample:
    """One output row: a text or an error's code, and the input columns beside it."""

    response: str | None
    code: str | None
    columns: Values

    def is_shown_by(self, other: Sample) -> bool:
        """Whether `other`, which was read, is this one."""
        text = self.response in (ANY, other.response) or self.code is not None
        return text and (self.code, self.columns) == (other.code, other.columns)


@dataclass(frozen=True)
class Result:
    """All samples of a row, and what its answer depends on (`key`)."""

    samples: tuple[Sample, ...]
    key: tuple[Any, ...]

    @property
    def codes(self) -> set[str]:
        return {sample.code for sample in self.samples if sample.code is not None}


Results = frozenset[Result | None]
Truth = dict[Any, Results]


@dataclass(frozen=True)
class Asker:
    """What the fake model says to rows: `failing` prompts end with a code in the engine."""

    settings: Settings
    columns: tuple[str, ...]
    named: bool = True
    failing: Mapping[str, str] = field(default_factory=dict)

    def prompt(self, row: Mapping[str, Any] | None) -> tuple[str | None, str | None]:
        """The text of a row's prompt, or the code that it is refused with."""
        settings = self.settings
        if row is None or (row["text"] is None and settings.template != LENIENT):
            return None, "bad_input"
        if row["text"] == "zero" and settings.template != LENIENT:
            return None, "bad_template"
        text = settings.template.replace(_CHECK, "").replace("{{ text or id }}", str(row["text"] or row["id"]))
        text = text.replace("{{ text }}", str(row["text"])).replace("{{ score }}", str(row["score"]))
        if not settings.truncate and len(tokens_of(text)) >= settings.max_model_len:
            return None, "too_long"
        return text, None

    def key(self, row: Mapping[str, Any] | None) -> tuple[Any, ...]:
        text, code = self.prompt(row)
        if text is None or row is None:
            return "refused", code, repr(self._values(row)), self._read(row)
        return "runs", text, self.settings.salt, self._own(row)

    def _read(self, row: Mapping[str, Any] | None) -> tuple[Any, ...]:
        """What a prompt is made of, whether it passes through or not."""
        names = ["text", *["score"] * ("score" in self.settings.template), *["most"] * self.settings.per_row]
        return tuple(None if row is None else row[name] for name in names)

    def _own(self, row: Mapping[str, Any]) -> int | None:
        """The row's own max_tokens."""
        return int(row["most"]) if self.settings.per_row and row["most"] else None

    def result(self, row: Mapping[str, Any] | None, position: int) -> Result:
        """What a run of the row ends with."""
        (text, code), values = self.prompt(row), self._values(row)
        name = str(row["id"]) if self.named and row is not None else str(position)
        most = (self._own(row) if row is not None else None) or self.settings.max_tokens
        generations = self.settings.best_of or self.settings.samples
        samples = [self._sample(text, code, values, name, number, most) for number in range(generations)]
        if self.settings.best_of is not None:
            samples.sort(key=_rank)
        return Result(tuple(samples[: self.settings.samples]), self.key(row))

    def _sample(self, text: str | None, code: str | None, values: Values, name: str, number: int, most: int) -> Sample:
        settings = self.settings
        if text is None or text in self.failing:
            return Sample(None, code or self.failing[str(text)], values)
        if settings.truncate and len(tokens_of(text)) > settings.max_model_len - most:
            return Sample(ANY, None, values)
        request = Request("", tokens_of(text), settings.params(most), row_seed(settings.seed, name, number))
        said = decode([answer(request)])[0]
        return Sample(said, None if fits(settings.structure, said) else "invalid_schema", values)

    def _values(self, row: Mapping[str, Any] | None) -> Values:
        return tuple((name, None if row is None else hashable(row.get(name))) for name in self.columns)


def hashable(value: Any) -> Any:
    """A value of a column; nested ones as text."""
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) else value


def _rank(sample: Sample) -> tuple[bool, float]:
    """The best first: the likeliest, and those that failed last."""
    return sample.code is not None, -sum(map(expected_logprob, map(ord, sample.response or "")))


def answer(request: Request) -> tuple[int, ...]:
    """What the fake model says to a request, of whatever structure."""
    if (structure := request.sampling.structured_outputs) is None:
        return expected_tokens(request)
    seed = 0 if request.sampling.greedy else request.seed
    noise = blake2b(f"{list(request.prompt_token_ids)}|{seed}".encode(), digest_size=1).digest()[0]
    texts = _STRUCTURED[structure.kind]
    return tuple(map(ord, texts[noise % len(texts)]))[: request.sampling.max_tokens]


def fits(structure: str | None, text: str) -> bool:
    """Whether a text is what was asked for."""
    return structure is None or text in (STRUCTURES["choice"] if structure == "choice" else ("{}", '{"a":1}'))


def parsed(structure: str | None, text: str, code: str | None) -> Any:
    """The typed value beside a text."""
    return {"a": json.loads(text).get("a")} if structure == "json" and code is None else None


@lru_cache(None)
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(BUNDLED_ROOT / "tiny")


@lru_cache(None)
def tokens_of(text: str) -> tuple[int, ...]:
    """The tokens of a message to the bundled model."""
    prompt = _tokenizer().chat_renderer().render([{"role": "user", "content": text}])
    return tuple(_tokenizer().encode_batch([prompt], add_special_tokens=False)[0])


def rerun(old: Result, new: Result, *, everything: bool = False) -> Result:
    """An error that ran again: the new outcome, but no error takes the place of a success by luck alone."""
    if everything or old.key != new.key:
        return new
    pairs = zip(old.samples, new.samples, strict=True)
    return Result(tuple(was if was.code is None and now.code else now for was, now in pairs), new.key)


@dataclass(frozen=True)
class Night:
    """`submit` of an incremental job: `today` is what of the input is read, `unread` whether a limit hid some."""

    asker: Asker
    today: Mapping[str, Mapping[str, Any]]
    unread: bool = False
    drop: bool = False
    everything: bool = False
    renewed: bool = False  # with other settings

    def of(self, name: str, old: Result | None) -> Result | None:
        """The result of a row after the night."""
        row = self.today.get(name)
        if row is None:
            return None if self.drop and not self.unread else old
        new = self.asker.result(row, 0)
        kind = self.kind(name, old)
        if old is None or kind in ("new", "changed"):
            return new
        return rerun(old, new) if kind == "failed" else old

    def kind(self, name: str, old: Result | None) -> str:
        """Why a row runs, in the words of the summary. A refused one that is refused alike counts as unchanged."""
        row = self.today.get(name)
        if row is None:
            return "vanished"
        if old is None:
            return "new"
        key, code = self.asker.key(row), self.asker.prompt(row)[1]
        # A key that a plan made knows nothing of what does not pass through; an answer's is of a retry, which does.
        all_failed = all(sample.code is not None for sample in old.samples)
        alike = key == old.key or (all_failed and key[:3] == old.key[:3])
        if alike and code is not None and code == min(old.codes, default=None):
            return "refused"
        if self.everything or key != old.key or (self.renewed and code is not None):
            return "changed"
        return "failed" if old.codes else "unchanged"

    def is_vague(self, name: str, old: Result | None) -> bool:
        """Whether a row that is refused again may count as changed: by its text alone, or by another message."""
        if (row := self.today.get(name)) is None or old is None or self.asker.prompt(row)[1] is None:
            return False
        return self.renewed or self.asker.key(row) != old.key

    def change(self, truth: Truth) -> Truth:
        names = dict.fromkeys([*truth, *self.today])
        return {name: frozenset(self.of(name, old) for old in truth.get(name, frozenset([None]))) for name in names}


@dataclass(frozen=True)
class Retry:
    """`retry --failed`: rows of the input (by name or position) that hold an error of `codes` run as `again` says."""

    usual: Asker
    again: Asker
    today: Mapping[Any, Mapping[str, Any] | None]
    codes: Collection[str] = ()

    def of(self, name: Any, old: Result | None) -> Result | None:
        if old is None or name not in self.today or not self.picks(old):
            return old
        position = name if isinstance(name, int) else 0
        new = replace(self.again.result(self.today[name], position), key=self.usual.key(self.today[name]))
        return rerun(old, new)

    def picks(self, old: Result) -> bool:
        return bool(old.codes & set(self.codes) if self.codes else old.codes)

    def change(self, truth: Truth) -> Truth:
        return {name: frozenset(self.of(name, old) for old in results) for name, results in truth.items()}


def either(one: Truth, other: Truth) -> Truth:
    """A command between the two was cut short."""
    gone: Results = frozenset([None])
    names = dict.fromkeys([*one, *other])
    return {name: one.get(name, gone) | other.get(name, gone) for name in names}


def shown_among(results: Iterable[Result | None], seen: tuple[Sample, ...] | None) -> Results:
    """Those of the possible results that were seen, with the texts that were not known."""
    if seen is None:
        return frozenset([None]) & frozenset(results)
    found = [result for result in results if result is not None and _fits(result, seen)]
    return frozenset(replace(result, samples=seen) for result in found)


def _fits(result: Result, seen: tuple[Sample, ...]) -> bool:
    return len(result.samples) == len(seen) and all(map(Sample.is_shown_by, result.samples, seen))
