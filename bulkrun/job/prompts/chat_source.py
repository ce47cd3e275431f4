"""The file of a chat template that a job names. Knows no Jinja."""

from __future__ import annotations

from bulkrun.data.storage.paths import user_path
from bulkrun.errors import JobFileError
from bulkrun.job.jobfile.prompt import PromptSpec


def names_file(spec: PromptSpec) -> bool:
    """Whether the job names a file of a chat template."""
    return spec.chat_template not in ("auto", "none")


def named_template(spec: PromptSpec) -> str:
    """The source of the template whose file `chat_template` is, which is neither auto nor none. Raises JobFileError."""
    try:
        return user_path(spec.chat_template).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise JobFileError([f"prompt.chat_template: cannot read {spec.chat_template!r}: {reason}"]) from None
