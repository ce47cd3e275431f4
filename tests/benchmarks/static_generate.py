"""transformers' static `generate` over requests of different lengths: batches of like output length, left padding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.benchmarks.work import Work


def load_transformers(folder: Path, dtype: str) -> transformers.PreTrainedModel:
    """The checkpoint as transformers runs it."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


@torch.inference_mode()
def run_static(
    model: transformers.PreTrainedModel, work: Sequence[Work], batch_size: int, *, do_sample: bool = False, **how: Any
) -> list[list[int]]:
    """Output tokens of every request; each batch runs to its longest, what is too long is cut off.

    how: `temperature`, `top_p`, `top_k`, where tokens are drawn.
    """
    outputs: list[list[int]] = [[] for _ in work]
    order = sorted(range(len(work)), key=lambda i: (work[i].num_output_tokens, len(work[i].prompt_token_ids)))
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        input_ids, attention_mask = _padded([work[i].prompt_token_ids for i in batch])
        generated = model.generate(
            input_ids,
            attention_mask=attention_mask,
            max_new_tokens=max(work[i].num_output_tokens for i in batch),
            do_sample=do_sample,
            **how,
            eos_token_id=None,
            pad_token_id=0,
        )
        for row, i in zip(generated[:, input_ids.shape[1] :].tolist(), batch, strict=True):
            outputs[i] = row[: work[i].num_output_tokens]
    return outputs


def _padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(prompt) for prompt in prompts)
    input_ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, width - len(prompt) :] = 1
    return input_ids, attention_mask
