"""Whether a model of the general path gives, over the paged cache, the logits of its own attention.

Nothing else can know: an architecture may add a bias to its scores, mix neighbouring tokens or keep a state without
saying so. Two short sequences in chunks, side by side, beside the same ones alone: a moment next to the loading.
Rounding hides what is small, so all of it is computed in float32, whatever the weights are stored in.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from bulkrun.errors import ModelError, described
from bulkrun.models.general.comparison import distance, tolerance
from bulkrun.models.general.general_model import ATTENTION_NAME, GeneralModel
from bulkrun.models.general.in_float32 import in_float32
from bulkrun.models.kv_cache import KVCache
from bulkrun.ops import AttentionMetadata

_BLOCK_SIZE = 8
_LENS = (19, 12)
_STEPS = (((0, 11), (0, 12)), ((11, 18), (12, 12)), ((18, 19), (12, 12)))  # per step: each sequence's tokens
_FIRST_COMPARED = (11, 0)  # of the first sequence what reads the cache, of the second what has a neighbour
_EXPERTS_TOLERANCE = 0.6  # in half precision, where rounding sends a token to another expert: 0.28 was seen
_NUM_EXPERTS_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@torch.inference_mode()
def check_against_own_attention(model: GeneralModel) -> None:
    """Raise ModelError, naming the architecture, for a model that is not the same over the paged cache."""
    name = model.config.architecture
    if model.model.base_model is model.model:
        raise ModelError(f"{name} is not supported: transformers does not tell its layers from its head")
    if "position_ids" not in inspect.signature(model.model.base_model.forward).parameters:
        raise ModelError(f"{name} is not supported: it takes no positions, so sequences cannot share a step")
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.model.modules()):
        raise ModelError(f"{name} is not supported: it counts positions from its padding token's id, not from 0")
    worst, allowed = _worst_distance(model)
    if not worst < allowed:
        raise ModelError(
            f"{name} is not supported: over the paged cache its logits are off by {worst:.1%} of their spread; "
            "something in it besides attention looks at other tokens"
        )


def _worst_distance(model: GeneralModel) -> tuple[float, float]:
    """How far the logits are apart, and how far they may be."""
    if model.dtype != torch.float32:
        # Code that casts to a dtype of its own choice, and memory too small for a layer in float32, leave the other way
        with suppress(ModelError, torch.OutOfMemoryError), in_float32(model.model):
            return _distance_in(torch.float32, model), tolerance(torch.float32)
    return _distance_in(model.dtype, model), _tolerance(model)


def _distance_in(dtype: torch.dtype, model: GeneralModel) -> float:
    name, limit = model.config.architecture, min(model.config.vocab_size, 1000)
    sequences = [torch.arange(7, 7 + 13 * length, 13, device=model.device) % limit for length in _LENS]
    with _errors_named(name, "transformers' own code fails with it"):  # before anything of ours has run
        theirs = [_own_logits(model, tokens) for tokens in sequences]
    with _errors_named(name, "it fails over the paged cache"):
        ours = _paged_logits(model, sequences, dtype)
    if model.step.layers != list(range(len(model.config.layers_kv))):
        raise ModelError(f"{name} is not supported: its attention cannot be exchanged in transformers")
    compared = zip(ours, theirs, _FIRST_COMPARED, strict=True)
    return max(distance(our[first:], their[first:]) for our, their, first in compared)


@contextmanager
def _errors_named(name: str, what: str) -> Iterator[None]:
    """Whatever goes wrong in a model's own code is a ModelError, but for memory, which somebody may free."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except ModelError as error:
        raise ModelError(f"{name} is not supported: {error}") from None
    except Exception as error:
        raise ModelError(f"{name} is not supported: {what} ({described(error)})") from error


def _paged_logits(model: GeneralModel, sequences: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Logits [len, V] of each sequence, computed in the chunks of _STEPS, keys and values in `dtype`."""
    width = -(-max(_LENS) // _BLOCK_SIZE)
    tables = torch.arange(1, 1 + len(_LENS) * width, dtype=torch.int32).view(len(_LENS), width)
    cache = KVCache.allocate(model.config, tables.numel() + 1, _BLOCK_SIZE, dtype, model.device)
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    for chunks in _STEPS:
        running = [index for index, (start, end) in enumerate(chunks) if start < end]
        positions = [torch.arange(*chunks[index]) for index in running]
        meta = _metadata([chunks[index] for index in running], tables[running], positions, model.device)
        ids_T = torch.cat([sequences[index][slice(*chunks[index])] for index in running])
        logits = model.compute_logits(model(ids_T, torch.cat(positions).to(model.device), cache, meta))
        for index, part in zip(running, logits.split([len(own) for own in positions]), strict=True):
            parts[index].append(part)
    return [torch.cat(own) for own in parts]


def _metadata(
    chunks: list[tuple[int, int]], tables: torch.Tensor, positions: list[torch.Tensor], device: torch.device
) -> AttentionMetadata:
    slots = [
        table[own // _BLOCK_SIZE] * _BLOCK_SIZE + own % _BLOCK_SIZE
        for table, own in zip(tables, positions, strict=True)
    ]
    lens = torch.tensor([0, *(len(own) for own in positions)])
    return AttentionMetadata(
        slot_mapping_T=torch.cat(slots).long().to(device),
        block_tables_SM=tables.to(device),
        context_lens_S=torch.tensor([end for _, end in chunks], dtype=torch.int32, device=device),
        cu_seqlens_q=lens.cumsum(0).int().to(device),
        num_decode_seqs=1 if lens.tolist() == [0, 1] else 0,
        max_query_len=int(lens.max()),
        max_context_len=max(end for _, end in chunks),
    )


def _tolerance(model: GeneralModel) -> float:
    has_experts = any(getattr(model.model.config, name, None) for name in _NUM_EXPERTS_NAMES)
    return _EXPERTS_TOLERANCE if has_experts and model.dtype != torch.float32 else tolerance(model.dtype)


def _own_logits(model: GeneralModel, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [len, V] of one sequence by the model as transformers runs it."""
    config = model.model.config
    config._attn_implementation = "eager"
    try:
        return model.model(input_ids=tokens[None], use_cache=False).logits[0].float()
    finally:
        config._attn_implementation = ATTENTION_NAME
