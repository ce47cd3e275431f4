"""The parts of the comparison of vectors that need no other program."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import numpy as np

from tests.benchmarks.cpu_peers.runner import last_json_line
from tests.benchmarks.embed_peers.places import passages, run_in_environment
from tests.launch.python_api.test_embedder import save_text_encoder
from tests.models.tiny_encoders import hidden_states, write_modules


def test_passages_are_the_same_on_every_call_and_have_heavy_tailed_lengths() -> None:
    texts = passages(200)
    assert texts == passages(200)
    words = [len(text.split()) for text in texts]
    assert statistics.median(words) == 60 and max(words) == 250 and min(words) < 20


def test_our_process_reads_texts_and_writes_their_vectors(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = save_text_encoder(tmp_path / "model")
    write_modules(model)
    (tmp_path / "texts.json").write_text(json.dumps(["a b c", "h"]))
    arguments = {"model": model, "texts": tmp_path / "texts.json", "dtype": "float32", "threads": 1}
    arguments["vectors-out"] = tmp_path / "vectors.npy"
    command = [f"--{name}={value}" for name, value in arguments.items()]
    done = run_in_environment(tmp_path, "bulkrun", command, threads=1)
    assert done.returncode == 0, done.stderr
    result = last_json_line(done.stdout)
    assert (result["texts"], result["dimensions"]) == (2, 48) and result["wall_s"] > 0
    means = [states.mean(0) for states in hidden_states(model, [[2, 4, 5, 6, 3], [2, 11, 3]])]
    expected = np.stack([(mean / mean.norm()).numpy() for mean in means])
    np.testing.assert_allclose(np.load(tmp_path / "vectors.npy"), expected, atol=1e-5)
