"""What `Embedder` and `Classifier` have in common: texts in, an output each, none of them an exception.

Lists in, lists out; iterators in, iterators out. Importing this loads no torch; making one does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Generic, TypeVar

from bulkrun.errors import shown_value
from bulkrun.job.jobfile.load import job_of
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.prompts.fit import PromptFitter, PromptFrame
from bulkrun.launch.python_api.calls import Shown, refuse_one
from bulkrun.launch.python_api.prompt_stream import Asked, Outputs, PromptStream, SharedEngine
from bulkrun.launch.python_api.prompts import as_python, error_of
from bulkrun.request import Engine, RowError
from bulkrun.text.tokenizer import Tokenizer

_O = TypeVar("_O")


def job_of_texts(model: str | PathLike[str], task: str, **sections: Mapping[str, Any]) -> JobSpec:
    """The job file that would do the same. Raises JobFileError for a value that is none."""
    places = {"input": {"path": "-"}, "output": {"path": "-"}}
    return job_of({"name": "python", "model": model, "task": task, **places, **sections})


class TextModel(Generic[_O]):
    """A model that makes something of texts. Several threads may call it and share its steps."""

    def __init__(self, spec: JobSpec, tokenizer: Tokenizer, engine: Engine, reader: Outputs[_O]) -> None:
        """`spec`: as its model completes it. `reader`: of what the engine makes."""
        self._reader = reader
        self._sampling = spec.sampled.to_params()
        self._before = spec.embedding.prompt or ""
        self._tokenizer = tokenizer
        self._shared = SharedEngine(engine)
        self._fitter = PromptFitter(self.max_model_len, spec.run.on_too_long)

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a text; a longer one is an output with an error."""
        return self._shared.engine.max_model_len

    def _outputs(self, texts: Iterable[Any] | str, *, ordered: bool, use_tqdm: bool) -> list[_O] | Iterator[_O]:
        given = [texts] if isinstance(texts, str) else texts
        refuse_one(given, "texts")
        self._shared.check_process()
        in_order = ordered or isinstance(given, list)
        stream = PromptStream(self._shared, self._reader, self._encode, map(self._ask, given), ordered=in_order)
        show = Shown(in_order, use_tqdm)
        outputs = show.counted(stream.outputs(), len(given) if isinstance(given, list) else None)
        return list(outputs) if isinstance(given, list) else outputs

    def _encode(self, asked: list[Asked]) -> Sequence[Sequence[int] | RowError]:
        plain = iter(self._tokens([one.text or "" for one in asked if not one.has_special_tokens]))
        chats = [one.text or "" for one in asked if one.has_special_tokens]
        whole = iter(self._tokenizer.encode_batch(chats, add_special_tokens=False) if chats else [])
        return [self._fitted(next(whole if one.has_special_tokens else plain)) for one in asked]

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        return self._tokenizer.encode_batch(texts, add_special_tokens=True)

    def _fitted(self, token_ids: list[int]) -> list[int]:
        """The ids, cut if that was asked for; those that are too long go on to the engine, which refuses them."""
        fitted = self._fitter.fit(token_ids, 0, self._frame)
        return token_ids if isinstance(fitted, RowError) else fitted

    def _frame(self) -> PromptFrame:
        """What is around every text, and stays: the model's special tokens, and the text before it."""
        return PromptFrame.between(*self._tokens([self._before + text for text in "ab"]))

    def _ask(self, text: Any) -> Asked:
        plain = as_python(text)
        if not isinstance(plain, str):
            return Asked(None, None, self._sampling, 0, RowError("bad_input", f"{shown_value(text)} is not a text"))
        return Asked(self._before + plain, None, self._sampling, 0, error_of(plain))
