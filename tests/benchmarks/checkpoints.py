"""Checkpoints for benchmarks: seeded random weights in public shapes, the same on every run, and a trained tokenizer.

Random weights of a usual initialization make poor oracles: logits so close that rounding picks the token, or a model
that repeats its input. Here the logits are wide and the final norm's gains have random signs, so that a tied embedding
does not vote for the token it has just read.
"""

from __future__ import annotations

import json
import pydoc_data.topics
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SHAPES = ("llama-20m", "qwen3-0.6b", "gemma3-270m", "qwen3.5-0.8b", "qwen3-moe-0.4b", "mamba-130m")
_GAINS_BESIDE_1 = ("gemma3_text", "qwen3_5_text")  # 1 is added to them
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_checkpoint(shape: str, folder: Path) -> Path:
    """Write config, bf16 weights, tokenizer and generation config into `folder`; returns it."""
    model = _model(shape)
    _randomize(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    _write_tokenizer(folder, model.config.vocab_size)
    # sampling by default: a runner that forgets to override it is found out by the check of its tokens
    defaults = {"do_sample": True, "temperature": 0.7, "eos_token_id": 2, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(defaults), encoding="utf-8")
    return folder


def corpus() -> list[str]:
    """Real English: the pages of Python's own help, in a fixed order."""
    return [text for _, text in sorted(pydoc_data.topics.topics.items())]


def _model(shape: str) -> transformers.PreTrainedModel:
    special = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    if shape == "llama-20m":
        sizes = _sizes(hidden=384, intermediate=1024, layers=8, heads=6, kv_heads=2, head_dim=64, vocab=8192)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **special, tie_word_embeddings=False))
    if shape == "gemma3-270m":  # the body of Gemma 3 270M, with a vocabulary cut down as below
        sizes = _sizes(hidden=640, intermediate=2048, layers=18, heads=4, kv_heads=1, head_dim=256, vocab=16384)
        config = transformers.Gemma3TextConfig(**sizes, **special, sliding_window=512, query_pre_attn_scalar=256)
        return transformers.Gemma3ForCausalLM(config)
    if shape == "qwen3.5-0.8b":  # the text part's body, with a vocabulary cut down as below
        sizes = _sizes(hidden=1024, intermediate=3584, layers=24, heads=8, kv_heads=2, head_dim=256, vocab=16384)
        heads = {"linear_num_key_heads": 16, "linear_num_value_heads": 16}
        config = transformers.Qwen3_5TextConfig(**sizes, **special, **heads, tie_word_embeddings=True)
        return transformers.Qwen3_5ForCausalLM(config)
    if shape == "qwen3-moe-0.4b":  # Qwen3-30B-A3B's layers at three eighths of their width
        sizes = _sizes(hidden=768, intermediate=2304, layers=12, heads=12, kv_heads=4, head_dim=64, vocab=16384)
        experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 384, "norm_topk_prob": True}
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **special, **experts))
    if shape == "mamba-130m":  # with a vocabulary cut down as below
        sizes = {"hidden_size": 768, "num_hidden_layers": 24, "vocab_size": 16384, "max_position_embeddings": 4096}
        return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, **special))
    assert shape == "qwen3-0.6b", f"no shape {shape}"
    # the body of Qwen3-0.6B; its vocabulary of 151,936 is cut down to what can be trained here
    sizes = _sizes(hidden=1024, intermediate=3072, layers=28, heads=16, kv_heads=8, head_dim=128, vocab=16384)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **special, tie_word_embeddings=True))


def _sizes(
    *, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int
) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
    }


@torch.no_grad()
def _randomize(model: transformers.PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        is_rate = name.endswith("A_log")  # of states, which would forget nothing or everything
        if (parameter.ndim == 2 or ".experts." in name) and not is_rate:
            parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5, generator=generator)
    final_norm = (model.base_model.norm_f if hasattr(model.base_model, "norm_f") else model.base_model.norm).weight
    signs = torch.randint(0, 2, final_norm.shape, generator=generator) * 2 - 1
    final_norm.copy_(signs - 1 if model.config.model_type in _GAINS_BESIDE_1 else signs)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=_CHAT_TEMPLATE
    )
    fast.save_pretrained(folder)
