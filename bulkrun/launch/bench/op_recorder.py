"""An engine whose steps, and if wanted whose ops, leave their names in a profiler's trace; and what each call cost.

While recording, functions of `bulkrun.ops` and the model's products are replaced by ones that do the same inside an
annotation. Calls are numbered; the trace names the number, `calls` has the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch.profiler import record_function

from bulkrun import ops
from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.engine.step import model_runner
from bulkrun.launch.bench.device_trace import OP_PREFIX, STEP_PREFIX
from bulkrun.launch.bench.op_costs import OpCall, OpCost, StepSequences, attention_cost, experts_cost, product_cost
from bulkrun.models.decoder.attention import Attention
from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.decoder.invariant import InvariantLatentHeads, InvariantModel
from bulkrun.models.decoder.latent_attention import LatentAttention, LatentHeads
from bulkrun.ops.attention.paged_attention import are_in_keys
from bulkrun.ops.dispatch import uses_triton
from bulkrun.ops.matmul.weight_kinds import numbers_per_item, values_of
from bulkrun.windows import Window

Function = Callable[..., Any]
Price = Callable[..., OpCall]  # of a call's result, arguments and keyword arguments

_PASSES = {  # over tensors as large as the result
    "rms_norm": 2, "add_rms_norm": 4, "silu_mul": 3, "gelu_mul": 3, "xielu": 2, "causal_conv": 2, "gated_rms_norm": 3,
    "cut_gates_": 2,
}  # fmt: skip
_PASSES_OVER_STREAMS = {"with_rms_of": 2, "predict_streams": 2, "correct_streams": 2}  # each of T tokens
# with a vector, of a head's state for each token
_PRODUCTS_OF_STATES = {"gated_delta_rule": 3, "state_space": 2, "selective_scan": 2}
_PRODUCTS = (  # modules, by their attribute
    "qkv_proj", "q_b_proj", "qkvz_proj", "in_proj", "ba_proj", "low_proj", "decay_proj", "z_proj", "x_proj", "dt_proj",
    "o_proj", "gate_up_proj", "up_proj", "down_proj", "router", "lm_head", "gate_proj", "out_proj", "projection",
    "left_proj", "right_proj",
)  # fmt: skip


class OpRecorder:
    """Numbers the steps and the calls of ops."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._num_steps = 0
        self._step = StepSequences((), (), 0)
        self.calls: list[OpCall] = []

    @property
    def splits_layers(self) -> bool:
        """Whether `steps_and_ops` runs layers one by one that run in one call otherwise."""
        return _decoder(self._engine).layer_stack is not None

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Steps are annotated; ops run as they always do."""
        with ExitStack() as stack:
            runner = self._engine.model_runner
            _replace(stack, runner, "compute", self._annotated_step(runner.compute))
            _replace(stack, runner, "sample", self._annotated_rest_of_step(runner.sample))
            yield

    @contextmanager
    def steps_and_ops(self) -> Iterator[None]:
        """Ops are annotated too, and run one by one even where graphs or a stack of layers hold them."""
        with ExitStack() as stack:
            stack.enter_context(self.steps())
            _replace(stack, self._engine.model_runner, "graphs", None)
            _replace(stack, _decoder(self._engine), "layer_stack", None)
            for owner, name, price in self._ops():
                _replace(stack, owner, name, self._annotated(getattr(owner, name), price))
            yield

    def _annotated_step(self, compute: Function) -> Function:
        @wraps(compute)
        def annotated(batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._step = StepSequences(tuple(batch.starts), tuple(batch.num_scheduled_tokens), batch.num_decode_seqs)
            self._num_steps += 1
            with record_function(f"{STEP_PREFIX}{self._num_steps}"):
                return compute(batch, *args, **kwargs)

        return annotated

    def _annotated_rest_of_step(self, sample: Function) -> Function:
        @wraps(sample)
        def annotated(*args: Any, **kwargs: Any) -> Any:
            with record_function(f"{STEP_PREFIX}{self._num_steps}"):
                return sample(*args, **kwargs)

        return annotated

    def _annotated(self, op: Function, price: Price) -> Function:
        @wraps(op)
        def annotated(*args: Any, **kwargs: Any) -> Any:
            index = len(self.calls)
            self.calls.append(OpCall("", 0, OpCost()))  # ops inside this one come after it
            with record_function(f"{OP_PREFIX}{index}"):
                result = op(*args, **kwargs)
            self.calls[index] = price(result, *args, **kwargs)
            return result

        return annotated

    def _ops(self) -> Iterator[tuple[Any, str, Price]]:
        """Where each op is looked up when it is called, and what a call of it costs."""
        prices = {name: _pass_over(name, passes) for name, passes in _PASSES.items()}
        prices |= {name: _pass_over(name, passes, of_tokens=1) for name, passes in _PASSES_OVER_STREAMS.items()}
        prices |= {name: _pass_over_states(name, products) for name, products in _PRODUCTS_OF_STATES.items()}
        prices |= {"norm_rotary_store": _norm_rotary_store, "fused_experts": _experts}
        for path, module in _decoder(self._engine).named_modules():
            if isinstance(module, Attention | LatentAttention):
                yield module, "paged_attention", self._attention
            if isinstance(module, LatentHeads | InvariantLatentHeads):
                yield module, "queries_of_latents", _products_of_heads
                yield module, "values", _products_of_heads
            if (name := path.rpartition(".")[2]) in _PRODUCTS:
                yield module, "forward", _product(name, module)
            for attribute, name in _ops_kept_by(module, prices):
                yield module, attribute, prices[name]
        for name, price in prices.items():
            yield ops, name, price
        yield model_runner, "sample_tokens", _sampling

    def _attention(
        self,
        found_THV: torch.Tensor,
        q_THD: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *args: Any,
        sliding_window: Window | None,
        **kwargs: Any,
    ) -> OpCall:
        def call(shape: StepSequences, work_of_prefill_kernels: OpCall | None = None) -> OpCall:
            cost = attention_cost(
                shape,
                attention_width=(q_THD[0].numel() + found_THV[0].numel()) // 2,
                kv_bytes=k_cache[0, 0].numel() * k_cache.element_size() * (1 if are_in_keys(v_cache, k_cache) else 2),
                window=sliding_window,
                itemsize=q_THD.element_size(),
            )
            return OpCall(f"attention, {shape.kind}", sum(shape.counts), cost, work_of_prefill_kernels)

        if self._step.kind != "mixed" or not uses_triton(q_THD):
            return call(self._step)
        return call(self._step.decode, call(self._step.prefill))


def _decoder(engine: LLMEngine) -> Decoder:
    model = engine.model_runner.model
    decoder = model.model if isinstance(model, InvariantModel) else model
    assert isinstance(decoder, Decoder), "a model of the general path has no roofline"
    return decoder


def _ops_kept_by(module: torch.nn.Module, names: Iterable[str]) -> list[tuple[str, str]]:
    """Ops that a module looked up when it was made: under which attribute, and their name."""
    by_op = {getattr(ops, name): name for name in names}
    kept = {attribute: value for attribute, value in vars(module).items() if isinstance(value, Hashable)}
    return [(attribute, by_op[value]) for attribute, value in kept.items() if value in by_op]


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Put a value in the place of another until the stack is closed."""
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:  # it was the class's
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


