"""Models by hub id, through the hub's own library and a hub of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from bulkrun.errors import ModelError
from bulkrun.models.config.find_model import resolve_model
from tests.hub_server import Hub
from tests.models.tiny_models import save_tiny_model


def files_of(folder: Path, **more: bytes) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} | more


def test_a_revision_is_that_of_the_name_and_else_the_newest(hub: Hub, tmp_path: Path) -> None:
    old, new = (files_of(save_tiny_model(tmp_path / name, name)) for name in ("llama", "qwen3"))
    commit = hub.put("me/model", old, "v1")
    hub.put("me/model", old, "refs/pr/7")
    newest = hub.put("me/model", new | {"pytorch_model.bin": b"", "notes.md": b""})
    hub.revisions["me/model", commit] = hub.commits[commit]
    for name in ("me/model@v1", "me/model@refs/pr/7", f"me/model@{commit}"):
        assert files_of(resolve_model(name, bundled_root=tmp_path)) == old
    found = resolve_model("me/model", bundled_root=tmp_path)
    assert found.name == newest and files_of(found) == new
    with pytest.raises(ModelError, match=r"no directory 'me/model@v2' here.*the hub's me/model has no such revision"):
        resolve_model("me/model@v2", bundled_root=tmp_path)


def test_a_directory_whose_name_has_a_revision_in_it_is_that_directory(hub: Hub, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model@v1", "llama")
    assert resolve_model(str(path), bundled_root=tmp_path) == path and hub.asked == []


def test_without_a_hub_the_revision_is_in_the_command_that_helps(hub: Hub, tmp_path: Path) -> None:
    hub.status = 503
    with pytest.raises(ModelError, match=r"`hf download me/model --revision v1`"):
        resolve_model("me/model@v1", bundled_root=tmp_path)
