"""The chat template that a job names: a file's, or the model's own. Knows no Jinja."""

from __future__ import annotations

from bulkrun.data.storage.paths import user_path
from bulkrun.errors import JobFileError
from bulkrun.job.jobfile.prompt import PromptSpec

OWN_WORDS = ("auto", "none")


def named_template(spec: PromptSpec) -> str | None:
    """The source of the template file that the job names; None where it names none. Raises JobFileError."""
    if spec.chat_template in OWN_WORDS:
        return None
    try:
        return user_path(spec.chat_template).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise JobFileError([f"prompt.chat_template: cannot read {spec.chat_template!r}: {reason}"]) from None
