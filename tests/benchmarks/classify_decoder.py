"""A decoder that classifies, on the engine's own decoder and through transformers' code, in turns.

    python -m tests.benchmarks.classify_decoder --workdir DIR [--texts 64] [--rounds 2]

Writes a Qwen3-0.6B with random weights and a head for three labels where there is none yet, gives both ways the same
texts of log-normal lengths (at most 512 tokens), in turns, and prints one JSON line: seconds of each, and how far their
scores are apart. What transformers runs has the engine's products in it, as any encoder that is not compiled.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from bulkrun.engine.embedding_engine import EmbeddingEngine
from bulkrun.models.classification import classification_model_loader
from bulkrun.request import Request
from bulkrun.settings import ClassificationArgs
from tests.benchmarks.machine import machine

_VOCAB, _LONGEST = 151_936, 512


def write_model(path: Path) -> None:
    """The shape of Qwen3-0.6B."""
    config = Qwen3Config(
        vocab_size=_VOCAB, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, num_labels=3, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForSequenceClassification(config).to(torch.bfloat16).save_pretrained(path)


def make_texts(count: int) -> list[list[int]]:
    """Token ids, the same every time; none is padding."""
    rng = random.Random(1)
    lens = [min(_LONGEST, int(rng.lognormvariate(4.5, 0.8)) + 4) for _ in range(count)]
    return [[rng.randrange(10, _VOCAB) for _ in range(length)] for length in lens]


def classify(path: Path, texts: list[list[int]], *, own: bool, device: str) -> tuple[float, torch.Tensor]:
    """Seconds beside loading, and the scores [S, 3]."""
    way = classification_model_loader.load_decoder_classifier if own else lambda *_, **__: None
    with patch.object(classification_model_loader, "load_decoder_classifier", way):
        engine = EmbeddingEngine.from_model_dir(path, ClassificationArgs(), dtype="bfloat16", device=device)
    for number, text in enumerate(texts):
        engine.add_request(Request(str(number), text))
    made: dict[str, torch.Tensor] = {}
    began = time.perf_counter()
    while engine.has_unfinished():
        for done in engine.step():
            made[done.request_id] = torch.frombuffer(bytearray(done.embedding or b""), dtype=torch.float32)
    seconds = time.perf_counter() - began
    return seconds, torch.stack([made[str(number)] for number in range(len(texts))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    model, texts = options.workdir / "classifier", make_texts(options.texts)
    if not model.is_dir():
        write_model(model)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    scores: dict[bool, torch.Tensor] = {}
    for own in [True, False] * options.rounds:
        took, scores[own] = classify(model, texts, own=own, device=options.device)
        seconds[own].append(round(took, 2))
    facts = {"tokens": sum(map(len, texts)), "own_s": seconds[True], "transformers_s": seconds[False]}
    facts["ratio"] = round(statistics.median(seconds[False]) / statistics.median(seconds[True]), 2)
    facts["apart"] = round(float((scores[True] - scores[False]).abs().max()), 4)
    print(json.dumps({**machine(), "texts": options.texts, **facts}))


if __name__ == "__main__":
    main()
