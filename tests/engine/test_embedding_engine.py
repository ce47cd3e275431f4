"""Vectors: transformers' own for each text alone, pooled naively, whatever the model, crowd, step size and options.

Tolerance: both sides are float32 sums of some hundred products in orders of their own, through three layers. Numbers
were seen 1.4e-5 apart where vectors are 7 to 15 long; the same tokens in another order move them by 0.08 on average.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bulkrun.engine.embedding_engine import EmbeddingEngine
from bulkrun.errors import ModelError, UsageError
from bulkrun.ops.cpu.encoder_stack import can_stack_encoder
from bulkrun.request import Completion, Request, SamplingParams
from bulkrun.settings import EmbeddingArgs, Pooling
from tests.models.tiny_encoders import ENCODERS, hidden_states, pooled, save_tiny_encoder, write_modules
from tests.models.tiny_models import VOCAB_SIZE, edit_names, known, make_tiny_model, save_tiny_model

TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}
POOLINGS: tuple[Pooling, ...] = ("cls", "mean", "last")
LENS = (1, 30, 7, 1, 96, 31, 16, 17, 2, 64)
SaveModel = Callable[[Path], Path]


def texts(lens: Sequence[int] = LENS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lens]


def embed(engine: EmbeddingEngine, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Vectors [S, D] of the prompts, each of which must end as one."""
    for number, prompt in enumerate(prompts):
        engine.add_request(Request(str(number), prompt))
    ended = {completion.request_id: completion for completion in run(engine)}
    assert len(ended) == len(prompts)
    return torch.stack([vector(ended[str(number)]) for number in range(len(prompts))])


def run(engine: EmbeddingEngine) -> list[Completion]:
    completions: list[Completion] = []
    while engine.has_unfinished():
        completions += engine.step()
    assert len({completion.request_id for completion in completions}) == len(completions)
    return completions


def vector(completion: Completion) -> torch.Tensor:
    assert completion.error is None
    assert (completion.finish_reason, completion.token_ids) == ("stop", ())
    assert completion.embedding is not None
    return torch.frombuffer(bytearray(completion.embedding), dtype=torch.float32)


def save_body(path: Path, variant: str, **overrides: Any) -> Path:
    """The model without its head: tensors have no prefix, and config.json names the body's class."""
    model = make_tiny_model(variant, **overrides)
    model.base_model.save_pretrained(path)
    return path


def save_unprefixed(path: Path, variant: str) -> Path:
    """As Qwen3-Embedding is published: the names of a body, and config.json of a whole model."""
    save_tiny_model(path, variant, tie_word_embeddings=True)
    edit_names(path, lambda name: name.removeprefix("model."))
    return path


