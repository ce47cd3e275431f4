from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from bulkrun.job.prompts.fit import OnTooLong, PromptFitter, PromptFrame
from bulkrun.job.prompts.row_cut import Cut, RowCut
from bulkrun.request import RowError

FRAME = PromptFrame([1, 2], [8, 9])


def framed() -> PromptFrame:
    return FRAME


BODY = list(range(100, 130))
CHAT = [1, 2, *BODY, 8, 9]  # 34 tokens


def test_error_refuses_only_what_leaves_no_room_for_one_token() -> None:
    assert PromptFitter(35, "error").fit(CHAT, 500, framed) is CHAT
    error = PromptFitter(34, "error").fit(CHAT, 1, framed)
    assert isinstance(error, RowError) and error.code == "too_long"
    assert "34 tokens" in error.message and "run.on_too_long" in error.message


def test_cutting_keeps_the_chat_templates_frame() -> None:
    assert PromptFitter(20, "truncate_left").fit(CHAT, 4, framed) == [1, 2, *BODY[-12:], 8, 9]
    assert PromptFitter(20, "truncate_right").fit(CHAT, 4, framed) == [1, 2, *BODY[:12], 8, 9]


def test_cutting_leaves_room_for_max_tokens_but_never_less_than_half_for_the_prompt() -> None:
    assert len(PromptFitter(20, "truncate_left").fit(CHAT, 1000, framed)) == 10


def test_a_prompt_that_fits_is_not_touched() -> None:
    assert PromptFitter(40, "truncate_left").fit(CHAT, 6, framed) is CHAT


def test_a_tokenizer_that_knows_no_letters_loses_no_end() -> None:
    """Of two texts that are one to it nothing tells where they are: [CLS] [UNK] [SEP], or [CLS] [SEP]."""
    for probe in ([1, 7, 9], [1, 9]):
        frame = partial(PromptFrame.between, probe, probe)
        assert PromptFitter(6, "truncate_right").fit([1, *BODY, 9], 0, frame) == [1, *BODY[:4], 9]
        assert PromptFitter(6, "truncate_left").fit([1, *BODY, 9], 0, frame) == [1, *BODY[-4:], 9]


def test_the_frame_is_what_prompts_with_different_contents_share() -> None:
    assert PromptFrame.between([1, 2, 5, 8, 9], [1, 2, 6, 6, 8, 9]) == FRAME
    assert PromptFrame.between([5], [6]) == PromptFrame([], [])
    assert PromptFrame.between([1, 5, 1], [1, 6, 1]) == PromptFrame([1], [1])


ids = st.lists(st.integers(0, 9), min_size=1, max_size=40)


@given(
    token_ids=ids,
    head=st.lists(st.integers(0, 9), max_size=9),
    tail=st.lists(st.integers(0, 9), max_size=9),
    length=st.integers(2, 50),
    max_tokens=st.integers(1, 60),
)
def test_what_is_kept_fits_and_is_in_the_prompts_order(
    token_ids: list[int], head: list[int], tail: list[int], length: int, max_tokens: int
) -> None:
    for policy in ("truncate_left", "truncate_right"):
        kept = PromptFitter(length, policy).fit(token_ids, max_tokens, lambda: PromptFrame(head, tail))
        assert isinstance(kept, list) and 1 <= len(kept) < length
        rest = iter(token_ids)
        assert all(token in rest for token in kept)  # a subsequence
        room = length - min(max_tokens, length // 2)
        assert len(kept) == min(len(token_ids), room)


@given(
    token_ids=ids,
    head=st.lists(st.integers(0, 9), max_size=9),
    most=st.integers(1, 45),
    policy=st.sampled_from(["error", "truncate_left", "truncate_right"]),
    how=st.sampled_from(["truncate_left", "truncate_right"]),
)
def test_a_rows_own_cut_comes_first_and_the_jobs_policy_after_it(
    token_ids: list[int], head: list[int], most: int, policy: OnTooLong, how: Cut
) -> None:
    frame = partial(PromptFrame, head)
    cut = PromptFitter(most, how).fit(token_ids, 0, frame)  # as one that is embedded fits a model of that length
    assert isinstance(cut, list) and len(cut) == min(most, len(token_ids))
    for length in (20, 60):
        fitter = PromptFitter(length, policy)
        assert fitter.fit(token_ids, 3, frame, RowCut(how, most)) == fitter.fit(cut, 3, frame)
        assert fitter.fit(token_ids, 3, frame, RowCut(how)) == PromptFitter(length, how).fit(token_ids, 3, frame)
