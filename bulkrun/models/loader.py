"""Weights from safetensors into a `Decoder`, tensor by tensor: memory never exceeds the model and one tensor.

Pickle weights are refused: they can run code. A missing, unexpected or mis-shaped tensor is an error that names it.
Knows files; which tensor goes where stands in `tensor_names`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from bulkrun.errors import ModelError
from bulkrun.models.config import DecoderConfig, ModelConfig
from bulkrun.models.decoder import Decoder
from bulkrun.models.dummy_weights import fill_with_random_weights
from bulkrun.models.language_model import LanguageModel
from bulkrun.models.model_dir import read_header
from bulkrun.models.quantization import quantize_projections, refuse_quantization, store_quantized
from bulkrun.models.tensor_names import Target, targets
from bulkrun.ops.linear import can_pack_bfloat16

_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# older checkpoints stored constants; beside a text model there may be others
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|\.masked_bias$|^(model\.)?(vision_tower|multi_modal_projector)\.")
_TEXT_PREFIX = re.compile(r"^(model\.language_model|language_model\.model)\.|^language_model\.(?=lm_head)")


def load_model(
    path: Path | str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: str = "auto",
    quantization: str | None = None,
) -> LanguageModel:
    """Build the model of a directory and fill its weights.

    `load_format` dummy: with random ones, from config.json alone, the same on every run. `quantization` fp8: the
    projections' weights, each as it is read. Raises ModelError for an unsupported model, for pickle weights, for torn
    files, and for tensors that are missing, unexpected or of another shape than config.json says; UsageError for a
    device that cannot do what was asked.
    """
    path, is_dummy = Path(path), load_format == "dummy"
    config = ModelConfig.from_dir(path)
    if quantization is not None:
        refuse_quantization(config, torch.device(device))
    files = [] if is_dummy else _weight_files(path)
    if not isinstance(config, DecoderConfig):
        from bulkrun.models.general_loader import load_general_model  # transformers takes seconds to import

        return load_general_model(path, config, dtype=dtype, device=device, is_dummy=is_dummy)
    model = _empty_model(config, dtype, device, quantization)
    if is_dummy:
        fill_with_random_weights(model)
    else:
        _fill(model, files, path)
    model.pack_weights()
    return model.eval()


def _empty_model(
    config: DecoderConfig, dtype: torch.dtype, device: torch.device | str, quantization: str | None
) -> Decoder:
    """The decoder on its device, with whatever the memory held as weights."""
    with torch.device("meta"):
        model = Decoder(config)
    model.cast(dtype)
    if quantization == "fp8":
        quantize_projections(model)
    model.to_empty(device=device)
    model.inv_freqs = {rope: inv_freq.to(device) for rope, inv_freq in model.inv_freqs.items()}
    model.tie_weights()
    return model


def default_dtype(config: ModelConfig, device: torch.device | str) -> torch.dtype:
    """The model's dtype; on a CPU bfloat16 only where the processor multiplies it natively, and never float16."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    if torch.device(device).type != "cpu" or dtype == torch.float32:
        return dtype
    return torch.bfloat16 if dtype == torch.bfloat16 and cpu_multiplies_bfloat16() else torch.float32


def cpu_multiplies_bfloat16() -> bool:
    """Whether this processor has matrix units for bf16 and this torch uses them."""
    return can_pack_bfloat16() and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


def _weight_files(path: Path) -> list[Path]:
    """The safetensors files to read: those of the index, else the one there is."""
    index = path / _INDEX
    if index.is_file():
        return _indexed_files(index)
    files = (
        [path / "model.safetensors"] if (path / "model.safetensors").is_file() else sorted(path.glob("*.safetensors"))
    )
    if len(files) == 1:
        return files
    if len(files) > 1:
        raise ModelError(f"{path}: {len(files)} safetensors files but no {_INDEX}; download the model again")
    pickles = sorted(p.name for pattern in _PICKLES for p in path.glob(pattern))
    if pickles:
        raise ModelError(
            f"{path}: weights only as pickle ({', '.join(pickles[:3])}), which can run code and is refused; convert "
            "them where you trust them: AutoModelForCausalLM.from_pretrained(path).save_pretrained(new_path)"
        )
    raise ModelError(f"{path}: no *.safetensors; download the model's weights")


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index}: not a safetensors index ({error!r}); download it again") from None
    for name in names:
        file = index.parent / str(name)
        if file.parent != index.parent or not file.is_file():
            raise ModelError(f"{file}: named in {index.name} but not there; download it again")
    return [index.parent / name for name in names]


def _fill(model: Decoder, files: list[Path], path: Path) -> None:
    wanted = dict(targets(model))
    missing = set(wanted)
    for name, tensor in _tensors(files):
        if name in wanted:
            _copy(tensor, wanted[name], name, path)
            missing.discard(name)
        elif not (_IGNORED.search(name) or (name == "lm_head.weight" and model.config.tie_word_embeddings)):
            raise ModelError(
                f"{path}: tensor {name} does not belong to a {model.config.architecture} with this config.json; "
                "the checkpoint is of another kind"
            )
    if missing:
        shown = ", ".join(sorted(missing)[:5]) + (", ..." if len(missing) > 5 else "")
        raise ModelError(f"{path}: {len(missing)} of {len(wanted)} tensors are missing: {shown}; download it again")


def _tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        read_header(file)
        try:
            with safe_open(file, framework="pt", device="cpu") as stream:
                for name in stream.keys():  # noqa: SIM118 - not a mapping
                    yield _text_name(name), stream.get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{file}: torn or damaged ({error}); download it again") from None


def _text_name(name: str) -> str:
    """A tensor's name as it is where there is nothing but a text model."""
    match = _TEXT_PREFIX.match(name)
    return name if match is None else name.replace(match[0], "model." if match[1] else "", 1)


def _copy(tensor: torch.Tensor, target: Target, name: str, path: Path) -> None:
    if tuple(tensor.shape) != target.shape:
        raise ModelError(
            f"{path}: tensor {name} is {list(tensor.shape)}, but config.json makes it {list(target.shape)}; "
            "config.json and weights are of different models"
        )
    if not tensor.is_floating_point():
        raise ModelError(f"{path}: tensor {name} holds {tensor.dtype}: quantized weights are not supported")
    if target.scale is not None:
        store_quantized(tensor, target.view, target.scale)
        return
    target.view.copy_(tensor)
    if target.offset:
        target.view.add_(target.offset)