MODELS: dict[str, SaveModel] = {
    **{variant: (lambda path, variant=variant: save_tiny_encoder(path, variant)) for variant in ENCODERS},
    "qwen3": lambda path: save_tiny_model(path, "qwen3"),
    "qwen3_unprefixed": lambda path: save_unprefixed(path, "qwen3"),
    "qwen3_body": lambda path: save_body(path, "qwen3"),
    "llama": lambda path: save_tiny_model(path, "llama"),
    "llama_body": lambda path: save_body(path, "llama"),
    "mistral_body": lambda path: save_body(path, "mistral_sliding"),
    "gemma3_body": lambda path: save_body(path, "gemma3"),
    **{
        f"{name}_body": (lambda path, name=name: save_body(path, name))
        for name in known(["gemma3n", "gemma4", "gemma4_whole_panels"])
    },
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    saved: dict[str, Path] = {}

    def saved_model(name: str) -> Path:
        if name not in saved:
            saved[name] = MODELS[name](tmp_path_factory.mktemp(name))
        return saved[name]

    return saved_model


@pytest.mark.parametrize("name", MODELS)
def test_vectors_are_those_of_transformers_for_each_text_alone(name: str, model_dir: Callable[[str], Path]) -> None:
    path = model_dir(name)
    hidden = hidden_states(path, texts())
    for pooling in POOLINGS:
        args = EmbeddingArgs(pooling=pooling, normalize=False)
        engine = EmbeddingEngine.from_model_dir(path, args, max_num_batched_tokens=70, dtype="float32")
        expected = torch.stack([pooled(states, pooling) for states in hidden])
        torch.testing.assert_close(embed(engine, texts()), expected, **TOLERANCE)


@pytest.mark.parametrize("name", ["mpnet", "qwen3"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dimensions", [None, 48, 5])
def test_vectors_are_cut_and_then_normalized(
    name: str, normalize: bool, dimensions: int | None, model_dir: Callable[[str], Path]
) -> None:
    args = EmbeddingArgs(pooling="mean", normalize=normalize, dimensions=dimensions)
    vectors = embed(EmbeddingEngine.from_model_dir(model_dir(name), args, dtype="float32"), texts())
    for ours, states in zip(vectors, hidden_states(model_dir(name), texts()), strict=True):
        expected = pooled(states, "mean")[:dimensions]
        torch.testing.assert_close(ours, expected / expected.norm() if normalize else expected, **TOLERANCE)


def test_dense_modules_come_between_pooling_and_cut(tmp_path: Path) -> None:
    """As in EmbeddingGemma: two of them, one without a bias."""
    path = save_tiny_encoder(tmp_path, "gemma3_both_ways")
    torch.manual_seed(1)
    dense = [torch.nn.Linear(48, 80, bias=False), torch.nn.Linear(80, 32)]
    write_modules(path, {"pooling_mode_mean_tokens": True}, dense=dense)
    engine = EmbeddingEngine.from_model_dir(path, EmbeddingArgs(dimensions=24), dtype="float32")
    assert engine.dimensions == 24
    for ours, states in zip(embed(engine, texts()), hidden_states(path, texts()), strict=True):
        with torch.no_grad():
            expected = dense[1](dense[0](pooled(states, "mean")).tanh()).tanh()[:24]
        torch.testing.assert_close(ours, expected / expected.norm(), **TOLERANCE)


@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3_unprefixed"])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 40, 4096])
def test_a_vector_is_the_same_alone_and_in_any_crowd(
    name: str, max_num_batched_tokens: int, model_dir: Callable[[str], Path]
) -> None:
    settings: dict[str, Any] = {"max_num_batched_tokens": max_num_batched_tokens, "dtype": "float32"}
    engine = EmbeddingEngine.from_model_dir(model_dir(name), EmbeddingArgs(pooling="mean"), **settings)
    crowd = embed(engine, texts())
    alone = torch.cat([embed(engine, [text]) for text in texts()])
    torch.testing.assert_close(crowd, alone, **TOLERANCE)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3", "xlm_roberta_in_panels", "mpnet_in_panels"])
def test_deterministic_vectors_have_the_same_bits_in_any_crowd(
    name: str, pooling: Pooling, dtype: str, model_dir: Callable[[str], Path]
) -> None:
    if name != "qwen3" and not can_stack_encoder(getattr(torch, dtype), 64, 128, 16):
        pytest.skip("encoders are not compiled here")
    path, args = model_dir(name), EmbeddingArgs(pooling=pooling)
    crowd = EmbeddingEngine.from_model_dir(path, args, dtype=dtype, deterministic=True)
    narrow = EmbeddingEngine.from_model_dir(
        path, args, dtype=dtype, deterministic=True, max_num_seqs=2, block_size=4
    )  # fmt: skip
    assert torch.equal(embed(crowd, texts()), embed(narrow, texts()[::-1]).flip(0))


def test_a_quantized_decoder_gives_vectors_near_its_own(model_dir: Callable[[str], Path]) -> None:
    """int8 keeps about two decimals of each product: directions stay, to a cosine of 0.99."""
    args = EmbeddingArgs(pooling="last")
    plain, int8 = (
        embed(EmbeddingEngine.from_model_dir(model_dir("qwen3_unprefixed"), args, quantization=how), texts())
        for how in (None, "int8")
    )
    assert (plain * int8).sum(-1).min() > 0.99
    assert not torch.equal(plain, int8)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_steps_under_way_end_as_the_same_vectors(name: str, model_dir: Callable[[str], Path]) -> None:
    args, settings = EmbeddingArgs(pooling="mean"), {"max_num_batched_tokens": 40}
    at_once = EmbeddingEngine.from_model_dir(model_dir(name), args, **settings)
    late = EmbeddingEngine.from_model_dir(model_dir(name), args, async_scheduling=True, **settings)
    late.add_request(Request("first", texts()[0]))
    assert late.step() == []
    assert late.stats().num_running == 1
    assert [completion.request_id for completion in late.step()] == ["first"]
    assert torch.equal(embed(late, texts()), embed(at_once, texts()))


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_requests_that_cannot_be_embedded_end_as_errors(name: str, model_dir: Callable[[str], Path]) -> None:
    engine = EmbeddingEngine.from_model_dir(model_dir(name), EmbeddingArgs(pooling="cls"), max_model_len=20)
    prompts = {"empty": [], "long": [5] * 21, "unknown": [5, VOCAB_SIZE], "negative": [-1], "fits": [5] * 20}
    for request_id, prompt in prompts.items():
        engine.add_request(Request(request_id, prompt))
    ended = {completion.request_id: completion for completion in run(engine)}
    codes = {request_id: completion.error and completion.error.code for request_id, completion in ended.items()}
    assert codes == {
        "empty": "empty_prompt", "long": "too_long", "unknown": "bad_input", "negative": "bad_input", "fits": None,
    }  # fmt: skip
    assert ended["long"].error is not None
    assert "21 tokens" in ended["long"].error.message
    assert "may have 20" in ended["long"].error.message
    assert ended["fits"].num_prompt_tokens == 20


def test_better_priorities_go_first(model_dir: Callable[[str], Path]) -> None:
    engine = EmbeddingEngine.from_model_dir(model_dir("bert"), EmbeddingArgs(pooling="cls"), max_num_seqs=1)
    assert engine.max_num_seqs == 1
    for request_id, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1)):
        engine.add_request(Request(request_id, [5, 6], priority=priority))
    assert [completion.request_id for completion in run(engine)] == ["d", "b", "a", "c"]


def test_stats_count_texts_and_tokens(model_dir: Callable[[str], Path]) -> None:
    engine = EmbeddingEngine.from_model_dir(model_dir("bert"), EmbeddingArgs(pooling="cls"), max_num_batched_tokens=16)
    for number in range(4):
        engine.add_request(Request(str(number), [5] * 8, SamplingParams(max_tokens=7)))
    assert engine.stats().num_waiting == 4
    run(engine)
    stats = engine.stats()
    assert (stats.num_steps, stats.num_scheduled_seqs, stats.num_prompt_tokens) == (2, 4, 32)
    assert (stats.num_waiting, stats.num_running, stats.num_output_tokens) == (0, 0, 0)
    assert engine.partial_outputs() == []


@pytest.mark.parametrize("name", ["bert", "gemma3_both_ways", "qwen3"])
def test_random_weights_need_no_checkpoint(name: str, model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    raw = json.loads((model_dir(name) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    engines = [
        EmbeddingEngine.from_model_dir(tmp_path, EmbeddingArgs(pooling="mean"), load_format="dummy") for _ in range(2)
    ]
    first, again = (embed(engine, texts()) for engine in engines)
    assert torch.equal(first, again)
    assert first.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_dtype": "fp8"}, r"engine\.kv_cache_dtype: fp8 means nothing to a job that generates nothing"),
        ({"kv_cache_memory_bytes": 5}, r"engine\.kv_cache_memory_bytes: 5 means nothing"),
        ({"batching": "static"}, r"engine\.batching: static means nothing"),
        ({"deterministic": True}, r"engine\.deterministic: .*BertModel runs through transformers"),
        ({"max_model_len": 97}, r"engine\.max_model_len: 97 is above the model's 96 positions"),
        ({"max_num_batched_tokens": 0}, r"engine\.max_num_batched_tokens: 0 is below 1"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(
    settings: dict[str, Any], message: str, model_dir: Callable[[str], Path]
) -> None:
    with pytest.raises(UsageError, match=message):
        EmbeddingEngine.from_model_dir(model_dir("bert"), EmbeddingArgs(pooling="mean"), **settings)


def test_behind_dense_modules_in_panels_a_vector_has_the_same_bits_in_any_crowd(tmp_path: Path) -> None:
    if not can_stack_encoder(torch.float32, 64, 128, 16):
        pytest.skip("encoders are not compiled here")
    path = save_tiny_encoder(tmp_path, "bert_in_panels")
    write_modules(path, dense=[torch.nn.Linear(64, 96), torch.nn.Linear(96, 32)])
    for deterministic in (False, True):
        engine = EmbeddingEngine.from_model_dir(path, deterministic=deterministic, dtype="float32")
        alone = torch.cat([embed(engine, [text]) for text in texts()])
        assert torch.equal(embed(engine, texts()), alone)


def test_deterministic_is_refused_beside_dense_modules_of_other_sizes(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "qwen3")
    write_modules(path, dense=[torch.nn.Linear(48, 8)])
    with pytest.raises(UsageError, match=r"engine\.deterministic: .*Dense"):
        EmbeddingEngine.from_model_dir(path, deterministic=True)


def test_without_files_the_job_says_how_to_pool(model_dir: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match=r"embedding\.pooling: .*set it to cls, mean or last"):
        EmbeddingEngine.from_model_dir(model_dir("bert"))


@pytest.mark.parametrize("dimensions", [0, 49])
def test_dimensions_that_are_not_there_are_refused(dimensions: int, model_dir: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match=rf"embedding\.dimensions: {dimensions} is not from 1 to the 48"):
        EmbeddingEngine.from_model_dir(model_dir("bert"), EmbeddingArgs(pooling="mean", dimensions=dimensions))
