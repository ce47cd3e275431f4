"""The Python API's `Classifier`: labels of texts. Importing this loads no torch; making one does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any, Unpack, overload

from bulkrun.data.results.schema import SCORES
from bulkrun.errors import shown_value
from bulkrun.job.prompts.fit import OnTooLong, PromptFrame
from bulkrun.job.work.vectors import scored, vector_of, vector_or_error
from bulkrun.launch.engine import load_embedding_engine
from bulkrun.launch.preparation.adapter import adapter_dir, tokenizer_dir
from bulkrun.launch.preparation.classification import find_classifier, with_classification
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from bulkrun.launch.python_api.calls import EngineSettings
from bulkrun.launch.python_api.prompt_stream import Asked, Ended
from bulkrun.launch.python_api.prompts import Ask, ask_pair, conversation_asker
from bulkrun.launch.python_api.text_model import TextModel, job_of_texts
from bulkrun.request import RowError
from bulkrun.settings import ScoreActivation
from bulkrun.text.pairs import EncodedPair
from bulkrun.text.tokenizer import Tokenizer

Pair = tuple[str, str]
Conversation = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """What became of one text, the `index`-th of its call. `error` is None if and only if there are `scores`."""

    index: int
    prompt: str | None  # the text as it was classified, None where nothing usable was given
    label: str | None  # the likeliest; None of a model with one output
    score: float | None  # that label's, or the one there is
    scores: Mapping[str, float] | None  # by label, in the model's order
    error: RowError | None = None
    num_prompt_tokens: int = 0
    text_pair: str | None = None  # the second text, of a pair


class Classifier(TextModel[ClassificationOutput]):
    """A sequence classification model. Several threads may call it and share its steps.

    `model` is a hub id or a directory. The other settings are those of a job file's sections `classification` and
    `engine`; what is not set is as the model's own files say. `on_too_long`: a text of more tokens than `max_model_len`
    is an output with an error, or loses its start (truncate_left) or end (truncate_right).

    `pairs`: the model reads two texts at a time (a reranker's query and document, an NLI model's premise and
    hypothesis), and each that is given is a tuple (text, text_pair). Special tokens written in them are plain text, and
    of a pair that is too long the second text is cut. Raises ModelError for a model that cannot be used, UsageError for
    settings that cannot work.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        activation: ScoreActivation | None = None,
        labels: Sequence[str] | None = None,
        on_too_long: OnTooLong = "error",
        pairs: bool = False,
        **engine: Unpack[EngineSettings],
    ) -> None:
        made = {"activation": activation, "labels": labels}
        run = {"on_too_long": on_too_long}
        asked = job_of_texts(model, "classify", classification=made, engine=engine, run=run)
        adapter = adapter_dir(asked.engine)
        model_dir, config = find_classifier(asked.model, adapter, BUNDLED_ROOT)
        spec = with_classification(asked, config)
        self.labels = tuple(spec.classification.labels or ())
        self._of_pairs = pairs
        tokenizer = Tokenizer.from_dir(tokenizer_dir(model_dir, adapter), of_pairs=pairs)
        self._ask_conversation: Ask | None = None
        if tokenizer.has_chat_template and not pairs:
            self._ask_conversation = conversation_asker(tokenizer, {}, asks=False)
        args = spec.classification.to_args(tokenizer.pair_separator)
        loaded = load_embedding_engine(model_dir, spec.engine, args, adapter)
        super().__init__(spec, tokenizer, loaded, _ScoreOutputs(self.labels))

    @overload  # a list is an iterable too: the first overload that fits says what comes
    def classify(  # type: ignore[overload-overlap]
        self, texts: list[str] | list[Pair] | list[Conversation] | str, *, use_tqdm: bool = False
    ) -> list[ClassificationOutput]: ...

    @overload
    def classify(
        self,
        texts: Iterable[str] | Iterable[Pair] | Iterable[Conversation],
        *,
        ordered: bool = True,
        use_tqdm: bool = False,
    ) -> Iterator[ClassificationOutput]: ...

    def classify(
        self,
        texts: Iterable[str] | Iterable[Pair] | Iterable[Conversation] | str,
        *,
        ordered: bool = True,
        use_tqdm: bool = False,
    ) -> list[ClassificationOutput] | Iterator[ClassificationOutput]:
        """The labels of texts, or, of a classifier of `pairs`, of tuples (text, text_pair), with their scores.

        A conversation, a list of {role, content} that ends with the answer to be judged, goes through the model's chat
        template (reward models).

        A list gives a list of outputs in its order. Any other iterable gives an iterator, which reads at most
        2 x `max_num_seqs` texts ahead of what it has handed out; with `ordered=False` outputs come as they end.
        `use_tqdm` counts them on a bar, in a terminal.
        """
        return self._outputs(texts, ordered=ordered, use_tqdm=use_tqdm)

    def _ask(self, text: Any) -> Asked:
        if self._of_pairs:
            return ask_pair(text, self._sampling)
        if isinstance(text, list) and self._ask_conversation is not None:
            return self._ask_conversation(text, self._sampling, 0)._replace(has_special_tokens=True)
        if isinstance(text, tuple | list):
            need = "the model has no chat template" if isinstance(text, list) else "pairs are for pairs=True"
            error = RowError("bad_input", f"{shown_value(text)} is not a text, and {need}")
            return Asked(None, None, self._sampling, 0, error)
        return super()._ask(text)

    def _encode(self, asked: list[Asked]) -> Sequence[Sequence[int] | RowError]:
        if not self._of_pairs:
            return super()._encode(asked)
        made = self._tokenizer.encode_pairs([(one.text or "", one.text_pair or "") for one in asked])
        return [pair if isinstance(pair, RowError) else self._fitted_pair(pair) for pair in made]

    def _fitted_pair(self, pair: EncodedPair) -> list[int] | RowError:
        """The ids, of which the second text's are cut if that was asked for, or why they do not fit."""
        return self._fitter.fit(pair.token_ids, 0, partial(PromptFrame.around_second, *pair))


class _ScoreOutputs:
    """Reads what an engine that classifies made."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels

    def refused(self, index: int, asked: Asked) -> ClassificationOutput:
        """The output of a text that cannot be classified."""
        return ClassificationOutput(index, asked.text, None, None, None, asked.error, text_pair=asked.text_pair)

    def read(self, ended: Sequence[Ended]) -> list[ClassificationOutput]:
        """The outputs of texts that ended."""
        return [self._output(one) for one in ended]

    def _output(self, one: Ended) -> ClassificationOutput:
        made = vector_or_error(one.done)
        tokens = one.done.num_prompt_tokens or len(one.request.prompt_token_ids)
        text, second = one.asked.text, one.asked.text_pair
        if isinstance(made, RowError):
            return ClassificationOutput(one.index, text, None, None, None, made, tokens, second)
        found = scored(made, self._labels)
        scores = dict(zip(self._labels, vector_of(found[SCORES]).tolist(), strict=True))
        label, score = found["label"], found["score"]
        return ClassificationOutput(one.index, text, label, score, scores, None, tokens, second)
