"""The name of a model or an adapter into a directory: bundled, local, or from the hub. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from bulkrun.errors import ModelError, first_line
from bulkrun.hub_refusals import refusal
from bulkrun.models.config.adapter_config import AdapterConfig
from bulkrun.models.config.classification_config import ClassificationConfig
from bulkrun.models.config.embedding_config import LENGTH_FILES, PROMPTS_FILE, EmbeddingConfig
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.config.sentence_modules import MODULES
from bulkrun.models.files.weight_files import ADAPTER
from bulkrun.settings import Task

BUNDLED_PREFIX = "bundled:"
_MODEL_KEY, ADAPTER_KEY = "model", "engine.adapter"
_HUB_PATTERNS = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt"]
_NOT_FROM_HUB = ["consolidated*", "*/*"]  # the same weights under other names; adapters, exports to other formats
# of models that embed; the folders of their modules begin with a digit (1_Pooling), those of exports do not
_MORE_CONFIGS: Mapping[Task, Sequence[str]] = {
    "generate": (),
    "embed": (MODULES, PROMPTS_FILE, LENGTH_FILES, "tokenizer_config.json", "*/config.json"),
    "classify": (LENGTH_FILES, "tokenizer_config.json"),
}
_CHECKS: Mapping[Task, Callable[[Path], object]] = {
    "generate": ModelConfig.from_dir,
    "embed": EmbeddingConfig.from_dir,
    "classify": ClassificationConfig.from_dir,
}
_NOT_FROM_EMBEDDING_HUB = ["consolidated*", "[!0-9]*/*", "*/*/*"]


def resolve_model(name: str, *, bundled_root: Path, task: Task = "generate") -> Path:
    """The directory of a model: `bundled:NAME` under `bundled_root`, a local directory, or else a hub id, which may say
    `@REVISION` behind it (a branch, a tag or a commit).

    `task` is what a model from the hub is for: which files are wanted, and what must be in config.json before gigabytes
    are fetched, is not the same. Raises ModelError that says what was tried and what to do.
    """
    if name.startswith(BUNDLED_PREFIX):
        return _bundled(name, bundled_root)
    local = _local(name, _MODEL_KEY, "config.json and the safetensors")
    return local or _from_hub(name, _MODEL_KEY, lambda: _downloaded(name, task))


def resolve_adapter(name: str, key: str = ADAPTER_KEY) -> Path:
    """The directory of a LoRA adapter: a local one, or else a hub id's, as of a model. `key`: where the job has it.

    Raises ModelError, also for an adapter of another kind.
    """
    path = _local(name, key, f"{ADAPTER} and its safetensors")
    path = path or _from_hub(name, key, lambda: _downloaded_adapter(name))
    AdapterConfig.from_dir(path)
    return path


def _local(name: str, key: str, holds: str) -> Path | None:
    """The directory of that name, None where it may be a hub id. Raises ModelError, naming the key, for neither."""
    path = Path(name)
    with suppress(RuntimeError):  # nobody has that name
        path = path.expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelError(f"{key}: {name!r} is a file; give the directory that holds {holds}")
    if path.is_absolute() or name.startswith((".", "~")) or _hub_id(name)[0].count("/") > 1:
        raise ModelError(f"{key}: no such directory: {name!r}; check the path (relative ones start here: {Path.cwd()})")
    return None


def _bundled(name: str, bundled_root: Path) -> Path:
    path = bundled_root / name.removeprefix(BUNDLED_PREFIX)
    if path.parent == bundled_root and (path / "config.json").is_file():
        return path
    have = sorted(p.parent.name for p in bundled_root.glob("*/config.json"))
    known = ", ".join(BUNDLED_PREFIX + model for model in have) or "none in this installation"
    raise ModelError(f"model: {name!r} is not bundled; these are: {known}")


def _from_hub(name: str, key: str, download: Callable[[], Path]) -> Path:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    tried = f"no directory {name!r} here ({Path.cwd()}), and"
    try:
        return download()
    except HFValidationError:
        raise ModelError(f"{key}: {tried} it is not a hub id (owner/name) either; check the name") from None
    except LocalEntryNotFoundError:
        raise ModelError(
            f"{key}: {tried} the hub cannot be reached and it is not in its local cache; download it where there is "
            f"network (`hf download {name.replace('@', ' --revision ', 1)}`) and give the directory"
        ) from None
    except HfHubHTTPError as error:
        raise ModelError(f"{key}: {tried} {refusal(error, _hub_id(name)[0])}") from None
    except OSError as error:
        raise ModelError(f"{key}: {tried} the hub did not give it: {first_line(error)}; check the name") from None


def _hub_id(name: str) -> tuple[str, str | None]:
    """OWNER/NAME and the revision, None where the name says none."""
    repository, _, revision = name.partition("@")
    return repository, revision or None


def _snapshot(name: str, wanted: Sequence[str], ignored: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    repository, revision = _hub_id(name)
    found = snapshot_download(repository, revision=revision, allow_patterns=list(wanted), ignore_patterns=list(ignored))
    return Path(found)


def _downloaded(name: str, task: Task) -> Path:
    """The directory of a whole model; what it is gets looked at before gigabytes of what cannot be run."""
    ignored = _NOT_FROM_EMBEDDING_HUB if task == "embed" else _NOT_FROM_HUB
    configs = ["config.json", ADAPTER, *_MORE_CONFIGS[task]]
    _CHECKS[task](_snapshot(name, configs, ignored))
    return _snapshot(name, _HUB_PATTERNS, ignored)


def _downloaded_adapter(name: str) -> Path:
    """The directory of an adapter without the folders of its training (checkpoint-500); modules' begin with a digit."""
    return _snapshot(name, _HUB_PATTERNS, _NOT_FROM_EMBEDDING_HUB)
