"""Groups of shared prefixes: against every way to choose them, and what must hold of any group."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.engine.scheduling.scheduled_batch import ScheduledBatch
from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.engine.step import shared_prefixes
from bulkrun.engine.step.shared_prefixes import MIN_GROUP_SIZE, SharedPrefixTable, find_groups, saved_tokens
from bulkrun.engine.step.staging import HostStaging
from bulkrun.ops.attention.metadata import PREFIX_UNIT, TILE_ROWS
from bulkrun.ops.triton.attention_tile import packed_rows
from bulkrun.request import Request, SamplingParams
from tests.engine.conftest import EngineFactory
from tests.ops.prefix_groups import prefixes_of


def random_tables(rng: random.Random, num_seqs: int, num_nodes: int) -> list[list[int]]:
    """Block tables along the paths of a random tree, each with some blocks of its own at the end."""
    blocks = count(1)
    paths: list[list[int]] = [[]]
    for _ in range(num_nodes):
        paths.append([*rng.choice(paths[-4:]), *(next(blocks) for _ in range(rng.randrange(1, 40)))])
    return [[*rng.choice(paths), *(next(blocks) for _ in range(rng.randrange(4)))] for _ in range(num_seqs)]


def best_saving(tables: list[list[int]], block_size: int, seqs_per_tile: int) -> int:
    """The most that groups can save, by trying every length of a prefix at every place of the tree."""

    def best(members: list[int], units: int) -> int:
        together = saved_tokens(len(members), units * PREFIX_UNIT, seqs_per_tile)
        return max(together, split(members, units + 1))

    def split(members: list[int], units: int) -> int:
        place = -(-units * PREFIX_UNIT // block_size)
        prefixes = {tuple(tables[i][:place]) for i in members if len(tables[i]) >= place}
        parts = [[i for i in members if tuple(tables[i][:place]) == prefix] for prefix in prefixes]
        return sum(best(part, units) for part in parts if len(part) >= MIN_GROUP_SIZE)

    return split(list(range(len(tables))), shared_prefixes.MIN_PREFIX_LEN // PREFIX_UNIT)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    num_seqs=st.integers(1, 60),
    num_nodes=st.integers(1, 8),
    block_size=st.sampled_from([16, 32, 64, 128]),
    seqs_per_tile=st.sampled_from([1, 4, 16, 64]),
)
def test_no_choice_of_groups_saves_more(
    seed: int, num_seqs: int, num_nodes: int, block_size: int, seqs_per_tile: int
) -> None:
    tables = random_tables(random.Random(seed), num_seqs, num_nodes)
    groups = find_groups(tables, block_size, seqs_per_tile)
    best = best_saving(tables, block_size, seqs_per_tile)
    saved = sum(saved_tokens(len(members), prefix_len, seqs_per_tile) for members, prefix_len in groups)
    assert saved == (best if best >= shared_prefixes.MIN_SAVED_TOKENS else 0)
    everyone = [index for members, _ in groups for index in members]
    assert len(everyone) == len(set(everyone))
    for members, prefix_len in groups:
        assert len(members) >= MIN_GROUP_SIZE
        assert prefix_len % PREFIX_UNIT == 0
        used = -(-prefix_len // block_size)
        assert len({tuple(tables[index][:used]) for index in members}) == 1
        assert all(len(tables[index]) >= used for index in members)


def test_an_instruction_that_all_rows_begin_with_is_one_group() -> None:
    shared = list(range(1, 63))  # 992 tokens
    tables = [[*shared, 100 + i, 900 + i] for i in range(300)]
    assert find_groups(tables, 16, 32) == [(list(range(300)), 960)]


def test_one_row_that_leaves_early_does_not_spoil_the_group() -> None:
    tables = [[*range(1, 41), 100 + i] for i in range(99)] + [[*range(1, 20), 500]]
    assert find_groups(tables, 16, 32) == [(list(range(99)), 640)]


def test_rows_that_are_the_turns_of_one_conversation_may_be_as_many_as_run_at_once() -> None:
    """Each begins with all of the one before: a tree as deep as there are sequences is no recursion too deep."""
    tables = [[*range(1, 17 + 4 * turn), 10_000 + turn] for turn in range(500)]
    [(members, prefix_len)] = find_groups(tables, 16, 32)
    assert members == list(range(members[0], 500))
    assert prefix_len == 64 * (members[0] + 4)  # all that the shortest of them has


@pytest.mark.parametrize(("num_seqs", "blocks"), [(3, 300), (4, 15), (10, 40)])
def test_few_sequences_short_prefixes_and_small_savings_are_not_worth_a_kernel(num_seqs: int, blocks: int) -> None:
    assert find_groups([[*range(1, blocks + 1), 900 + i] for i in range(num_seqs)], 16, 32) == []


def test_more_groups_than_there_is_room_for_leave_out_those_that_save_least() -> None:
    lens = [*range(16, 16 + 4 * 70, 4)]  # blocks, four sequences each
    tables = [[*range(1000 * n, 1000 * n + n), 10**6 + i] for n in lens for i in range(4)]
    groups = find_groups(tables, 16, 32)
    assert [prefix_len for _, prefix_len in groups] == [16 * n for n in sorted(lens, reverse=True)[:64]]


def test_tensors_stay_where_they_are_and_follow_the_members() -> None:
    """As `prefixes_of` makes them, in front of groups and sequences that are not there."""
    table = SharedPrefixTable(64, 16, 32, HostStaging(torch.device("cpu")))
    seqs = [Sequence(Request(str(i), [1], SamplingParams()), arrival=i, max_model_len=9) for i in range(40)]
    for i, seq in enumerate(seqs):
        seq.block_table = [*range(500, 532), 600 + i] if i % 4 else [*range(1, 41), 100 + i]  # the longer saves less
    view = table.view(64)
    for members in (seqs, seqs[:30], [*seqs[:29], seqs[32]], seqs[1:4], seqs):
        batch = ScheduledBatch(seqs=[*members, seqs[0]], num_decode_seqs=len(members))
        table.update(batch)
        assert table.groups == find_groups([seq.block_table for seq in members], 16, 32)
        assert bool(table.groups) == (len(members) > 3)
        expected = prefixes_of(table.groups, len(members), "cpu")
        num_groups = len(table.groups)
        assert view.seq_index[: len(expected.seq_index)].tolist() == expected.seq_index.tolist()
        assert view.cu_groups[: num_groups + 1].tolist() == expected.cu_groups.tolist()
        assert (view.cu_groups[num_groups:] == expected.cu_groups[-1]).all()
        assert view.prefix_lens_G[:num_groups].tolist() == expected.prefix_lens_G.tolist()
        assert view.counts.tolist() == expected.counts.tolist()
        assert view.prefix_lens_S.tolist() == expected.prefix_lens_S.tolist() + [0] * (64 - len(members))
    narrow = table.view(40)
    assert narrow.seq_index.data_ptr() == view.seq_index.data_ptr()
    assert (narrow.seq_index.numel(), narrow.prefix_lens_S.numel(), narrow.prefix_lens_G.numel()) == (40, 40, 10)
    table.clear()
    everything = (view.seq_index, view.cu_groups, view.prefix_lens_G, view.prefix_lens_S, view.counts)
    assert not table.groups and not any(tensor.any() for tensor in everything)
    table.update(batch)
    assert table.groups and view.prefix_lens_S.any(), "what was cleared comes back with the next step"


@pytest.mark.parametrize("group", [1, 3, 4, 5, 7, 71, 200])
def test_savings_are_counted_in_tiles_of_as_many_sequences_as_the_kernels(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    runner = make_engine().model_runner
    config = replace(runner.model.config, num_heads=2 * group, num_kv_heads=2)
    monkeypatch.setattr(runner.model, "config", config)
    table = runner._prefix_table()
    assert table is not None
    assert table._seqs_per_tile == packed_rows(TILE_ROWS, group)[1]


def test_a_step_that_is_interrupted_leaves_no_prefixes_to_later_ones(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal's handler raises between the copy to the device and what the host keeps of it: the engine clears it."""
    table = SharedPrefixTable(64, 16, 32, HostStaging(torch.device("cpu")))
    seqs = [Sequence(Request(str(i), [1], SamplingParams()), arrival=i, max_model_len=9) for i in range(40)]
    for i, seq in enumerate(seqs):
        seq.block_table = [*range(1, 41), 100 + i]
    copy, engine = torch.Tensor.copy_, make_engine()

    def interrupted(*args: Any) -> torch.Tensor:
        copy(*args)
        raise KeyboardInterrupt

    def compute(*_: object) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", interrupted)
            table.update(ScheduledBatch(seqs=seqs, num_decode_seqs=len(seqs)))

    monkeypatch.setattr(engine.model_runner, "prefixes", table)
    monkeypatch.setattr(engine.model_runner, "compute", compute)
    assert not table.view(64).prefix_lens_S.any()
    seen: list[torch.Tensor] = []
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine.model_runner, "forget_step", lambda: seen.append(table.view(64).prefix_lens_S.any()))
        engine.add_request(Request("a", [5, 6, 7], SamplingParams(max_tokens=2)))
        engine.step()
    assert seen == [True], "it is written, and the host knows of no group"
    assert not table.groups
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert not table.view(64).prefix_lens_S.any() and not table.view(64).counts.any()
