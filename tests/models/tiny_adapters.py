"""LoRA adapters of the tiny models, made and applied by PEFT: the ground truth of what an adapter changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
from transformers import PreTrainedModel

QKV = ("q_proj", "k_proj", "v_proj")


def save_adapter(path: Path, base: PreTrainedModel, *, seed: int = 0, **lora: Any) -> peft.PeftModel:
    """Write an adapter whose matrices are random and large enough to change every answer, and return it on its base.

    `lora` are keys of PEFT's LoraConfig. `base` is wrapped where it is.
    """
    torch.manual_seed(seed)
    model = peft.get_peft_model(base, peft.LoraConfig(**({"r": 5, "lora_alpha": 7} | lora))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.normal_(std=0.3)
            elif parameter.requires_grad:  # magnitudes, biases and modules that are saved whole
                parameter.mul_(torch.empty_like(parameter).uniform_(0.7, 1.3))
    model.save_pretrained(path)
    return model
