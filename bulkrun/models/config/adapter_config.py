"""What an adapter's directory says of itself: adapter_config.json as PEFT writes it. Torch-free.

Read here is LoRA, in the forms that can be added to the base model's weights once, when they are loaded: with ranks and
scales by module, scaled by the root of the rank (rsLoRA), and with magnitudes of rows (DoRA).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bulkrun.errors import ModelError, shortened, shown_value
from bulkrun.models.config.config_file import parsed, read_object
from bulkrun.models.files.safetensors_header import refuse_torn, stored_shapes
from bulkrun.models.files.weight_files import ADAPTER

_Value = TypeVar("_Value")
BEFORE_NAMES = "base_model.model."  # what PEFT puts around a model
_WEIGHTS, _PICKLE = "adapter_model.safetensors", "adapter_model.bin"
# Keys that make another sum of it than is worked out here.
_NOT_READ = (
    "alora_invocation_tokens", "arrow_config", "ensure_weight_tying", "kasa_config", "layer_replication", "lora_bias",
    "monteclora_config", "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora", "velora_config",
)  # fmt: skip

_HEADS = (".score.weight", ".classifier.weight", ".classifier.out_proj.weight")  # the last matrix of each
_SHOWN_CHARS = 200  # of a path
_LARGEST = 3.4e38  # of float32, in which sums are worked out
_INITS = ("gaussian", "eva", "orthogonal")  # those of init_lora_weights that leave the base's weights as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """One LoRA adapter."""

    file: Path
    base: str  # the model that it was trained on, as its maker called it
    alpha: float
    alphas: Mapping[re.Pattern[str], float]  # of some modules, by what fits their names
    rank: int | None  # None: the tensors say it
    ranks: Mapping[re.Pattern[str], int]  # as `alphas`
    by_root: bool  # alpha is divided by the rank's root, not by the rank
    has_magnitudes: bool
    classifies: bool  # trained with a head for labels, which it holds

    @property
    def weights(self) -> Path:
        """The file that holds its tensors."""
        return self.file.parent / _WEIGHTS

    def num_labels(self) -> int | None:
        """How many outputs the head has that it holds; None where it holds none that is known. Raises ModelError."""
        heads = (shape for name, shape in stored_shapes(self.weights).items() if name.endswith(_HEADS))
        rows = [shape[0] for shape in heads if shape]
        return rows[0] if len(rows) == 1 else None

    def scale(self, module: str, rank: int) -> float:
        """What the product of a module's two matrices is multiplied with."""
        return _of_module(self.alphas, module, self.alpha) / (rank**0.5 if self.by_root else rank)

    def has_rank(self, module: str, rank: int) -> bool:
        """Whether a module's matrices may have that rank; another adapter's config would scale them wrongly."""
        return _of_module(self.ranks, module, self.rank) in (rank, None)

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
        base=shortened(str(raw.get("base_model_name_or_path")), _SHOWN_CHARS),
        alpha=_alpha("lora_alpha", raw["lora_alpha"]),
        alphas={pattern: _alpha("alpha_pattern", alpha) for pattern, alpha in _by_pattern(raw, "alpha_pattern")},
        rank=raw.get("r"),
        ranks=dict(_by_pattern(raw, "rank_pattern")),
        by_root=_flag(raw, "use_rslora"),
        has_magnitudes=_flag(raw, "use_dora"),
        classifies=raw.get("task_type") == "SEQ_CLS",
    )


def _alpha(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        raise ModelError(f"{key}: {shown_value(value)} is not a number to multiply with; fix it")
    return float(value)


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    if (value := raw.get(key)) not in (None, True, False):
        raise ModelError(f"{key}: {shown_value(value)} is neither true nor false; fix it")
    return bool(value)


def _by_pattern(raw: Mapping[str, Any], key: str) -> Iterator[tuple[re.Pattern[str], Any]]:
    """The values of some modules, each with what finds those: the end of a name, from a point on."""
    for name, value in (raw.get(key) or {}).items():
        try:
            yield re.compile(rf"(.*\.)?({name})$"), value
        except (re.error, OverflowError, RecursionError) as error:
            raise ModelError(f"{key}: {shown_value(name)} is no regular expression ({error}); fix it") from None


def _of_module(values: Mapping[re.Pattern[str], _Value], module: str, default: _Value) -> _Value:
    return next((value for pattern, value in values.items() if pattern.match(module)), default)


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
        raise ModelError(
            f"peft_type {shown_value(kind)} is not supported, only LORA; merge it into its base model with PEFT"
        )
    others = [key for key in _NOT_READ if raw.get(key)]
    if isinstance(began := raw.get("init_lora_weights"), str) and began not in _INITS:
        others.append(
            f"init_lora_weights {shown_value(began)}"
        )  # the base that it belongs to is not the one it was made from
    if others:
        raise ModelError(f"{', '.join(others)}: not supported; merge the adapter into its base model with PEFT")
