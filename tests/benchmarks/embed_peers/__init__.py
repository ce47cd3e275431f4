"""Texts to vectors beside the programs others use, on the same model and the same texts, each in turn.

    python -m tests.benchmarks.embed_peers setup --workdir DIR
    python -m tests.benchmarks.embed_peers run --workdir DIR --model minilm [--dtype bfloat16] [--rounds 3] [--record]

`minilm` is all-MiniLM-L6-v2 with its trained weights, which a package on the index holds; `qwen3-0.6b` a decoder of
Qwen3-Embedding-0.6B's shape with seeded random weights. `setup` takes minutes and some 3 GB: each peer has a virtual
environment of its own. `peer_*.py` run there and share nothing with us but files of texts and vectors.
"""
