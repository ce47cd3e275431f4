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
        ("QOSGrpWallLimit", "time is used up"),
        ("QOSTimeLimit", "time is used up"),
        ("QOSMaxGRESPerJob", "asks for what it may not have"),
        ("QOSMaxGRESMinutesPerJob", "asks for what it may not have"),
        ("AssocMaxCpuMinutesPerJobLimit", "asks for what it may not have"),
        ("QOSMaxMemoryPerNode", "asks for what it may not have"),
        ("QOSMinNode", "asks for what it may not have"),
        ("MaxMemPerLimit", "asks for what it may not have"),
        ("PartitionNodeLimit", "asks for what it may not have"),
        ("PartitionConfig", "asks for what it may not have"),
        ("BadConstraints", "asks for what it may not have"),
        ("InvalidQOS", "may not be used"),
        ("ReservationInvalid", "the reservation that it asks for"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "sinfo --list-reasons"),
        ("PartitionDown", "sinfo --list-reasons"),
        (
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
            "sinfo --list-reasons",
        ),
        ("DependencyNeverSatisfied", "never starts"),
    ],
)
def test_a_reason_that_time_alone_does_not_settle_comes_with_what_to_do(reason: str, says: str) -> None:
    assert says in (advice("7_[0-3]", "PENDING", reason) or "")


@pytest.mark.parametrize(
    "reason",
    [
        "None",
        "Resources",
        "Priority",
        "BeginTime",
        "AssocMaxJobsLimit",
        "Dependency",
        "AssocGrpNodeLimit",
        "AssocGrpCPURunMinutesLimit",
        "QOSGrpGRESRunMinutes",
        "QOSGrpMemLimit",
        "JobArrayTaskLimit",
        "MaxCpuPerAccount",
    ],
)
def test_a_job_that_waits_for_its_turn_needs_no_words(reason: str) -> None:
    assert advice("7", "PENDING", reason) is None and advice("7_0", "RUNNING", reason) is None


def test_states_that_are_no_pending_have_words_too() -> None:
    assert "resumes it" in (advice("7_0", "SUSPENDED", "None") or "")
    assert "release 7`" in (advice("7_0", "REQUEUE_HOLD", "None") or "")


def test_elements_that_did_not_complete_are_counted() -> None:
    assert ending([("COMPLETED", "0"), ("RUNNING", "")]) is None
    assert ending([("BOOT_FAIL", "")]) == "BOOT_FAIL, its node did not start"
    some = ending([(state, "0") for state in ("COMPLETED", "PREEMPTED", "DEADLINE", "PREEMPTED")])
    assert some is not None and some.startswith("2 of 4 PREEMPTED, a job") and "; 1 of 4 DEADLINE, the" in some


def test_an_element_that_saved_and_stopped_did_not_fail() -> None:
    some = ending([("FAILED", "75"), ("FAILED", "127"), ("CANCELLED", "75")])
    assert some is not None and some.startswith("1 of 3 EXIT 75, it saved what it had, and Slurm did not start it")
    assert "; 1 of 3 FAILED, its script ended" in some and "; 1 of 3 CANCELLED, bulkrun cancel" in some
