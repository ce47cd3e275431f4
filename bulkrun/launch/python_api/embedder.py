"""The Python API's `Embedder`: vectors of texts. Importing this loads no torch; making one does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Unpack, overload

import numpy as np
import numpy.typing as npt

from bulkrun.job.prompts.fit import OnTooLong
from bulkrun.job.work.vectors import vector_or_error
from bulkrun.launch.engine import load_embedding_engine
from bulkrun.launch.preparation.adapter import adapter_dir, tokenizer_dir
from bulkrun.launch.preparation.embedding import find_embedding_model, with_embedding
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from bulkrun.launch.python_api.calls import EngineSettings
from bulkrun.launch.python_api.prompt_stream import Asked, Ended
from bulkrun.launch.python_api.text_model import TextModel, job_of_texts
from bulkrun.request import RowError
from bulkrun.settings import Pooling
from bulkrun.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingOutput:
    """What became of one text, the `index`-th of its call. `error` is None if and only if there is an `embedding`."""

    index: int
    prompt: str | None  # the text as it was embedded, None where nothing usable was given
    embedding: npt.NDArray[np.float32] | None
    error: RowError | None = None
    num_prompt_tokens: int = 0


class Embedder(TextModel[EmbeddingOutput]):
    """A model that makes vectors of texts. Several threads may call it and share its steps.

    `model` is a hub id, a directory or `bundled:tiny`. The other settings are those of a job file's sections
    `embedding` and `engine`; what is not set is as the model's own files say. `on_too_long`: a text of more tokens than
    `max_model_len` is an output with an error, or loses its start (truncate_left) or end (truncate_right). Raises
    ModelError for a model that cannot be used, UsageError for settings that cannot work.

    >>> from bulkrun import Embedder
    >>> embedder = Embedder("bundled:tiny", pooling="mean")
    >>> [output] = embedder.embed(["Close the connection."])
    >>> output.embedding.shape, output.error
    ((256,), None)
    >>> outputs = embedder.embed(f"text {i}" for i in range(1000))
    >>> next(outputs).index  # an iterator of texts is read as it is needed
    0
    >>> [output.error.code for output in embedder.embed(["", None])]
    ['empty_prompt', 'bad_input']
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        on_too_long: OnTooLong = "error",
        **engine: Unpack[EngineSettings],
    ) -> None:
        embedding = {"pooling": pooling, "normalize": normalize, "dimensions": dimensions}
        prompts = {"prompt_name": prompt_name, "prompt": prompt}
        run = {"on_too_long": on_too_long}
        asked = job_of_texts(model, "embed", embedding={**embedding, **prompts}, engine=engine, run=run)
        adapter = adapter_dir(asked.engine)
        model_dir, config = find_embedding_model(asked.model, adapter, BUNDLED_ROOT)
        spec = with_embedding(asked, config)
        tokenizer = Tokenizer.from_dir(tokenizer_dir(model_dir, adapter))
        loaded = load_embedding_engine(model_dir, spec.engine, spec.embedding.to_args(), adapter)
        super().__init__(spec, tokenizer, loaded, _VectorOutputs())

    @overload  # a list is an iterable too: the first overload that fits says what comes
    def embed(self, texts: list[str] | str, *, use_tqdm: bool = False) -> list[EmbeddingOutput]: ...  # type: ignore[overload-overlap]

    @overload
    def embed(
        self, texts: Iterable[str], *, ordered: bool = True, use_tqdm: bool = False
    ) -> Iterator[EmbeddingOutput]: ...

    def embed(
        self, texts: Iterable[str] | str, *, ordered: bool = True, use_tqdm: bool = False
    ) -> list[EmbeddingOutput] | Iterator[EmbeddingOutput]:
        """The vectors of texts, each behind the model's prompt, if it has one.

        A list of texts gives a list of outputs in its order. Any other iterable gives an iterator, which reads at most
        2 x `max_num_seqs` texts ahead of what it has handed out; with `ordered=False` outputs come as they end.
        `use_tqdm` counts them on a bar, in a terminal.
        """
        return self._outputs(texts, ordered=ordered, use_tqdm=use_tqdm)


class _VectorOutputs:
    """Reads what an engine that embeds made."""

    def refused(self, index: int, asked: Asked) -> EmbeddingOutput:
        """The output of a text that cannot be embedded."""
        return EmbeddingOutput(index, asked.text, None, asked.error)

    def read(self, ended: Sequence[Ended]) -> list[EmbeddingOutput]:
        """The outputs of texts that ended; their arrays are their own."""
        return [self._output(one) for one in ended]

    def _output(self, one: Ended) -> EmbeddingOutput:
        made = vector_or_error(one.done)
        tokens = one.done.num_prompt_tokens or len(one.request.prompt_token_ids)
        if isinstance(made, RowError):
            return EmbeddingOutput(one.index, one.asked.text, None, made, tokens)
        vector = np.frombuffer(made, "<f4").astype(np.float32)
        return EmbeddingOutput(one.index, one.asked.text, vector, num_prompt_tokens=tokens)
