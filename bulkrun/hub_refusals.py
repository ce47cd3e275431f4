"""What the Hugging Face hub means when it does not give a repository, in plain words: of models and of datasets.

Standard library only until it is asked; the hub's own library is loaded by whoever asks it for files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

_NO_TIME, _SERVER_FAILED = 429, 500


def has_no_time(error: HfHubHTTPError) -> bool:
    """Whether the same request may well succeed later."""
    status = error.response.status_code
    return status == _NO_TIME or status >= _SERVER_FAILED


def refusal(error: HfHubHTTPError, repository: str) -> str:
    """Why the hub does not give `repository`, and what to do. One that is closed to somebody is not there for them."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, RevisionNotFoundError):
        return f"the hub's {repository} has no such revision (a branch, a tag or a commit)"
    if isinstance(error, GatedRepoError):
        return f"{repository} is gated; ask for access on its page, then log in with `hf auth login`, or set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return f"the hub has no {repository}, or not for you; check the name, or log in with `hf auth login`"
    status = error.response.status_code
    if has_no_time(error):
        return f"the hub has no time (HTTP {status}); run the same command again"
    return f"the hub refuses (HTTP {status}); check the name and HF_TOKEN"
