"""`bulkrun.Embedder`: each text's own vector, in order, and no text is worth an exception."""

from __future__ import annotations

import doctest
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer as Tokens
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

import bulkrun
from bulkrun.errors import JobFileError, UsageError
from bulkrun.job.jobfile.engine import EngineSpec
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from bulkrun.launch.python_api import embedder
from bulkrun.settings import EmbeddingArgs
from bulkrun.text.tokenizer import Tokenizer
from tests.job.fake_engine import VECTOR_NUMBERS, FakeEmbedder, expected_vector
from tests.models.tiny_encoders import save_tiny_encoder

_WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghx")
TEXTS = [f"def f{number}(x):" for number in range(30)]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineSpec, EmbeddingArgs]]:
    """What engines were asked for; each is the fake one."""
    asked: list[tuple[EngineSpec, EmbeddingArgs]] = []

    def load(model_dir: Path, engine: EngineSpec, embedding: EmbeddingArgs, adapter: Path | None) -> FakeEmbedder:
        asked.append((engine, embedding))
        return FakeEmbedder(4, refuse=lambda request: len(request.prompt_token_ids) > 100)

    monkeypatch.setattr(embedder, "load_embedding_engine", load)
    return asked


def vectors(texts: list[str]) -> list[np.ndarray[Any, Any]]:
    token_ids = Tokenizer.from_dir(BUNDLED_ROOT / "tiny").encode_batch(texts, add_special_tokens=True)
    return [np.frombuffer(expected_vector(ids), "<f4") for ids in token_ids]


