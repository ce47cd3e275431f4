"""What fewer bits cost vectors: a model in bf16 and int8 beside itself in float32, on the texts of `embed_peers`.

    python -m tests.benchmarks.embed_quality --workdir DIR [--model minilm] [--num-texts 512]

`DIR` is that of `embed_peers setup`. Prints a JSON line per precision: the cosine to the vector in float32 (mean and
least), and of how many of a text's ten nearest others the two agree.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import bulkrun
from tests.benchmarks.embed_peers.places import MODELS, model_dir, texts_file

_PRECISIONS: tuple[dict[str, Any], ...] = (
    {"dtype": "bfloat16"},
    {"dtype": "float32", "quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "int8"},
)
_NEAREST = 10
F32 = npt.NDArray[np.float32]


def main() -> None:
    """Parse, embed, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--model", choices=MODELS, default="minilm")
    parser.add_argument("--num-texts", type=int, default=512)
    args = parser.parse_args()
    texts = json.loads(texts_file(args.workdir, args.model).read_text(encoding="utf-8"))[: args.num_texts]
    path = model_dir(args.workdir, args.model)
    exact = vectors(path, texts, dtype="float32")
    for precision in _PRECISIONS:
        print(json.dumps({**precision, **compared(vectors(path, texts, **precision), exact)}), flush=True)


def vectors(path: Path, texts: list[str], **engine: Any) -> F32:
    """[S, D], each of length 1."""
    embedder = bulkrun.Embedder(path, normalize=True, device="cpu", on_too_long="truncate_right", **engine)
    return np.stack([output.embedding for output in embedder.embed(texts)])


def compared(near: F32, exact: F32) -> dict[str, float]:
    """How far vectors are from those they should be, and whether they find the same neighbours."""
    cosines = (near * exact).sum(1)
    pairs = zip(_nearest(near), _nearest(exact), strict=True)
    shared = [len({*ours} & {*theirs}) / _NEAREST for ours, theirs in pairs]
    return {
        "texts": len(exact),
        "cosine_mean": round(float(cosines.mean()), 5),
        "cosine_least": round(float(cosines.min()), 5),
        "nearest_shared": round(float(np.mean(shared)), 3),
    }


def _nearest(made: F32) -> list[list[int]]:
    """Of each vector, the others that are nearest."""
    alike = made @ made.T
    np.fill_diagonal(alike, -np.inf)
    found: list[list[int]] = np.argsort(-alike, axis=1)[:, :_NEAREST].tolist()
    return found


if __name__ == "__main__":
    main()
