from __future__ import annotations

import io

from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.data.inputs import lines as lines_module
from bulkrun.data.inputs.lines import read_lines

BOM = b"\xef\xbb\xbf"


class ByteAtATime(io.BytesIO):
    """A stream that gives a few bytes per read, so that every chunk border is met."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(3)


def expected_lines(data: bytes) -> list[bytes]:
    """The oracle: split the whole text at once."""
    pieces = data.removeprefix(BOM).split(b"\n")
    return pieces[:-1] if pieces[-1] == b"" else pieces


texts = st.lists(st.sampled_from([b"\n", b"\r\n", b"a", b"bcd", b'"', b"\xff", BOM, b"\0"]), max_size=40).map(b"".join)


@given(data=texts, cap=st.integers(0, 9))
@settings(max_examples=300)
def test_every_line_comes_once_with_its_number_offset_and_bytes(data: bytes, cap: int) -> None:
    want = expected_lines(data)
    # A mark cut by the first tiny read would not be seen, and a file's first chunk is never that small.
    streams = [io.BytesIO(data)] + ([] if data.startswith(BOM[:1]) else [ByteAtATime(data)])
    for stream in streams:
        got = list(read_lines(stream, cap))
        assert [line.data for line in got] == [line if len(line) <= cap else None for line in want]
        assert [line.number for line in got] == list(range(1, 1 + len(want)))
        for line, text in zip(got, want, strict=True):
            assert data[line.offset : line.offset + len(text)] == text


def test_a_line_longer_than_many_chunks_is_not_held() -> None:
    data = b"a\n" + b"x" * (5 * lines_module.CHUNK_BYTES + 7) + b"\nb"
    assert [line.data for line in read_lines(io.BytesIO(data), 100)] == [b"a", None, b"b"]