def save_text_encoder(path: Path) -> Path:
    """A tiny BERT whose tokenizer knows some letters and puts [CLS] and [SEP] around them."""
    save_tiny_encoder(path, "bert")
    words = Tokens(WordLevel({word: number for number, word in enumerate(_WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(word, _WORDS.index(word)) for word in ("[CLS]", "[SEP]")]
    )
    words.save(str(path / "tokenizer.json"))
    return path


def test_the_docstrings_examples_are_true() -> None:
    assert doctest.testmod(embedder) == doctest.TestResults(0, 7)


def test_its_vectors_are_those_of_a_job(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    how: Any = {"pooling": "mean", "dimensions": 64, "prompt": "code: "}
    job = {
        "name": "vectors",
        "task": "embed",
        "model": "bundled:tiny",
        "input": {"path": str(tmp_path / "in.jsonl")},
        "embedding": how,
        "engine": {"dtype": "float32"},
        "output": {"path": str(tmp_path / "out")},
    }
    done = bulkrun.run_job(job)
    made = [row["embedding"] for part in done.run.parts().values() for row in pq.read_table(part).to_pylist()]
    outputs = bulkrun.Embedder("bundled:tiny", dtype="float32", **how).embed(TEXTS)
    for output, vector in zip(outputs, made, strict=True):
        assert output.embedding is not None and output.embedding.tolist() == pytest.approx(vector, abs=1e-5)


def test_a_list_gives_a_list_of_its_own_vectors(loaded: Any) -> None:
    outputs = bulkrun.Embedder("bundled:tiny", pooling="mean").embed(TEXTS)
    assert [output.index for output in outputs] == list(range(30))
    assert [output.prompt for output in outputs] == TEXTS
    for output, wanted in zip(outputs, vectors(TEXTS), strict=True):
        assert output.error is None and output.num_prompt_tokens > 1
        assert output.embedding is not None and output.embedding.dtype == np.float32
        assert output.embedding.tobytes() == wanted.tobytes() and output.embedding.flags.writeable


@pytest.mark.parametrize("ordered", [True, False])
def test_an_iterator_is_read_a_little_ahead(loaded: Any, ordered: bool) -> None:
    read = 0

    def texts() -> Iterator[str]:
        nonlocal read
        for text in TEXTS:
            read += 1
            yield text

    outputs = bulkrun.Embedder("bundled:tiny", pooling="last").embed(texts(), ordered=ordered)
    first = next(outputs)
    assert read <= 9 and isinstance(first, bulkrun.EmbeddingOutput)
    found = {output.index: output.embedding for output in [first, *outputs]}
    assert [found[index].tobytes() for index in range(30)] == [one.tobytes() for one in vectors(TEXTS)]  # type: ignore[union-attr]


def test_what_cannot_be_embedded_is_an_output_that_says_why(loaded: Any) -> None:
    given: Any = ["", None, [1, 2], "half \ud800", "word " * 200, pa.scalar("good"), np.str_("good")]
    outputs = bulkrun.Embedder("bundled:tiny", pooling="mean").embed(given)
    codes = [None if output.error is None else output.error.code for output in outputs]
    assert codes == ["empty_prompt", "bad_input", "bad_input", "bad_input", "engine_error", None, None]
    assert [output.embedding is None for output in outputs] == [code is not None for code in codes]


def test_settings_are_those_of_a_job_file(loaded: list[tuple[EngineSpec, EmbeddingArgs]]) -> None:
    made = bulkrun.Embedder(
        BUNDLED_ROOT / "tiny", pooling="cls", normalize=False, dimensions=VECTOR_NUMBERS, prompt="q: ", max_model_len=64
    )
    [(engine, embedding)] = loaded
    assert embedding == EmbeddingArgs(pooling="cls", normalize=False, dimensions=VECTOR_NUMBERS)
    assert engine.max_model_len == 64
    [output] = made.embed("text")
    assert output.prompt == "q: text" and output.embedding is not None
    assert output.embedding.tobytes() == vectors(["q: text"])[0].tobytes()


def test_a_text_that_is_too_long_can_lose_an_end_and_keeps_what_is_around_it(tmp_path: Path) -> None:
    """Two texts that differ only where they are cut have one vector, and no longer one that differs before."""
    model = save_text_encoder(tmp_path)
    cut, same, other = "a b c d e f g h", "a b c d e f g x", "x b c d e f g h"
    lens: dict[str, list[int]] = {}
    for how, kept in (("truncate_right", [cut, same]), ("truncate_left", [cut, other])):
        embedder = bulkrun.Embedder(model, pooling="mean", on_too_long=how, max_model_len=6)  # type: ignore[arg-type]
        one, another = embedder.embed(kept)
        assert one.embedding is not None and another.embedding is not None
        assert one.embedding.tobytes() == another.embedding.tobytes()
        lens[how] = [one.num_prompt_tokens, another.num_prompt_tokens]
        [whole] = embedder.embed(["a b c d" if how == "truncate_right" else "e f g h"])
        assert whole.embedding is not None
        np.testing.assert_allclose(whole.embedding, one.embedding, atol=1e-6)
    assert lens == {"truncate_right": [6, 6], "truncate_left": [6, 6]}
    [refused] = bulkrun.Embedder(model, pooling="mean", max_model_len=6).embed([cut])
    assert refused.error is not None and refused.error.code == "too_long"


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"pooling": "max"}, JobFileError, 'embedding.pooling: "max" is not one of'),
        ({"dimensions": 0}, JobFileError, "embedding.dimensions: 0"),
        ({"pooling": "cls", "prompt": "a", "prompt_name": "b"}, JobFileError, "embedding.prompt_name: given together"),
        ({"pooling": "cls", "prompt_name": "b"}, JobFileError, "embedding.prompt_name: the model has no prompt 'b'"),
        ({"pooling": "cls", "dimensions": 9999}, UsageError, "embedding.dimensions: 9999"),
        ({"pooling": "cls", "max_seqs": 1}, JobFileError, "engine.max_seqs: unknown key"),
    ],
)
def test_settings_that_cannot_be_are_named(loaded: Any, settings: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        bulkrun.Embedder("bundled:tiny", **settings)
    assert said in str(caught.value)
    assert not loaded


def test_what_is_no_list_of_texts_is_refused(loaded: Any) -> None:
    with pytest.raises(UsageError, match="7 is not a list or an iterator of texts"):
        bulkrun.Embedder("bundled:tiny", pooling="mean").embed(7)  # type: ignore[call-overload]
