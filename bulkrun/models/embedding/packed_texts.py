"""A step's texts as one row of tokens, one behind the other, with nothing between them. Knows no model."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F

from bulkrun.ops import TextLens


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """S texts of T tokens together, the shortest first: what is padded finds its likes beside it."""

    token_ids_T: torch.Tensor  # int64
    lens_S: torch.Tensor  # int64
    lens: list[int]  # the same, where nobody has to wait for the device

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], device: torch.device) -> PackedTexts:
        """Pack texts of ascending lengths, each of at least one token; one copy to the device."""
        lens = list(map(len, texts))
        assert lens == sorted(lens) and lens[0] > 0, "the shortest comes first, and none is empty"
        host = torch.frombuffer(array("q", chain(lens, *texts)), dtype=torch.int64)
        packed = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
        return cls(packed[len(lens) :], packed[: len(lens)], lens)

    @property
    def ends_S(self) -> torch.Tensor:
        """int64: where each text ends among the tokens."""
        return self.lens_S.cumsum(0)

    def layout(self) -> TextLens:
        """Where each text lies, for ops."""
        return TextLens(F.pad(self.ends_S, (1, 0)).int(), self.lens)

    def text_of_token(self) -> torch.Tensor:
        """int64 [T]: which text each token is of."""
        texts_S = torch.arange(len(self.lens), device=self.lens_S.device)
        return torch.repeat_interleave(texts_S, self.lens_S, output_size=self.token_ids_T.numel())

    def positions(self, text_T: torch.Tensor) -> torch.Tensor:
        """int64 [T]: which token of its text each one is."""
        starts_S = self.ends_S - self.lens_S
        return torch.arange(text_T.numel(), device=text_T.device) - starts_S[text_T]

    def types(self, separator: int) -> torch.Tensor:
        """int64 [T], the types of pairs' tokens: 1 behind a text's first token of this id, else 0."""
        is_separator_T = (self.token_ids_T == separator).long()
        before_T = is_separator_T.cumsum(0) - is_separator_T
        starts_S = self.ends_S - self.lens_S
        return (before_T > before_T[starts_S][self.text_of_token()]).long()

    def slice(self, first: int, end: int) -> PackedTexts:
        """The texts from `first` to before `end`; the memory is shared."""
        num_before, num_tokens = sum(self.lens[:first]), sum(self.lens[first:end])
        token_ids = self.token_ids_T[num_before : num_before + num_tokens]
        return PackedTexts(token_ids, self.lens_S[first:end], self.lens[first:end])
