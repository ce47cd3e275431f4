"""Shared prefixes of a step, as `bulkrun.engine.step.shared_prefixes` keeps them on the device: here from lists."""

from __future__ import annotations

from itertools import accumulate

import torch

from bulkrun.ops.attention.metadata import PREFIX_UNIT, SharedPrefixes


def prefixes_of(
    groups: list[tuple[list[int], int]], num_decode_seqs: int, device: torch.device | str
) -> SharedPrefixes:
    """From the (sequences, tokens shared) of each group."""
    lens_S = [0] * num_decode_seqs
    for seqs, prefix_len in groups:
        assert prefix_len % PREFIX_UNIT == 0, "tiles of keys must not straddle the end of a shared prefix"
        for seq in seqs:
            lens_S[seq] = prefix_len

    def send(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return SharedPrefixes(
        seq_index=send([seq for seqs, _ in groups for seq in seqs]),
        cu_groups=send(list(accumulate((len(seqs) for seqs, _ in groups), initial=0))),
        prefix_lens_G=send([prefix_len for _, prefix_len in groups]),
        prefix_lens_S=send(lens_S),
        counts=send([len(groups), max((prefix_len for _, prefix_len in groups), default=0)]),
    )
