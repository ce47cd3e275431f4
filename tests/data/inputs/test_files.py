from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from bulkrun.data.inputs.files import InputFile, find_files, open_stream
from bulkrun.data.storage.paths import user_path, would_take
from bulkrun.data.storage.remote import RemotePath
from bulkrun.errors import InputError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("d/b.jsonl", "d/a.jsonl", "d/sub/c.ndjson", "d/.hidden.jsonl", "d/_SUCCESS.jsonl", "d/_tmp/x.jsonl"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text('{"a": 1}\n')
    Path("d/README.md").write_text("not rows")
    return tmp_path


def names(paths: str | list[str]) -> list[str]:
    return [str(file.path) for file in find_files(paths)]


def test_a_directory_is_read_recursively_and_sorted_without_hidden_underscored_or_other_files(folder: Path) -> None:
    assert names("d") == ["d/a.jsonl", "d/b.jsonl", "d/sub/c.ndjson"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("d/*.jsonl", ["d/a.jsonl", "d/b.jsonl"]),
        ("d/**/*.ndjson", ["d/sub/c.ndjson"]),
        ("./d/../d/a.*", ["d/../d/a.jsonl"]),
        ("d/[ab].jsonl", ["d/a.jsonl", "d/b.jsonl"]),
    ],
)
def test_a_glob_is_sorted_and_skips_hidden_names(folder: Path, pattern: str, expected: list[str]) -> None:
    assert names(pattern) == expected


def test_an_absolute_glob_in_a_folder_with_a_hidden_parent_works(folder: Path) -> None:
    hidden = folder / ".cache"
    hidden.mkdir()
    (hidden / "x.csv").write_text("a\n1\n")
    assert names(str(hidden / "*.csv")) == [str(hidden / "x.csv")]


def test_a_hidden_file_that_is_named_is_read(folder: Path) -> None:
    assert names("d/.hidden.jsonl") == ["d/.hidden.jsonl"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(folder: Path) -> None:
    Path("d/x[1].jsonl").write_text("{}\n")
    assert names("d/x[1].jsonl") == ["d/x[1].jsonl"]


def test_a_list_keeps_its_order_and_reads_a_file_matched_twice_once(folder: Path) -> None:
    assert names(["d/b.jsonl", "d/*.jsonl", str(folder / "d/a.jsonl")]) == ["d/b.jsonl", "d/a.jsonl"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nothing.jsonl", ["nothing.jsonl", "does not exist"]),
        ("no/*.jsonl", ["no/*.jsonl", "nothing matches"]),
        ("d/README.md", ["README.md", ".parquet .jsonl"]),
        ("d/*.md", ["README.md", "unknown kind"]),
        ("gs://bucket/x.parquet", ["gs://bucket/x.parquet", "neither a local path nor s3://"]),
        ([], ["empty"]),
    ],
)
def test_a_path_that_means_nothing_readable_is_an_error_that_names_it(
    folder: Path, path: str | list[str], words: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        find_files(path)
    assert all(word in str(caught.value) for word in words)


def test_links_to_files_and_directories_are_followed_and_may_lead_back(folder: Path) -> None:
    elsewhere = folder / "elsewhere"
    (elsewhere / "deep").mkdir(parents=True)
    (elsewhere / "deep" / "y.jsonl").write_text("{}\n")
    (elsewhere / "z.txt").write_text("not rows")
    for name, target in (
        ("link", elsewhere),
        ("again", elsewhere),
        ("back", folder),
        ("one.jsonl", elsewhere / "deep/y.jsonl"),
    ):
        Path("d", name).symlink_to(target)
    Path("elsewhere/deep/up").symlink_to("..")
    found = ["d/a.jsonl", "d/again/deep/y.jsonl", "d/b.jsonl", "d/sub/c.ndjson"]
    assert names("d") == found
    assert names("d/**/*json*") == found
    assert names("d/link/*/*.jsonl") == ["d/link/deep/y.jsonl"]
    assert names("d/lin*") == ["d/link/deep/y.jsonl"]


@pytest.mark.parametrize("pattern", ["d", "d/*.jsonl", "d/**/*.jsonl", "d/gone.jsonl", "d/**"])
def test_a_link_to_nothing_is_an_error_and_not_left_out(folder: Path, pattern: str) -> None:
    Path("d/README.md").unlink()
    Path("d/gone.jsonl").symlink_to("/nowhere/x.jsonl")
    with pytest.raises(InputError, match=r"d/gone\.jsonl: a link to /nowhere/x\.jsonl, which does not exist"):
        find_files(pattern)


def test_a_link_to_nothing_that_is_no_input_file_is_nobodys_business(folder: Path) -> None:
    Path("d/notes.md").symlink_to("/nowhere/notes.md")
    Path("d/.hidden").symlink_to("/nowhere")
    assert names("d") == ["d/a.jsonl", "d/b.jsonl", "d/sub/c.ndjson"]


def test_a_directory_that_a_glob_matches_is_read_like_one_that_is_named(folder: Path) -> None:
    for name in (
        "d/spark.jsonl/part-0.jsonl",
        "d/spark.jsonl/_SUCCESS",
        "d/spark.jsonl/x.crc",
        "d/spark.jsonl/k=1/p.jsonl",
    ):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}\n")
    spark = ["d/spark.jsonl/k=1/p.jsonl", "d/spark.jsonl/part-0.jsonl"]
    assert names("d/*.jsonl") == ["d/a.jsonl", "d/b.jsonl", *spark]
    assert names("d/**/*.jsonl") == ["d/a.jsonl", "d/b.jsonl", *spark]
    assert names("d/su*") == ["d/sub/c.ndjson"]
    assert names("d/**/su*") == ["d/sub/c.ndjson"]


