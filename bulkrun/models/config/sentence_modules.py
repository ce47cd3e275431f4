"""The modules behind the transformer that a sentence-transformers directory lists: pooling, Dense, Normalize.

Torch-free. What a file says and cannot be done is refused by name: a vector that differs a little from the model's own
looks like one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from bulkrun.errors import ModelError
from bulkrun.models.config.config_file import parsed, read_json, read_object
from bulkrun.settings import Pooling

MODULES = "modules.json"
Activation = Literal["Identity", "Tanh", "ReLU", "GELU", "Sigmoid"]
_ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
_Config = TypeVar("_Config")
_PACKAGE = "sentence_transformers."
_ORDER = "Transformer, Pooling, any number of Dense, and perhaps Normalize is the order that is supported"
_POOLING_KEYS: Mapping[str, str] = {  # key of older files -> the mode's name in newer ones
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_POOLINGS: Mapping[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A linear layer and an activation behind the pooling; its weights lie in `path`."""

    path: Path
    in_features: int
    out_features: int
    has_bias: bool
    activation: Activation


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """What modules.json and the folders that it names say."""

    pooling: Pooling
    dense: tuple[DenseConfig, ...]
    normalize: bool


def read_modules(path: Path) -> SentenceModules | None:
    """The modules of a model's directory, None where it lists none. Raises ModelError for any that is not supported."""
    file = path / MODULES
    if not file.exists():
        return None
    named = [_module(file, entry) for entry in _entries(file)]
    kinds, folders = [kind for kind, _ in named], [path / folder for _, folder in named]
    normalize, num_dense = kinds[-1:] == ["Normalize"], kinds.count("Dense")
    if kinds != ["Transformer", "Pooling", *["Dense"] * num_dense, *["Normalize"] * normalize]:
        raise ModelError(f"{file}: modules {', '.join(kinds) or 'none'}: {_ORDER}")
    if folders[0] != path:
        raise ModelError(f"{file}: the transformer lies in {named[0][1]!r}; move its files beside {MODULES}, path ''")
    dense = tuple(_read(folder, _dense) for folder in folders[2 : 2 + num_dense])
    return SentenceModules(_read(folders[1], _pooling), dense, normalize)


def module_folders(path: Path) -> list[Path]:
    """The folders that modules.json names and that are there. Raises ModelError for a broken file."""
    file = path / MODULES
    if not file.exists():
        return []
    folders = [path / _module(file, entry)[1] for entry in _entries(file)]
    return [folder for folder in folders if folder != path and folder.is_dir()]


def _entries(file: Path) -> list[Any]:
    entries = read_json(file)
    if not isinstance(entries, list):
        raise ModelError(f"{file}: holds a {type(entries).__name__}, not a list of modules; download the model again")
    return entries


def _module(file: Path, entry: Any) -> tuple[str, str]:
    """The kind of a module and its folder. Raises ModelError for one whose code would come from elsewhere."""
    if not (isinstance(entry, dict) and isinstance(entry.get("type"), str) and isinstance(entry.get("path"), str)):
        raise ModelError(f"{file}: {entry!r} is no module with a type and a path; download the model again")
    name, folder = entry["type"], entry["path"]
    if not name.startswith(_PACKAGE):
        raise ModelError(f"{file}: module {name} is code of the model's own, which is never run; take another model")
    if Path(folder).is_absolute() or ".." in Path(folder).parts:
        raise ModelError(f"{file}: module folder {folder!r} is not inside of the model's directory")
    return name.rsplit(".", 1)[-1], folder


def _read(folder: Path, parse: Callable[[Mapping[str, Any], Path], _Config]) -> _Config:
    """What `parse` makes of the config.json of a module's folder."""
    file = folder / "config.json"
    raw = read_object(file)
    if raw is None:
        raise ModelError(f"{file}: no such file, but {MODULES} names its folder; download the model again")
    return parsed(file, raw, lambda raw: parse(raw, folder))


def _pooling(raw: Mapping[str, Any], folder: Path) -> Pooling:
    given = raw.get("pooling_mode")
    if given is None:
        modes = [mode for key, mode in _POOLING_KEYS.items() if raw.get(key)]
        modes += [key for key, value in raw.items() if _is_unknown_mode(key) and value]
    else:
        modes = [given] if isinstance(given, str) else list(given)
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ModelError(f"pooling {' + '.join(map(str, modes)) or 'none'} is not supported; cls, mean or lasttoken is")
    pooling = _POOLINGS[modes[0]]
    if pooling == "mean" and raw.get("include_prompt") is False:
        raise ModelError("include_prompt false: a mean over the tokens without the prompt's is not supported")
    return pooling


def _is_unknown_mode(key: str) -> bool:
    return key.startswith("pooling_mode_") and key not in _POOLING_KEYS


def _dense(raw: Mapping[str, Any], folder: Path) -> DenseConfig:
    name = str(raw.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    activation = next((known for known in _ACTIVATIONS if known == name), None)
    if activation is None:
        raise ModelError(f"activation_function {name} is not supported; these are: {', '.join(_ACTIVATIONS)}")
    for key in ("module_input_name", "module_output_name"):
        if raw.get(key, "sentence_embedding") != "sentence_embedding":
            raise ModelError(f"{key} {raw[key]!r} is not supported; a Dense module works on sentence_embedding here")
    has_bias = bool(raw.get("bias", True))
    return DenseConfig(folder, int(raw["in_features"]), int(raw["out_features"]), has_bias, activation)
