"""Datasets of the Hugging Face hub: `hf://datasets/OWNER/NAME[@REVISION]/PATH` as a path on this disk.

A run reads its input several times, through a night in which the network may go. So files are downloaded whole, into
the hub's own cache, and are files like any other from then on, all of one commit. Where the hub does not answer, the
revision is what the cache has of it. Token, endpoint and cache are those of the usual `HF_` variables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape, has_magic
from pathlib import Path
from urllib.parse import unquote

from bulkrun.errors import InputError, RunError, first_line
from bulkrun.hub_refusals import has_no_time, refusal

HUB_SCHEME = "hf://"
_DATASET = re.compile(
    r"hf://datasets/(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>refs/(convert|pr)/[^/]+|[^/]+))?(/(?P<path>.*))?"
)
_IN_A_BROWSER = re.compile(
    r"https?://huggingface\.co/(?P<name>datasets/[^/]+/[^/?]+)(/(tree|blob|resolve)/(?P<revision>[^/?]+))?(?P<path>/[^?]*)?"
    r"(\?.*)?"
)


def is_on_hub(path: str) -> bool:
    """Whether an input path names a dataset of the hub."""
    return path.startswith(HUB_SCHEME)


def of_a_browser(url: str) -> str | None:
    """What is to be written for the address of a dataset's page or file; None for any other address."""
    found = _IN_A_BROWSER.fullmatch(url)
    if found is None:
        return None
    revision = found["revision"]
    at = f"@{revision}" if revision and revision != "main" else ""
    return f"{HUB_SCHEME}{found['name']}{at}{(found['path'] or '').rstrip('/')}"


@dataclass(frozen=True, slots=True)
class HubPath:
    """A path in a dataset: a file, a folder ("" is all of it) or a glob; `url` is all of it as it was written."""

    url: str
    dataset: str
    revision: str
    path: str

    @classmethod
    def of(cls, url: str) -> HubPath:
        """Raises InputError where `url` is no path in a dataset."""
        found = _DATASET.fullmatch(url)
        path = (found["path"] or "").strip("/") if found else ""
        if found is None or not {".", ".."}.isdisjoint(path.split("/")):
            raise InputError(
                f"input.path: {url!r} is no path in a dataset of the hub; write hf://datasets/OWNER/NAME/PATH, or "
                "hf://datasets/OWNER/NAME@REVISION/PATH"
            )
        return cls(url, found["name"], unquote(found["revision"] or "main"), path)

    def patterns(self, endings: Iterable[str]) -> list[str]:
        """What to download, as the hub's library matches names: one of its `*` is any number of folders.

        What the path names, whatever it is, and below it the files with these `endings`.
        """
        as_glob = re.sub(r"\*\*(/\*\*)*/?", "*", self.path)
        named = sorted({escape(self.path), as_glob}) if self.path else []  # a file's own name may look like a glob
        folders = [f"{name}/" for name in named] or [""]
        return [*named, *(f"{folder}*{case}" for folder in folders for end in endings for case in (end, end.upper()))]


def fetch(wanted: HubPath, endings: Iterable[str]) -> Path:
    """The local path that means what `wanted` does in its dataset; only what the cache lacks is downloaded.

    Raises InputError where there is no such dataset, revision or path, no access, or neither a hub nor a cache, and
    RunError where the hub has no time.
    """
    from huggingface_hub import snapshot_download

    with _plain_errors(wanted):
        folder = snapshot_download(
            wanted.dataset, repo_type="dataset", revision=wanted.revision, allow_patterns=wanted.patterns(endings)
        )
    path = Path(folder, wanted.path)
    if not has_magic(wanted.path) and not path.exists():
        raise InputError(f"input.path: {wanted.url!r}: there is no such file or folder, or none of these kinds in it")
    return path


@contextmanager
def _plain_errors(wanted: HubPath) -> Iterator[None]:
    """Turn what the hub's library raises into one line that names the path and what to do."""
    from huggingface_hub import errors
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    unanswered = errors.HTTPError  # type: ignore[attr-defined]  # its httpx's, which has had two names
    what = f"input.path: {wanted.url!r}"
    try:
        yield
    except LocalEntryNotFoundError as error:
        raise InputError(
            f"{what}: the hub does not answer, or is not to be asked, and its cache lacks files of it; download them "
            f"where there is network: hf download --repo-type dataset {wanted.dataset} --revision {wanted.revision}"
        ) from error
    except HfHubHTTPError as error:
        kind = RunError if has_no_time(error) else InputError
        raise kind(f"{what}: {refusal(error, wanted.dataset)}") from error
    except (unanswered, OSError) as error:
        raise RunError(f"{what}: downloading failed: {first_line(error)}; run the same command again") from error