def test_a_folder_that_cannot_be_read_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(InputError, match=r"d/sub: this folder of input\.path cannot be read: Permission denied"):
        find_files("d")


@pytest.mark.parametrize(
    ("pattern", "folders"),
    [
        ("h", "lang=en/year=2024"),
        ("h/*/*/*.csv", "lang=en/year=2024"),
        ("h/**/*.csv", "lang=en/year=2024"),
        ("h/lang=*", "lang=en/year=2024"),
        ("h/lang=en", "year=2024"),
        ("h/lang=en/year=2024/*", ""),
        ("h/lang=en/year=2024/x.csv", ""),
    ],
)
def test_folders_like_columns_are_told_below_what_is_spelled_out(folder: Path, pattern: str, folders: str) -> None:
    place = folder / "a=b" / "h" / "lang=en" / "year=2024"
    place.mkdir(parents=True)
    (place / "x.csv").write_text("a\n1\n")
    assert [file.folders for file in find_files(str(folder / "a=b" / pattern))] == [folders]


def test_a_directory_without_input_files_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("x")
    with pytest.raises(InputError, match="nothing matches"):
        find_files(str(tmp_path))


def test_a_name_that_is_not_utf8_is_refused_before_a_message_about_a_row_has_to_hold_it(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.jsonl")).write_text("{}\n")
    with pytest.raises(InputError, match=r"caf\\udce9\.jsonl': the name is not UTF-8.*rename it"):
        find_files(str(tmp_path))


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(InputError, match="not a regular file"):
        find_files(str(tmp_path / "pipe.jsonl"))


def test_compressed_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.parquet.gz").write_bytes(b"x")
    with pytest.raises(InputError, match="unknown kind"):
        find_files(str(tmp_path / "x.parquet.gz"))


def test_an_empty_compressed_file_is_torn(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl.gz").write_bytes(b"")
    with pytest.raises(InputError, match=r"x\.jsonl\.gz"):
        find_files(str(tmp_path / "x.jsonl.gz"))


PACKED = gzip.compress(b"{}\n" * 1000)


@pytest.mark.parametrize("data", [PACKED[:-9], PACKED[:10] + b"\xff" + PACKED[11:]], ids=["torn", "damaged"])
def test_a_torn_or_damaged_gzip_stream_names_the_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.jsonl.gz").write_bytes(data)
    [file] = find_files(str(tmp_path / "x.jsonl.gz"))
    with pytest.raises(InputError, match=r"x\.jsonl\.gz.*gzip"), open_stream(file) as stream:
        stream.read()


@pytest.mark.parametrize("offset", [0, 70_000, 199_999])
def test_the_fingerprint_sees_a_change_at_either_end_and_any_new_mtime(tmp_path: Path, offset: int) -> None:
    path = tmp_path / "x.jsonl"
    data = bytearray(b"x" * 200_000)
    path.write_bytes(data)
    [file] = find_files(str(path))
    before = file.fingerprint()
    data[offset] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(file.mtime_ns, file.mtime_ns))
    [changed] = find_files(str(path))
    in_the_middle = offset == 70_000
    assert (changed.fingerprint() == before) == in_the_middle
    os.utime(path, ns=(0, 12345))
    [touched] = find_files(str(path))
    assert touched.fingerprint() != changed.fingerprint()


def test_the_fingerprint_of_an_object_sees_another_etag() -> None:
    objects = [RemotePath("s3://bucket/a.jsonl", 9, 0, etag, None) for etag in ("1", "1", "2")]
    first, same, other = (InputFile(path, "jsonl", None, 9, 0).fingerprint() for path in objects)
    assert first == same != other


def test_a_tilde_is_the_home_directory_and_otherwise_a_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert user_path("~/out") == Path("/home/me/out")
    assert user_path("out/~") == Path("out/~")
    assert user_path("~nobody-of-this-name/x") == Path.cwd() / "~nobody-of-this-name/x"


@pytest.mark.parametrize(
    ("pattern", "output", "taken"),
    [
        ("data", "data/out", True),
        ("data", "data/a/../out/", True),
        (".", "out", True),
        ("data/*", "data/out", True),
        ("data/**/*.parquet", "data/out", True),
        ("data/*.parquet", "data/out", False),
        ("data/rows.jsonl", "data/out", False),
        ("data/rows.jsonl", "data/rows.jsonl/out", False),
        ("data", "data2/out", False),
        ("data", "data/_out", False),
        ("data/_out", "data/_out", True),
        ("s3://b/data/", "s3://b/data/out", True),
        ("s3://b/data/*.jsonl", "s3://b/data/out", False),
        ("s3://b/data", "data/out", False),
    ],
)
def test_whether_an_input_path_takes_what_is_written_somewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, output: str, taken: bool
) -> None:
    """The oracle: make the file, and look what the local paths find."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/a").mkdir(parents=True)
    (tmp_path / "data/rows.jsonl").write_text("{}")
    assert would_take(pattern, output) is taken
    if "://" not in pattern and "rows.jsonl/" not in output:
        part = Path(output, "part-00000.parquet")
        part.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        (tmp_path / "data/one.parquet").touch()
        assert (part.resolve() in [file.path.resolve() for file in find_files(pattern)]) is taken  # type: ignore[union-attr]
