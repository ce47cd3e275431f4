"""What an adapter's directory says of itself: adapter_config.json as PEFT writes it. Torch-free.

Read here is LoRA, in the forms that can be added to the base model's weights once, when they are loaded: with ranks and
scales by module, scaled by the root of the rank (rsLoRA), and with magnitudes of rows (DoRA).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.config_file import parsed, read_object
from bulkrun.models.files.safetensors_header import refuse_torn, stored_shapes
from bulkrun.models.files.weight_files import ADAPTER

_WEIGHTS, _PICKLE = "adapter_model.safetensors", "adapter_model.bin"
# Keys that make another sum of it than is worked out here.
_NOT_READ = (
    "alora_invocation_tokens", "arrow_config", "ensure_weight_tying", "kasa_config", "layer_replication", "lora_bias",
    "monteclora_config", "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora", "velora_config",
)  # fmt: skip

_HEADS = (".score.weight", ".classifier.weight", ".classifier.out_proj.weight")  # the last matrix of each
_INITS = ("gaussian", "eva", "orthogonal")  # those of init_lora_weights that leave the base's weights as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """One LoRA adapter."""

    file: Path
    base: str  # the model that it was trained on, as its maker called it
    alpha: float
    alphas: Mapping[re.Pattern[str], float]  # of some modules, by what fits their names
    by_root: bool  # alpha is divided by the rank's root, not by the rank
    has_magnitudes: bool
    is_transposed: bool  # the weights lie [I, O]
    classifies: bool  # trained with a head for labels, which it holds

    @property
    def weights(self) -> Path:
        """The file that holds its tensors."""
        return self.file.parent / _WEIGHTS

    def num_labels(self) -> int | None:
        """How many outputs the head has that it holds; None where it holds none that is known. Raises ModelError."""
        rows = [shape[0] for name, shape in stored_shapes(self.weights).items() if name.endswith(_HEADS)]
        return rows[0] if len(rows) == 1 else None

    def scale(self, module: str, rank: int) -> float:
        """What the product of a module's two matrices is multiplied with."""
        fits = (alpha for pattern, alpha in self.alphas.items() if pattern.match(module))
        return next(fits, self.alpha) / (rank**0.5 if self.by_root else rank)

    @classmethod
    def from_dir(cls, path: Path) -> AdapterConfig:
        """Read an adapter's directory. Raises ModelError, naming the file, for what is broken or cannot be added."""
        file = path / ADAPTER
        raw = read_object(file)
        if raw is None:
            raise ModelError(f"{path}: no {ADAPTER}; engine.adapter is a LoRA adapter's directory, as PEFT saves it")
        _refuse_missing(path)
        return parsed(file, raw, lambda raw: _parsed(file, raw))


def _parsed(file: Path, raw: Mapping[str, Any]) -> AdapterConfig:
    _refuse_other_kinds(raw)
    return AdapterConfig(
        file=file,
        base=str(raw.get("base_model_name_or_path")),
        alpha=float(raw["lora_alpha"]),
        alphas={_pattern(name): float(alpha) for name, alpha in (raw.get("alpha_pattern") or {}).items()},
        by_root=bool(raw.get("use_rslora")),
        has_magnitudes=bool(raw.get("use_dora")),
        is_transposed=bool(raw.get("fan_in_fan_out")),
        classifies=raw.get("task_type") == "SEQ_CLS",
    )


def _pattern(name: str) -> re.Pattern[str]:
    """What finds the modules of a key of `alpha_pattern`: the end of a name, from a point on."""
    try:
        return re.compile(rf"(.*\.)?({name})$")
    except re.error as error:
        raise ModelError(f"alpha_pattern: {name!r} is no regular expression ({error}); fix it") from None


def _refuse_missing(path: Path) -> None:
    if (path / _WEIGHTS).is_file():
        refuse_torn(path / _WEIGHTS)
        return
    if (path / _PICKLE).is_file():
        raise ModelError(
            f"{path}: only {_PICKLE}, a pickle, which can run code and is refused; convert it where you trust it: "
            "PeftModel.from_pretrained(base, path).save_pretrained(new_path)"
        )
    raise ModelError(f"{path}: no {_WEIGHTS}; download the adapter again")


def _refuse_other_kinds(raw: Mapping[str, Any]) -> None:
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"peft_type {kind!r} is not supported, only LORA; merge it into its base model with PEFT")
    others = [key for key in _NOT_READ if raw.get(key)]
    if isinstance(began := raw.get("init_lora_weights"), str) and began not in _INITS:
        others.append(f"init_lora_weights {began!r}")  # the base that it belongs to is not the one it was made from
    if raw.get("use_dora") and raw.get("fan_in_fan_out"):
        others.append("use_dora with fan_in_fan_out")
    if others:
        raise ModelError(f"{', '.join(others)}: not supported; merge the adapter into its base model with PEFT")
