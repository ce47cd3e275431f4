"""A job whose chat template is a file: what the file says is part of the run, as the rest of the prompt is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bulkrun.errors import ResumeError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import read_record
from bulkrun.launch.preparation.prepare import prepare
from tests.launch.nights import Nights, rows_of, stop_at, whole


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    write(tmp_path, "Shortly: ")
    prompt = {"template": "Say {{ text }}", "chat_template": str(tmp_path / "chat.jinja")}
    return Nights(tmp_path, {"prompt": prompt, "run__incremental": False})


def write(folder: Path, begin: str) -> None:
    (folder / "chat.jinja").write_text(begin + "{{ messages[0].content }}")


def answers(nights: Nights) -> list[str]:
    return [row["response"] for _, row in sorted(nights.results().items())]


def test_an_edited_template_is_another_run(nights: Nights) -> None:
    nights.write(rows_of(9))
    nights.submit()
    write(nights.folder, "At length: ")
    with pytest.raises(ResumeError, match=r"prompt\.chat_template: '\w{32}' -> '\w{32}'"):
        nights.submit()
    write(nights.folder, "Shortly: ")
    assert not nights.submit().worked


def test_the_rest_of_a_plan_is_not_made_with_another_template(nights: Nights) -> None:
    nights.write(rows_of(20))
    stop_at(nights, 5)
    with pytest.raises(KeyboardInterrupt):
        nights.submit()
    record = read_record(RunDir(nights.out))
    prepare(nights.spec()).check_input(record)
    write(nights.folder, "At length: ")
    with pytest.raises(ResumeError, match=r"prompt\.chat_template: .*jinja changed since the run began; bring it"):
        prepare(nights.spec()).check_input(record)
    known = {key: value for key, value in record.identity["prompt"].items() if key != "chat_template_file"}
    earlier = replace(record, identity={**record.identity, "prompt": known})
    prepare(nights.spec()).check_input(earlier)


def test_a_night_runs_every_row_with_an_edited_template_if_it_is_asked_to(nights: Nights) -> None:
    nights.settings["run__incremental"] = True
    nights.write(rows_of(9))
    nights.submit()
    before = answers(nights)
    write(nights.folder, "At length: ")
    with pytest.raises(ResumeError, match="--full-refresh runs every row with these"):
        nights.submit()
    assert nights.submit(flags={"full_refresh": True}).exit_code == 0
    assert nights.ran == 9 and not set(answers(nights)) & set(before)
    assert not nights.submit().worked
    whole(nights)


@pytest.mark.parametrize("incremental", [False, True])
def test_a_retry_may_have_another_template(nights: Nights, incremental: bool) -> None:
    nights.settings["run__incremental"] = incremental
    nights.write(rows_of(9))
    nights.refuse = lambda request: request.request_id in ("3:0", "5:0")
    nights.submit()
    nights.refuse = lambda request: request.request_id == "1:0"
    write(nights.folder, "At length: ")
    assert nights.retry().totals.errors == {"nan_logits": 1} and nights.ran == 2
    (nights.folder / "other.jinja").write_text("{{ messages[0].content }}")
    nights.refuse = lambda request: False
    assert nights.retry(f"prompt.chat_template={nights.folder / 'other.jinja'}").exit_code == 0
    whole(nights)
