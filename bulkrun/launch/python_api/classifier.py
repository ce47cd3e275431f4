"""The Python API's `Classifier`: labels of texts. Importing this loads no torch; making one does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Unpack, overload

from bulkrun.data.results.schema import SCORES
from bulkrun.job.prompts.fit import OnTooLong
from bulkrun.job.work.vectors import scored, vector_of, vector_or_error
from bulkrun.launch.preparation.classification import find_classifier, with_classification
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from bulkrun.launch.python_api.calls import EngineSettings
from bulkrun.launch.python_api.prompt_stream import Asked, Ended
from bulkrun.launch.python_api.text_model import TextModel, job_of_texts
from bulkrun.request import RowError
from bulkrun.settings import ScoreActivation


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


class Classifier(TextModel[ClassificationOutput]):
    """A sequence classification model. Several threads may call it and share its steps.

    `model` is a hub id or a directory. The other settings are those of a job file's sections `classification` and
    `engine`; what is not set is as the model's own files say. `on_too_long`: a text of more tokens than `max_model_len`
    is an output with an error, or loses its start (truncate_left) or end (truncate_right). Raises ModelError for a
    model that cannot be used, UsageError for settings that cannot work.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        activation: ScoreActivation | None = None,
        labels: Sequence[str] | None = None,
        on_too_long: OnTooLong = "error",
        **engine: Unpack[EngineSettings],
    ) -> None:
        made = {"activation": activation, "labels": None if labels is None else list(labels)}
        run = {"on_too_long": on_too_long}
        asked = job_of_texts(model, "classify", classification=made, engine=dict(engine), run=run)
        model_dir, config = find_classifier(asked.model, BUNDLED_ROOT)
        spec = with_classification(asked, config)
        self.labels = tuple(spec.classification.labels or ())
        super().__init__(spec, model_dir, spec.classification.to_args(), _ScoreOutputs(self.labels))

    @overload  # a list is an iterable too: the first overload that fits says what comes
    def classify(self, texts: list[str] | str, *, use_tqdm: bool = False) -> list[ClassificationOutput]: ...  # type: ignore[overload-overlap]

    @overload
    def classify(
        self, texts: Iterable[str], *, ordered: bool = True, use_tqdm: bool = False
    ) -> Iterator[ClassificationOutput]: ...

    def classify(
        self, texts: Iterable[str] | str, *, ordered: bool = True, use_tqdm: bool = False
    ) -> list[ClassificationOutput] | Iterator[ClassificationOutput]:
        """The labels of texts, with their scores.

        A list of texts gives a list of outputs in its order. Any other iterable gives an iterator, which reads at most
        2 x `max_num_seqs` texts ahead of what it has handed out; with `ordered=False` outputs come as they end.
        `use_tqdm` counts them on a bar, in a terminal.
        """
        return self._outputs(texts, ordered=ordered, use_tqdm=use_tqdm)


class _ScoreOutputs:
    """Reads what an engine that classifies made."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels

    def refused(self, index: int, asked: Asked) -> ClassificationOutput:
        """The output of a text that cannot be classified."""
        return ClassificationOutput(index, asked.text, None, None, None, asked.error)

    def read(self, ended: Sequence[Ended]) -> list[ClassificationOutput]:
        """The outputs of texts that ended."""
        return [self._output(one) for one in ended]

    def _output(self, one: Ended) -> ClassificationOutput:
        made = vector_or_error(one.done)
        tokens = one.done.num_prompt_tokens or len(one.request.prompt_token_ids)
        if isinstance(made, RowError):
            return ClassificationOutput(one.index, one.asked.text, None, None, None, made, tokens)
        found = scored(made, self._labels)
        scores = dict(zip(self._labels, vector_of(found[SCORES]).tolist(), strict=True))
        label, score = found["label"], found["score"]
        return ClassificationOutput(one.index, one.asked.text, label, score, scores, num_prompt_tokens=tokens)
