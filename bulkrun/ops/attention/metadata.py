"""What attention must know of a step's batch: which tokens belong to which sequence and where their KV lives.

Shape legend of ops/, models/ and engine/:

    T  tokens of the step         S  its sequences, or texts       R  permanent rows of the device
    N  blocks of the pool         M  blocks of one sequence        B  tokens of a block
    E  model width                I  width inside an MLP           V  vocabulary
    H  query heads                K  key/value heads               D  head dim
    L  positions of one sequence: its keys, its row of tokens      Q  queries of one sequence
    X  experts                    k  experts of a token            P  pairs of a token and an expert
    C  channels of a convolution  W  tokens that it sees           V  also dimensions of a value head

Of a matrix O are the outputs and I the inputs. A small letter is some of the large one's, a digit is itself. What else
stands for a size (A, C, G, U, W) is said where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from bulkrun.ops.attention.plans import AttentionPlans

PREFIX_UNIT = 64  # tokens: a shared prefix ends at a multiple of it, where a tile of keys ends too
TILE_ROWS = 128  # query heads of all tokens that a kernel computes together; of wide heads fewer


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Groups of decode sequences whose block tables begin with the same blocks: a kernel may read those once per group.

    A hint: attention gives the same numbers without it, up to rounding. A sequence is in one group at most.
    """

    seq_index: torch.Tensor  # int32: the sequences of group 0, then of group 1, ...
    cu_groups: torch.Tensor  # int32 [G + 1]: prefix sum of group sizes
    # int32: tokens shared, a multiple of PREFIX_UNIT, at most the context of the shortest sequence of the group
    prefix_lens_G: torch.Tensor
    prefix_lens_S: torch.Tensor  # int32, per decode sequence: that of its group; 0: in none
    counts: torch.Tensor  # int32 [2]: how many groups there are, whatever there is room for, and the longest prefix


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """A mixed step: sequences in decode come first, each with one query token; then chunks of prompts.

    The integers are known to the host without asking the device. Sequence s owns query tokens
    `cu_seqlens_q[s]:cu_seqlens_q[s + 1]`; its last query token is at position `context_lens_S[s] - 1`.

    A step that is padded to a captured one has tokens of nobody at its end, and sequences of both kinds without query
    and context, so there may be more decode sequences than decode tokens; the lengths are bounds there.
    """

    slot_mapping_T: torch.Tensor  # int64: block id * B + offset, where each token's K and V are written
    block_tables_SM: torch.Tensor  # int32: block ids in order, padded with NULL_BLOCK
    context_lens_S: torch.Tensor  # int32: tokens in the KV cache after this step's are written
    cu_seqlens_q: torch.Tensor  # int32 [S + 1]: prefix sum of query tokens
    num_decode_seqs: int  # the first so many sequences have exactly one query token
    max_query_len: int
    max_context_len: int
    max_decode_keys: int | None = None  # of the decode sequences' contexts together, where that is known
    # int64 [2, C]: slots whose KV is copied and where to, after the step's KV is stored and before anybody attends
    kv_copies: torch.Tensor | None = None
    shared_prefixes: SharedPrefixes | None = None
    rows_S: torch.Tensor | None = None  # int64: the permanent rows, for layers that keep a state in them
    is_padded: bool = False  # there may be padding tokens at the end: attention gives them zeros
    plans: AttentionPlans = field(default_factory=AttentionPlans, init=False, repr=False, compare=False)

    def of_tokens(self, indices: torch.Tensor) -> AttentionMetadata:
        """The step of these tokens alone, int64 [S'], ascending, each as a sequence of its own up to itself.

        Keys and values are written, and nothing is copied any more; what others share plays no role.
        """
        seqs = torch.searchsorted(self.cu_seqlens_q, indices.int(), right=True) - 1
        later_S = self.cu_seqlens_q[seqs + 1] - 1 - indices  # tokens of the same sequence
        return AttentionMetadata(
            slot_mapping_T=self.slot_mapping_T[indices],
            block_tables_SM=self.block_tables_SM[seqs],
            context_lens_S=(self.context_lens_S[seqs] - later_S).int(),
            cu_seqlens_q=torch.arange(len(indices) + 1, dtype=torch.int32, device=indices.device),
            num_decode_seqs=len(indices),
            max_query_len=1,
            max_context_len=self.max_context_len,
        )
