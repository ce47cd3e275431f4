"""An engine without a model: the output is a function of prompt, sampling and seed, so any run can be checked.

The rule (`expected_tokens`) is the oracle of the job tests: they never compare the runner with itself.
"""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b

from bulkrun.request import Completion, EngineStats, PartialOutput, Request, RowError, TokenLogprob

MAX_MODEL_LEN = 512
VECTOR_NUMBERS = 8


def expected_tokens(request: Request) -> tuple[int, ...]:
    """What the fake model answers: noise of (prompt, seed unless greedy), 1 to max_tokens long."""
    seed = 0 if request.sampling.greedy else request.seed
    noise = blake2b(f"{list(request.prompt_token_ids)}|{seed}".encode(), digest_size=32).digest()
    length = 1 + noise[0] % request.sampling.max_tokens
    return tuple(97 + noise[position % 32] % 26 for position in range(length))


def expected_logprob(token_id: int) -> float:
    """The fake model's log-probability of every token it generates."""
    return -((token_id * 7) % 13) / 4


def decode(batch: list[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
    """Token ids are code points."""
    return ["".join(map(chr, ids)) for ids in batch]


class FakeEngine:
    """Generates one token a step for at most `max_num_seqs` requests; ends them in shuffled order.

    `step_s` is slept in every step. `poison` raises in any step that runs a request it says yes to. `refuse` says
    which requests end as error completions. `answer` is the rule of its outputs.
    """

    def __init__(
        self,
        max_num_seqs: int = 4,
        *,
        step_s: float = 0.0,
        poison: Callable[[Request], bool] = lambda request: False,
        refuse: Callable[[Request], bool] = lambda request: False,
        answer: Callable[[Request], tuple[int, ...]] = expected_tokens,
    ) -> None:
        self.max_num_seqs, self.max_model_len = max_num_seqs, MAX_MODEL_LEN
        self._step_s, self._poison, self._refuse, self._answer = step_s, poison, refuse, answer
        self._waiting: list[Request] = []
        self._running: dict[str, tuple[Request, list[int]]] = {}
        self._shuffle = random.Random(7).shuffle
        self._prompt_tokens = self._output_tokens = self._steps = 0
        self.seen: list[Request] = []
        self.starved_steps = 0  # steps with a free place and nobody waiting

    def add_request(self, request: Request) -> None:
        assert request.request_id not in self._running, "one id, two requests"
        self.seen.append(request)
        self._waiting.append(request)

    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._running)

    def step(self) -> list[Completion]:
        time.sleep(self._step_s)
        self._steps += 1
        while self._waiting and len(self._running) < self.max_num_seqs:
            request = self._waiting.pop(0)
            self._running[request.request_id] = (request, list(request.output_token_ids))
            self._prompt_tokens += len(request.prompt_token_ids)
        self.starved_steps += len(self._running) < self.max_num_seqs
        if any(self._poison(request) for request, _ in self._running.values()):
            raise RuntimeError("device-side assert triggered")
        return self._generate()

    def _generate(self) -> list[Completion]:
        ended = []
        for request, tokens in list(self._running.values()):
            answer = self._answer(request)
            assert tuple(tokens) == answer[: len(tokens)], "resumed from another request's tokens"
            self._output_tokens += 1
            tokens.append(answer[len(tokens)]) if len(tokens) < len(answer) else None
            if self._refuse(request) or len(tokens) == len(answer):
                del self._running[request.request_id]
                ended.append(self._completion(request, tuple(tokens)))
        self._shuffle(ended)
        return ended

    def _completion(self, request: Request, tokens: tuple[int, ...]) -> Completion:
        prompt = len(request.prompt_token_ids)
        if self._refuse(request):
            return Completion(request.request_id, (), "error", None, prompt, error=RowError("nan_logits", "no"))
        reason = "length" if len(tokens) == request.sampling.max_tokens else "stop"
        logprobs = None
        if request.sampling.logprobs is not None:
            logprobs = tuple(TokenLogprob(token, expected_logprob(token)) for token in tokens)
        return Completion(request.request_id, tokens, reason, None, prompt, 0, len(tokens), logprobs)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._waiting = [request for request in self._waiting if request.request_id not in request_ids]
        for request_id in request_ids:
            self._running.pop(request_id, None)

    def partial_outputs(self) -> list[PartialOutput]:
        running = self._running.items()
        return [PartialOutput(key, tuple(tokens)) for key, (_, tokens) in running if tokens]

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_steps=self._steps,
            num_prompt_tokens=self._prompt_tokens,
            num_output_tokens=self._output_tokens,
        )


def expected_vector(token_ids: Sequence[int]) -> bytes:
    """What the fake model that embeds makes of a text: noise of its tokens alone, as float32 of any size and sign."""
    noise = blake2b(f"{list(token_ids)}".encode(), digest_size=4 * VECTOR_NUMBERS).digest()
    numbers = struct.unpack(f"<{VECTOR_NUMBERS}i", noise)
    return struct.pack(f"<{VECTOR_NUMBERS}f", *(number / 3e7 for number in numbers))


class FakeEmbedder(FakeEngine):
    """Embeds whatever is running in one step; everything else as `FakeEngine`."""

    def _generate(self) -> list[Completion]:
        ended = [self._embedded(request) for request, _ in self._running.values()]
        self._running.clear()
        self._shuffle(ended)
        return ended

    def _embedded(self, request: Request) -> Completion:
        assert not request.output_token_ids and request.sampling.greedy
        prompt, made = len(request.prompt_token_ids), expected_vector(request.prompt_token_ids)
        if self._refuse(request):
            return Completion(request.request_id, (), "error", None, prompt, error=RowError("engine_error", "no"))
        return Completion(request.request_id, (), "stop", num_prompt_tokens=prompt, embedding=made)
