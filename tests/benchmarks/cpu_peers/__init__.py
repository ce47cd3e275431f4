"""The engine beside the CPU engines others use, on the same checkpoints and the same requests, each in turn.

    python -m tests.benchmarks.cpu_peers setup --workdir DIR
    python -m tests.benchmarks.cpu_peers run --workdir DIR --model llama-20m --workload small [--rounds 3] [--record]

`setup` takes some minutes and about 5 GB, 3 more with the qwen3 shape. Each peer has a virtual environment of its own,
for they pin versions that do not go together. `peer_*.py` run there as processes of their own and share nothing with
us but files of token ids (`tests/benchmarks/work.py`).
"""
