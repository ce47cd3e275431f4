"""Weights from safetensors into a `Decoder`, tensor by tensor: memory never exceeds the model and one tensor.

Pickle weights are refused: they can run code. A missing, unexpected or mis-shaped tensor is an error that names it.
Knows Hugging Face's tensor names and where each goes in the fused parameters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from bulkrun.errors import ModelError
from bulkrun.models.config import ModelConfig
from bulkrun.models.decoder import Decoder
from bulkrun.models.layers import DecoderLayer, Linear
from bulkrun.models.model_dir import read_header
from bulkrun.ops.linear import can_pack_bfloat16

_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|\.masked_bias$")  # older checkpoints stored these constants


@dataclass(frozen=True, slots=True)
class _Target:
    """Where one checkpoint tensor goes: a view of a parameter, broadcast over heads for the q and k norms."""

    view: torch.Tensor
    shape: tuple[int, ...]  # what the checkpoint must hold


def load_model(path: Path | str, *, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    """Build the decoder of a model directory and fill its weights.

    Raises ModelError for an unsupported model, for pickle weights, for torn files, and for tensors that are
    missing, unexpected or of another shape than config.json says.
    """
    path = Path(path)
    config = ModelConfig.from_dir(path)
    files = _weight_files(path)
    with torch.device("meta"):
        model = Decoder(config).to(dtype)
    model.to_empty(device=device)
    model.inv_freq = model.inv_freq.to(device)
    model.tie_weights()
    _fill(model, files, path)
    model.pack_weights()
    return model.eval()


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
    targets = dict(_targets(model))
    missing = set(targets)
    for name, tensor in _tensors(files):
        if name in targets:
            _copy(tensor, targets[name], name, path)
            missing.discard(name)
        elif not (_IGNORED.search(name) or (name == "lm_head.weight" and model.config.tie_word_embeddings)):
            raise ModelError(
                f"{path}: tensor {name} does not belong to a {model.config.architecture} with this config.json; "
                "the checkpoint is of another kind"
            )
    if missing:
        shown = ", ".join(sorted(missing)[:5]) + (", ..." if len(missing) > 5 else "")
        raise ModelError(f"{path}: {len(missing)} of {len(targets)} tensors are missing: {shown}; download it again")


def _tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        read_header(file)
        try:
            with safe_open(file, framework="pt", device="cpu") as stream:
                for name in stream.keys():  # noqa: SIM118 - not a mapping
                    yield name, stream.get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{file}: torn or damaged ({error}); download it again") from None


def _copy(tensor: torch.Tensor, target: _Target, name: str, path: Path) -> None:
    if tuple(tensor.shape) != target.shape:
        raise ModelError(
            f"{path}: tensor {name} is {list(tensor.shape)}, but config.json makes it {list(target.shape)}; "
            "config.json and weights are of different models"
        )
    if not tensor.is_floating_point():
        raise ModelError(f"{path}: tensor {name} holds {tensor.dtype}: quantized weights are not supported")
    target.view.copy_(tensor)


def _targets(model: Decoder) -> Iterator[tuple[str, _Target]]:
    """Every tensor a checkpoint of this config must hold, and where it goes."""
    yield "model.embed_tokens.weight", _whole(model.embed_weight)
    yield "model.norm.weight", _whole(model.norm.weight)
    if not model.config.tie_word_embeddings:
        yield "lm_head.weight", _whole(model.lm_head.weight)
    for i, layer in enumerate(model.layers):
        yield from _layer_targets(f"model.layers.{i}.", layer, model.config)


def _layer_targets(prefix: str, layer: DecoderLayer, config: ModelConfig) -> Iterator[tuple[str, _Target]]:
    attention, mlp = layer.attention, layer.mlp
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    ffn = config.intermediate_size
    yield f"{prefix}input_layernorm.weight", _whole(layer.input_norm.weight)
    yield f"{prefix}post_attention_layernorm.weight", _whole(layer.post_attention_norm.weight)
    yield from _parts(
        f"{prefix}self_attn.", attention.qkv_proj, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
    )
    yield from _parts(f"{prefix}self_attn.", attention.o_proj, {"o_proj": config.hidden_size})
    yield from _parts(f"{prefix}mlp.", mlp.gate_up_proj, {"gate_proj": ffn, "up_proj": ffn})
    yield from _parts(f"{prefix}mlp.", mlp.down_proj, {"down_proj": config.hidden_size})
    if attention.qk_norm_weight is not None:
        q_HD, k_KD = attention.qk_norm_weight.data.split((config.num_heads, config.num_kv_heads))
        yield f"{prefix}self_attn.q_norm.weight", _Target(q_HD, (config.head_dim,))
        yield f"{prefix}self_attn.k_norm.weight", _Target(k_KD, (config.head_dim,))


def _whole(parameter: nn.Parameter) -> _Target:
    return _Target(parameter.data, tuple(parameter.shape))


def _parts(prefix: str, fused: Linear, sizes: Mapping[str, int]) -> Iterator[tuple[str, _Target]]:
    """The parts of a fused projection: consecutive rows of its weight and bias."""
    for kind, parameter in (("weight", fused.weight), ("bias", fused.bias)):
        if parameter is not None:
            for name, part in zip(sizes, parameter.data.split(list(sizes.values())), strict=True):
                yield f"{prefix}{name}.{kind}", _Target(part, tuple(part.shape))
