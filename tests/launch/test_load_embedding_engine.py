"""A job's section `engine` and its pooling become an engine that embeds."""

from __future__ import annotations

from pathlib import Path

from bulkrun.job.jobfile.engine import EngineSpec
from bulkrun.launch.engine import load_embedding_engine
from bulkrun.request import Request
from bulkrun.settings import EmbeddingArgs
from tests.models.tiny_encoders import save_tiny_encoder, write_modules


def test_the_defaults_of_a_job_embed(tmp_path: Path) -> None:
    path = save_tiny_encoder(tmp_path, "bert")
    write_modules(path)
    engine = load_embedding_engine(path, EngineSpec(device="cpu", max_num_seqs=4), EmbeddingArgs(dimensions=8))
    assert engine.max_num_seqs == 4
    assert engine.max_model_len == 96
    engine.add_request(Request("a", [5, 6, 7]))
    (completion,) = engine.step()
    assert len(completion.embedding or b"") == 8 * 4