def _product(name: str, module: torch.nn.Module) -> Price:
    def price(result: torch.Tensor, x: torch.Tensor) -> OpCall:
        rows, weights, moved = x.shape[0], x.shape[-1] * result.shape[-1], _bytes(x) + _bytes(result)
        itemsize = next(module.parameters(), x).dtype.itemsize / getattr(module, "numbers_per_item", 1)
        cost = product_cost(rows, weights, weight_itemsize=itemsize, activation_bytes=moved)
        return OpCall(name, rows, cost)

    return price


def _products_of_heads(out_THO: torch.Tensor, x_THI: torch.Tensor) -> OpCall:
    num_weights, moved = x_THI[0].numel() * out_THO.shape[2], _bytes(x_THI) + _bytes(out_THO)
    cost = product_cost(len(x_THI), num_weights, weight_itemsize=x_THI.element_size(), activation_bytes=moved)
    return OpCall("latent heads", len(x_THI), cost)


def _experts(
    _: Any, x: torch.Tensor, gate_up: ops.ExpertWeights, down: ops.ExpertWeights, weights_Tk: torch.Tensor, *args: Any
) -> OpCall:
    gates, downs, per_item = values_of(gate_up), values_of(down), numbers_per_item(down)
    cost = experts_cost(
        x.shape[0],
        num_experts=gates.shape[0],
        experts_per_tok=weights_Tk.shape[1],
        expert_weights=per_item * (gates[0].numel() + downs[0].numel()),
        itemsize=gates.element_size() / per_item,
    )
    return OpCall("experts", x.shape[0], cost)


def _pass_over(name: str, passes: int, *, of_tokens: int = 0) -> Price:
    """`of_tokens`: the dimension of them."""

    def price(result: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> OpCall:
        written = result[0] if isinstance(result, tuple) else result
        return OpCall(name, x.shape[of_tokens], OpCost(0.0, passes * _bytes(written)))

    return price


def _norm_rotary_store(_: torch.Tensor, qkv_TND: torch.Tensor, *args: Any, **kwargs: Any) -> OpCall:
    return OpCall("norm_rotary_store", qkv_TND.shape[0], OpCost(0.0, 2 * _bytes(qkv_TND)))


def _pass_over_states(name: str, products: int) -> Price:
    """The state is read and written once a sequence."""

    def price(out_THV: torch.Tensor, x_TC: torch.Tensor, *args: Any, **kwargs: Any) -> OpCall:
        *_, state_RHDV, meta = args
        num_tokens, of_sequence = len(x_TC), state_RHDV[0]
        moved = _bytes(x_TC) + _bytes(out_THV) + 2 * len(meta.rows_S) * _bytes(of_sequence)
        return OpCall(name, num_tokens, OpCost(2.0 * products * num_tokens * of_sequence.numel(), moved))

    return price


def _sampling(_: Any, logits_SV: torch.Tensor, *args: Any) -> OpCall:
    return OpCall("sampling", logits_SV.shape[0], OpCost(0.0, _bytes(logits_SV)))


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
