"""Whether the peers give the tokens transformers gives, in float32, before any of them is timed.

transformers is the oracle, by its own static `generate`. Ours must agree to the last token, for a speed on wrong
results means nothing; what the others do is reported. In bf16 nobody agrees to the last token: with random weights the
likeliest tokens are close, and every engine rounds in another order.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.benchmarks.cpu_peers.environments import Workplace
from tests.benchmarks.cpu_peers.peer import GREEDY
from tests.benchmarks.cpu_peers.runner import Comparison, run_peer_process

_ORACLE = "static"


def check_agreement(place: Workplace, comparison: Comparison) -> dict[str, str]:
    """For each peer how many outputs are the oracle's, as `12/12`. Exits where ours are not all."""
    comparison = replace(comparison, workload="agree", dtype="float32", sampling=GREEDY)
    expected = _tokens(place, comparison, _ORACLE)
    if expected is None:
        sys.exit("transformers does not run; nothing to compare with")
    found = {peer: _tokens(place, comparison, peer) for peer in comparison.peers if peer != _ORACLE}
    agreement = {peer: agree(expected, tokens) for peer, tokens in found.items() if tokens is not None}
    print(f"float32 outputs as transformers has them: {agreement}", file=sys.stderr)
    if "bulkrun" in found and found["bulkrun"] != expected:
        sys.exit(f"bulkrun gives other tokens than transformers in float32 ({agreement.get('bulkrun', 'it failed')})")
    return agreement


def agree(expected: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> str:
    """How many outputs are the same to the last token."""
    same = sum(list(a) == list(b) for a, b in zip(expected, outputs, strict=True))
    return f"{same}/{len(expected)}"


def _tokens(place: Workplace, comparison: Comparison, peer: str) -> list[list[int]] | None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.json"
        if run_peer_process(place, comparison, peer, tokens_out=path) is None:
            return None
        tokens: list[list[int]] = json.loads(path.read_text(encoding="utf-8"))
        return tokens
