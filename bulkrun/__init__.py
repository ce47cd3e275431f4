"""bulkrun: offline bulk LLM inference, every row exactly once.

From Python: `LLM` answers prompts, `Embedder` makes vectors of texts, `Classifier` labels, `run_job` runs what a job
file describes. All are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bulkrun.launch.python_api.classifier import ClassificationOutput, Classifier
    from bulkrun.launch.python_api.embedder import Embedder, EmbeddingOutput
    from bulkrun.launch.python_api.llm import LLM
    from bulkrun.launch.python_api.run_job import run_job
    from bulkrun.launch.python_api.text_outputs import RequestOutput
    from bulkrun.request import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "ClassificationOutput",
    "Classifier",
    "Embedder",
    "EmbeddingOutput",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "run_job",
]
_HOMES = {
    "LLM": "bulkrun.launch.python_api.llm",
    "RequestOutput": "bulkrun.launch.python_api.text_outputs",
    "Classifier": "bulkrun.launch.python_api.classifier",
    "ClassificationOutput": "bulkrun.launch.python_api.classifier",
    "Embedder": "bulkrun.launch.python_api.embedder",
    "EmbeddingOutput": "bulkrun.launch.python_api.embedder",
    "SamplingParams": "bulkrun.request",
    "run_job": "bulkrun.launch.python_api.run_job",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
