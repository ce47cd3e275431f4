"""`hf://` paths: what they mean, that all of it comes, and what is said where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from bulkrun.data.inputs.files import find_files
from bulkrun.data.storage.hub import HubPath
from bulkrun.errors import InputError
from tests.hub_server import Hub

ROW = b'{"x": 1}\n'
FILES = {
    "README.md": b"# data",
    "all.jsonl": ROW,
    "train/lang=en/a.jsonl": ROW,
    "train/lang=de/b.jsonl": ROW,
    "train/.hidden.jsonl": ROW,
    "train/picture.png": b"PNG",
    "deep/er/c.CSV": b"x\n1\n",
}


@pytest.fixture
def dataset(hub: Hub) -> Hub:
    hub.put("me/data", FILES)
    hub.put("me/data", {"default/0.parquet": b"PAR1"}, "refs/convert/parquet")
    return hub


def names(url: str) -> list[str]:
    return [str(file.path).split("/snapshots/")[1].split("/", 1)[1] for file in find_files(url)]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("", ["all.jsonl", "deep/er/c.CSV", "train/lang=de/b.jsonl", "train/lang=en/a.jsonl"]),
        ("/", ["all.jsonl", "deep/er/c.CSV", "train/lang=de/b.jsonl", "train/lang=en/a.jsonl"]),
        ("@main/train", ["train/lang=de/b.jsonl", "train/lang=en/a.jsonl"]),
        ("/train/lang=en/a.jsonl", ["train/lang=en/a.jsonl"]),
        ("/*.jsonl", ["all.jsonl"]),
        ("/**/*.jsonl", ["all.jsonl", "train/lang=de/b.jsonl", "train/lang=en/a.jsonl"]),
        ("/train/lang=*", ["train/lang=de/b.jsonl", "train/lang=en/a.jsonl"]),
        ("/train/.hidden.jsonl", ["train/.hidden.jsonl"]),
        ("@refs/convert/parquet/default", ["default/0.parquet"]),
        ("@refs%2Fconvert%2Fparquet/default/*.parquet", ["default/0.parquet"]),
    ],
)
def test_a_path_means_what_it_would_mean_in_a_local_folder(dataset: Hub, path: str, expected: list[str]) -> None:
    assert names(f"hf://datasets/me/data{path}") == expected


def test_only_what_the_path_means_is_downloaded(dataset: Hub) -> None:
    names("hf://datasets/me/data/train")
    downloaded = {asked.split("/", 6)[6] for asked in dataset.asked if "/resolve/" in asked}
    assert downloaded == {"train/lang=de/b.jsonl", "train/lang=en/a.jsonl", "train/.hidden.jsonl"}


def test_folders_of_the_dataset_become_columns_and_those_of_the_cache_do_not(dataset: Hub) -> None:
    assert [file.folders for file in find_files("hf://datasets/me/data/train")] == ["lang=de", "lang=en"]


def test_files_are_known_by_their_bytes_and_not_by_when_they_were_downloaded(dataset: Hub, tmp_path: Path) -> None:
    url = "hf://datasets/me/data/all.jsonl"
    before = find_files(url)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "another node"))
        elsewhere = find_files(url)[0]
    assert elsewhere.path != before.path
    assert (before.mtime_ns, before.fingerprint()) == (elsewhere.mtime_ns, elsewhere.fingerprint())
    dataset.put("me/data", FILES | {"README.md": b"# other words"})
    assert find_files(url)[0].fingerprint() == before.fingerprint()
    dataset.put("me/data", FILES | {"all.jsonl": b'{"x": 2}\n'})
    assert find_files(url)[0].fingerprint() != before.fingerprint()


def test_without_the_hub_the_cache_is_the_dataset_if_all_of_it_is_there(dataset: Hub) -> None:
    names("hf://datasets/me/data/train")
    dataset.status = 503
    assert names("hf://datasets/me/data/train") == ["train/lang=de/b.jsonl", "train/lang=en/a.jsonl"]
    with pytest.raises(InputError, match=r"its cache lacks files of it.*hf download --repo-type dataset me/data"):
        names("hf://datasets/me/data/all.jsonl")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("hf://datasets/me/data/nope.jsonl", "there is no such file or folder"),
        ("hf://datasets/me/data/nope*.jsonl", "nothing matches 'hf://datasets/me/data/nope"),
        ("hf://datasets/me/data/README.md", "unknown kind of input file '.md'"),
        ("hf://datasets/me/data@v9/all.jsonl", "the hub's me/data has no such revision"),
        ("hf://datasets/me/other", "the hub has no me/other, or not for you"),
        ("https://huggingface.co/datasets/me/data/", "; write hf://datasets/me/data$"),
        ("https://huggingface.co/datasets/me/data/tree/main/train", "; write hf://datasets/me/data/train$"),
        (
            "https://huggingface.co/datasets/me/data/resolve/v2/a.csv?download=true",
            "; write hf://datasets/me/data@v2/a.csv$",
        ),
        ("https://example.org/datasets/me/data", "; copy the files"),
        ("hf://me/data", "write hf://datasets/OWNER/NAME/PATH"),
        ("hf://datasets/data", "write hf://datasets/OWNER/NAME/PATH"),
        ("hf://datasets/me/data/../../x.jsonl", "write hf://datasets/OWNER/NAME/PATH"),
    ],
)
def test_what_is_not_there_is_named_with_what_to_do(dataset: Hub, url: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem.replace("*", r"\*")):
        find_files(url)


def test_names_that_look_like_globs_are_downloaded_too() -> None:
    assert HubPath.of("hf://datasets/me/data/a[1].jsonl").patterns([]) == ["a[1].jsonl", "a[[]1].jsonl"]
