"""Nights of a job that classifies: what the column of scores says of its labels is true of every row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from bulkrun.data.results.schema import labels_of
from bulkrun.errors import ResumeError
from bulkrun.launch.preparation import origin
from bulkrun.launch.runs.preview import plan_job
from bulkrun.request import Completion, Request
from tests.job.fake_engine import FakeEmbedder
from tests.launch.nights import Nights, rows_of, stop_at, whole
from tests.models.tiny_encoders import save_tiny_classifier, write_json

WORDS = ["text", *map(str, range(100))]


class FakeClassifier(FakeEmbedder):
    """Scores of three labels."""

    def _embedded(self, request: Request) -> Completion:
        done = super()._embedded(request)
        return replace(done, embedding=done.embedding and done.embedding[:12])


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    """Labels a, b and c; the texts of `rows_of` are all different to the model."""
    folder = save_tiny_classifier(tmp_path / "model", "bert_in_panels", vocab_size=512)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "model_max_length": 16})
    settings = {"task": "classify", "model": str(folder), "sampling": {}, "prompt": {"column": "text"}}
    made = Nights(tmp_path, settings)
    made.make_engine = lambda: FakeClassifier(4, refuse=made.refuse)
    return made


def labels(nights: Nights) -> list[list[str]]:
    """What each part says of its scores, in the order of the parts."""
    return [labels_of(pq.read_schema(part).field("scores")) for part in sorted(nights.out.glob("*.parquet"))]


def names_told(nights: Nights) -> bool:
    """Whether every row's label is the one of its highest score."""
    [own] = {tuple(each) for each in labels(nights)}
    rows = nights.results().values()
    return all(row["label"] == own[row["scores"].index(max(row["scores"]))] for row in rows)


OTHERS: dict[str, Any] = {"classification": {"labels": ["c", "x", "a"]}}


def test_a_full_refresh_with_other_labels_says_so_in_every_part(nights: Nights) -> None:
    nights.write(rows_of(20))
    nights.submit()
    assert labels(nights) == [["a", "b", "c"]] * 3 and names_told(nights)
    nights.submit(flags={"full_refresh": True}, **OTHERS)
    assert labels(nights) == [["c", "x", "a"]] * 3 and names_told(nights)
    whole(nights)
    nights.write(rows_of(21))
    assert nights.submit(**OTHERS).worked and nights.ran == 1 and names_told(nights)


def test_parts_that_an_interrupted_refresh_made_say_so_once_it_has_come_to_its_end(nights: Nights) -> None:
    nights.write(rows_of(40))
    nights.submit()
    stop_at(nights, 30)
    with pytest.raises(KeyboardInterrupt):
        nights.submit(flags={"full_refresh": True}, **OTHERS)
    nights.write(rows_of(41))  # what was finished is merged, the comparison made anew
    stop_at(nights, 1)
    with pytest.raises(KeyboardInterrupt):
        nights.submit(flags={"full_refresh": True}, **OTHERS)
    assert {*map(tuple, labels(nights))} == {("a", "b", "c")}, "the run is still of these"
    nights.refuse = lambda request: False
    nights.submit(flags={"full_refresh": True}, **OTHERS)
    assert nights.ran < 30 and names_told(nights)
    whole(nights)


@pytest.mark.parametrize("limit", [None, 9])
def test_scores_of_other_labels_do_not_stay_beside_tonights(nights: Nights, limit: int | None) -> None:
    nights.write(rows_of(12))
    nights.submit()
    before = nights.results()
    nights.write(rows_of(12 if limit else 9))
    other = "3 results are of rows that " + ("run.limit leaves unread" if limit else "the input has no more")
    with pytest.raises(ResumeError, match=rf"{other}(?s:.*)classification\.labels: \['a', 'b', 'c'\] -> \['c', 'x'"):
        nights.submit(flags={"full_refresh": True}, run__limit=limit, **OTHERS)
    assert nights.results() == before and not list((nights.out / ".bulkrun").glob("next"))
    nights.submit(flags={"full_refresh": True}, run__on_vanished="drop", **OTHERS)
    assert len(nights.results()) == (12 if limit else 9) and names_told(nights)
    whole(nights)


def test_a_head_that_was_trained_anew_makes_another_run(nights: Nights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "model_fingerprint", lambda path: "the same")
    nights.write(rows_of(9))
    nights.submit()
    monkeypatch.setattr(origin, "tensors_fingerprint", lambda path: "of another head")
    with pytest.raises(ResumeError, match=r"model\.tensors: '\w{32}' -> 'of another head'(?s:.*)--full-refresh"):
        nights.submit()
    assert nights.submit(flags={"full_refresh": True}).changes == {
        **{"new": 0, "changed": 9, "failed": 0, "unchanged": 0, "vanished": 0}
    }


def test_nights_of_an_earlier_bulkrun_go_on(nights: Nights, monkeypatch: pytest.MonkeyPatch) -> None:
    """It did not look at every tensor, and the keys of its rows hold nothing of that."""
    nights.write(rows_of(9))
    with monkeypatch.context() as before:
        before.setattr(origin, "TENSORS", "none")
        before.setattr(origin, "tensors_fingerprint", lambda path: None)
        nights.submit()
    assert not nights.submit().worked
    nights.write(rows_of(10))
    assert plan_job(nights.spec())[1] == nights.submit().changes and nights.ran == 1
    whole(nights)
