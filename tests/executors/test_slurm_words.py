"""Every reason for which a job can wait without end has words that say what to do; the others have none."""

from __future__ import annotations

import pytest

from bulkrun.executors.slurm_words import advice, ending


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("JobHeldUser", "`scontrol release 7`"),
        ("JobHeldAdmin", "held by an administrator"),
        ("launch failed requeued held", "`scontrol release 7`"),
        ("PartitionTimeLimit", "slurm.time is longer"),
        ("QOSMaxWallDurationPerJobLimit", "slurm.time is longer"),
        ("AssocGrpCPUMinutesLimit", "time is used up"),
        ("QOSMaxGRESPerJob", "asks for what it may not have"),
        ("BadConstraints", "asks for what it may not have"),
        ("InvalidQOS", "may not be used"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "sinfo --list-reasons"),
        ("PartitionDown", "sinfo --list-reasons"),
        ("DependencyNeverSatisfied", "never starts"),
    ],
)
def test_a_reason_that_time_alone_does_not_settle_comes_with_what_to_do(reason: str, says: str) -> None:
    assert says in (advice("7_[0-3]", "PENDING", reason) or "")


@pytest.mark.parametrize("reason", ["None", "Resources", "Priority", "BeginTime", "AssocMaxJobsLimit", "Dependency"])
def test_a_job_that_waits_for_its_turn_needs_no_words(reason: str) -> None:
    assert advice("7", "PENDING", reason) is None and advice("7_0", "RUNNING", reason) is None


def test_states_that_are_no_pending_have_words_too() -> None:
    assert "resumes it" in (advice("7_0", "SUSPENDED", "None") or "")
    assert "release 7`" in (advice("7_0", "REQUEUE_HOLD", "None") or "")


def test_elements_that_did_not_complete_are_counted() -> None:
    assert ending(["COMPLETED", "RUNNING"]) is None
    assert ending(["BOOT_FAIL"]) == "BOOT_FAIL, its node did not start"
    some = ending(["COMPLETED", "PREEMPTED", "DEADLINE", "PREEMPTED"])
    assert some is not None and some.startswith("2 of 4 PREEMPTED, a job") and "; 1 of 4 DEADLINE, the" in some
