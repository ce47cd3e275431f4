"""Which files of a model's directory hold its weights, and whether they are there. Torch-free: asked before any work.

Pickles, torn files and gaps in the index are refused; of a directory in another format the message says which.
"""

from __future__ import annotations

import json
from pathlib import Path

from bulkrun.errors import ModelError, shortened
from bulkrun.models.files.read_errors import read_errors
from bulkrun.models.files.safetensors_header import refuse_torn

ADAPTER = "adapter_config.json"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_LONGEST_NAME = 255  # bytes, of any file system


def refuse_missing_weights(path: Path) -> None:
    """Raise ModelError unless the directory's safetensors are there and whole, by their headers."""
    for file in weight_files(path):
        refuse_torn(file)


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model's directory: the whole one, else those of the index, else the one there is.

    An index beside a whole file is older, of shards that are gone or stale: transformers passes over it as well.
    Raises ModelError where files are missing, or there are only pickles, which could run code.
    """
    whole, index = path / "model.safetensors", path / _INDEX
    if whole.is_file():
        return [whole]
    if index.is_file():
        return _indexed_files(index)
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1 and not (path / ADAPTER).is_file():
        return files
    if len(files) > 1:
        raise ModelError(f"{path}: {len(files)} safetensors files but no {_INDEX}; download the model again")
    pickles = sorted(p.name for pattern in _PICKLES for p in path.glob(pattern))
    if pickles:
        raise ModelError(
            f"{path}: weights only as pickle ({', '.join(pickles[:3])}), which can run code and is refused; convert "
            "them where you trust them: AutoModelForCausalLM.from_pretrained(path).save_pretrained(new_path), with "
            "AutoModel for one that embeds"
        )
    reason = other_format(path) or "download the model's weights"
    raise ModelError(f"{path}: no *.safetensors; {reason}")


def other_format(path: Path) -> str | None:
    """What a directory is that is no model in Hugging Face's format, and what to do; None where nothing tells."""
    if (path / ADAPTER).is_file():
        return f"{ADAPTER} makes it an adapter (LoRA): name its base as the model, and this directory in engine.adapter"
    if any(path.glob("*.gguf")):
        return "its weights are GGUF, which is not read; download the model's safetensors"
    if (path / "params.json").is_file():
        return "params.json makes it a model in its maker's own format; download the one in Hugging Face's"
    return None


def _indexed_files(index: Path) -> list[Path]:
    try:
        with read_errors(index):
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index}: not a safetensors index ({error!r}); download it again") from None
    for name in map(str, names):
        file, too_long = index.parent / name, len(name.encode("utf-8", "surrogatepass")) > _LONGEST_NAME
        if file.parent != index.parent or too_long or not file.is_file():
            shown = index.parent / shortened(name, _LONGEST_NAME)
            raise ModelError(f"{shown}: named in {index.name} but not there; download it again")
    return [index.parent / name for name in names]
