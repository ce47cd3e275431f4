"""bulkrun as a peer: its Python API; texts longer than the model are cut, as sentence-transformers cuts them."""

from __future__ import annotations

import numpy as np

from tests.benchmarks.embed_peers.peer import Embed, Options, run_peer


def load(options: Options) -> Embed:
    """The model behind `Embedder`."""
    import bulkrun

    embedder = bulkrun.Embedder(str(options.model), device="cpu", dtype=options.dtype, on_too_long="truncate_right")
    return lambda texts: np.stack([result.embedding for result in embedder.embed(texts)])


if __name__ == "__main__":
    run_peer(load, "torch", "transformers")
