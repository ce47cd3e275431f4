"""bulkrun: offline bulk LLM inference, every row exactly once.

From Python: `LLM` answers prompts, `run_job` runs what a job file describes. Both are loaded when they are first used,
so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bulkrun.launch.python_api.llm import LLM
    from bulkrun.launch.python_api.prompt_stream import RequestOutput
    from bulkrun.launch.python_api.run_job import run_job
    from bulkrun.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__", "run_job"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from bulkrun.launch.python_api.llm import LLM

        return LLM
    if name == "run_job":
        from bulkrun.launch.python_api.run_job import run_job

        return run_job
    if name == "RequestOutput":
        from bulkrun.launch.python_api.prompt_stream import RequestOutput

        return RequestOutput
    if name == "SamplingParams":
        from bulkrun.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
