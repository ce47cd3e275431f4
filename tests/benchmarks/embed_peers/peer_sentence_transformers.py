"""sentence-transformers as a peer: batches of 32 of like length, which is its default."""

from __future__ import annotations

import torch

from tests.benchmarks.embed_peers.peer import Embed, Options, run_peer


def load(options: Options) -> Embed:
    """The model as its own class loads it."""
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(options.threads)
    dtype = {"dtype": getattr(torch, options.dtype)}
    model = SentenceTransformer(str(options.model), device="cpu", model_kwargs=dtype)
    return lambda texts: model.encode(texts, convert_to_tensor=True).float().numpy()


if __name__ == "__main__":
    run_peer(load, "sentence-transformers", "torch", "transformers")
