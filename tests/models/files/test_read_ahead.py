"""Reading ahead: every byte in its place whatever the pieces, in order, and torn files by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bulkrun.errors import ModelError
from bulkrun.models.files import read_ahead
from bulkrun.models.files.checkpoint import StoredTensor, stored_tensors
from bulkrun.models.files.read_ahead import read_tensors
from bulkrun.models.files.weight_files import weight_files
from tests.models.load import load_model
from tests.models.tiny_models import save_tiny_model

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Tensors of several dtypes and sizes, one of them empty, in two files."""
    folder = tmp_path_factory.mktemp("shards")
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (1,), (0, 4), (1000, 7), (2, 3, 4), ()]
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
    files = [folder / "a.safetensors", folder / "b.safetensors"]
    for number, file in enumerate(files):
        tensors = {
            f"t{number}.{i}.{dtype}": torch.randn(shape, generator=generator).to(dtype)
            for i, shape in enumerate(shapes)
            for dtype in dtypes
        }
        save_file(tensors, file, metadata={"format": "pt"})
    return files


def _bytes(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist()


@settings(max_examples=25)
@given(piece=st.sampled_from([1 << 6, 100, 1 << 12, 1 << 24]), ahead=st.sampled_from([0, 50, 5000, 1 << 28]))
def test_tensors_come_in_order_with_their_bytes(shards: list[Path], piece: int, ahead: int) -> None:
    expected = {name: tensor for file in shards for name, tensor in load_file(file).items()}
    stored = list(stored_tensors(shards))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_ahead, "PIECE_BYTES", piece)
        patch.setattr(read_ahead, "READ_AHEAD_BYTES", ahead)
        read = list(read_tensors(stored, lambda _: None))
    assert [one.name for one, _ in read] == [one.name for one in stored]
    assert sorted(expected) == sorted(one.name for one in stored)
    for one, tensor in read:
        want = expected[one.name]
        assert tensor.dtype == want.dtype and tensor.shape == want.shape
        assert _bytes(tensor) == _bytes(want)


def test_a_place_is_filled_and_nothing_around_it(shards: list[Path]) -> None:
    (stored,) = [
        one for one in stored_tensors(shards) if one.shape == (1000, 7) and one.name.startswith("t1.3.torch.f")
    ][:1]
    around = torch.full((1002, 7), 5.0).to(stored.dtype)
    ((_, tensor),) = read_tensors([stored], lambda _: around[1:1001])
    assert torch.equal(tensor.float(), load_file(shards[1])[stored.name].float())
    assert around[1:1001].data_ptr() == tensor.data_ptr()
    assert (around[[0, 1001]].float() == 5.0).all()


def test_no_more_is_under_way_than_the_tensor_in_use_and_what_is_read_ahead(
    shards: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "READ_AHEAD_BYTES", 20_000)
    stored = list(stored_tensors(shards))
    asked: list[StoredTensor] = []
    done = 0
    for one, _ in read_tensors(stored, lambda one: asked.append(one)):
        done += one.num_bytes
        assert sum(other.num_bytes for other in asked) - done <= 20_000 + max(other.num_bytes for other in stored)
    assert asked == stored


def test_a_file_that_ends_early_is_named_with_the_tensor(shards: list[Path], tmp_path: Path) -> None:
    stored = max(stored_tensors(shards), key=lambda one: one.num_bytes)
    short = tmp_path / "short.safetensors"
    short.write_bytes(stored.file.read_bytes()[: stored.offset + 3])
    with pytest.raises(ModelError, match=r"short\.safetensors: torn: it ends within t"):
        list(read_tensors([stored._replace(file=short)], lambda _: None))


def test_whoever_stops_half_way_leaves_nothing_open(shards: list[Path]) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    reading = read_tensors(list(stored_tensors(shards)), lambda _: None)
    next(reading)
    reading.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_dtype_nobody_knows_is_refused_by_name(tmp_path: Path) -> None:
    file = save_tiny_model(tmp_path, "llama") / "model.safetensors"
    raw = file.read_bytes()
    assert raw.count(b'"F32"') > 3
    file.write_bytes(raw.replace(b'"F32"', b'"C64"', 1))  # of 8 bytes an element, which the check of sizes sees first
    with pytest.raises(ModelError, match=r"model\.safetensors: "):
        list(stored_tensors(weight_files(tmp_path)))


def test_a_matrix_is_packed_before_the_last_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bulkrun.models.decoder.layers import Linear
    from bulkrun.models.loading import loader

    path = save_tiny_model(tmp_path, "llama", max_shard_size="40KB")
    events: list[str] = []
    monkeypatch.setattr(Linear, "pack", lambda self: events.append("packed"))
    monkeypatch.setattr(read_ahead, "READ_AHEAD_BYTES", 0)
    read = read_tensors

    def watched(*args: object, **kwargs: object):
        for one in read(*args, **kwargs):
            events.append("read")
            yield one

    monkeypatch.setattr(loader, "read_tensors", watched)
    load_model(path, dtype=torch.float32, device="cpu")
    assert "packed" in events[: events.index("read") + events.count("read") // 2]
