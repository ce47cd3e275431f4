"""What 8 bits cost in quality, fp8 and int8: the same texts through the engine in every precision, beside float32.

    python -m tests.benchmarks.fp8_quality [--model DIR] [--num-texts 196] [--device auto] [--record]

Texts are functions of Python's standard library in modules that `bundled:tiny` never saw in training (split and
prompt of `examples/tiny_data.py`, from `--functions`, which `python examples/extract_functions.py` writes): prompt and
the sentence its author wrote, over whose tokens everything is counted. Without `--model`: the bundled model, and three
seeded random ones over random tokens, of which only agreement and gaps mean anything. Per precision, unless model or
device refuse it:

- perplexity of the author's tokens;
- agreement: share of positions whose likeliest token is float32's (forced: the text goes on as it is written);
- regret: how much less likely than its own likeliest token float32 finds the one chosen instead, in nats: the worst
  position (of tokens that float32 has among its 20 likeliest; others are counted as `far_off`);
- worst_gap, mean_gap: the largest difference of a log-probability among float32's five likeliest tokens of a position
  (those that are among the other's 20), at the worst position and on average.

bfloat16 without either is the yardstick: what rounding costs anyway. Prints one JSON line per model.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.errors import BulkrunError
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from bulkrun.request import Request, SamplingParams, TokenLogprob
from bulkrun.text.tokenizer import Tokenizer
from tests.benchmarks.machine import commit, machine, record
from tests.models.tiny_models import save_tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples"
REFERENCE: Mapping[str, str] = {"dtype": "float32"}
PRECISIONS: Mapping[str, Mapping[str, str]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "kv fp8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "weights fp8": {"dtype": "bfloat16", "quantization": "fp8"},
    "weights int8": {"dtype": "bfloat16", "quantization": "int8"},
    "both fp8": {"dtype": "bfloat16", "quantization": "fp8", "kv_cache_dtype": "fp8"},
}
RANDOM_SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 4096}
RANDOM_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
RANDOM_MODELS = {
    "llama": RANDOM_SIZES,
    "qwen3": RANDOM_SIZES,
    "qwen3_moe": RANDOM_SIZES | {"moe_intermediate_size": 704, "num_experts": 8, "mlp_only_layers": []},
}
RANDOM_TEXTS, RANDOM_LENGTH = 16, 200
NUM_LOGPROBS, NUM_COMPARED = 20, 5


class Text(NamedTuple):
    """Token ids, of which those from `num_prompt_tokens` on count."""

    token_ids: list[int]
    num_prompt_tokens: int


class Difference(NamedTuple):
    """One position of one precision beside float32."""

    agrees: bool
    regret: float | None  # None: float32 does not have the token among its likeliest
    gap: float | None  # None: nor have we any of float32's


def main() -> None:
    """Read the command line and print a line per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a directory with a tokenizer; default: bundled:tiny, random ones")
    parser.add_argument("--functions", type=Path, default=Path("data/functions.parquet"))
    parser.add_argument("--num-texts", type=int, default=196)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--record", action="store_true", help="append to history.jsonl")
    args = parser.parse_args()
    if not args.functions.exists():
        sys.exit(f"{args.functions}: not there; run python examples/extract_functions.py --out {args.functions}")
    with tempfile.TemporaryDirectory(prefix="bulkrun-fp8-") as scratch:
        for name, folder, texts in models(args.model, args.functions, args.num_texts, Path(scratch)):
            result = {"benchmark": "fp8_quality", "model": name, **compare(folder, texts, args.device)}
            print(json.dumps(result), flush=True)
            if args.record:
                record({**result, "machine": machine(), "commit": commit()})


def models(
    given: Path | None, functions: Path, num_texts: int, scratch: Path
) -> Iterator[tuple[str, Path, list[Text]]]:
    """Name, directory and texts of each model to compare."""
    folder = given or BUNDLED_ROOT / "tiny"
    yield (folder.name if given else "bundled:tiny"), folder, held_out_texts(folder, functions, num_texts)
    if given is None:
        for variant, sizes in RANDOM_MODELS.items():
            random_folder = save_tiny_model(scratch / variant, variant, **sizes, **RANDOM_HEADS, head_dim=64)
            yield f"random {variant}", random_folder, random_texts()


def held_out_texts(folder: Path, functions: Path, count: int) -> list[Text]:
    """Prompts, as the chat template writes them, and summaries of modules that the bundled model has not seen."""
    data, tokenizer = example("tiny_data"), Tokenizer.from_dir(folder)
    texts = []
    for pair in data.read_split(functions).held_out[:count]:
        asked = f"{pair.prompt}\n"
        if tokenizer.has_chat_template:
            asked = tokenizer.chat_renderer().render([{"role": "user", "content": pair.prompt}])
        prompt, summary = tokenizer.encode_batch([asked, pair.summary], add_special_tokens=False)
        texts.append(Text(prompt + summary, len(prompt)))
    return texts


def random_texts() -> list[Text]:
    """Seeded random tokens."""
    generator = torch.Generator().manual_seed(0)
    shape, vocab_size = (RANDOM_TEXTS, RANDOM_LENGTH), RANDOM_SIZES["vocab_size"]
    return [Text(row, 1) for row in torch.randint(3, vocab_size, shape, generator=generator).tolist()]


def example(name: str) -> ModuleType:
    """A script of `examples/` as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None, name
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare(folder: Path, texts: Sequence[Text], device: str) -> dict[str, Any]:
    """Every precision beside float32."""
    exact = logprobs(folder, texts, device, REFERENCE)
    rows: dict[str, dict[str, Any]] = {"float32": {"perplexity": perplexity(exact)}}
    for name, settings in PRECISIONS.items():
        try:
            ours = logprobs(folder, texts, device, settings)
        except BulkrunError as error:
            rows[name] = {"refused": str(error)}
            continue
        rows[name] = {"perplexity": perplexity(ours), **summary(ours, exact)}
    return {"texts": len(texts), "tokens": len(exact), "precisions": rows}


def logprobs(folder: Path, texts: Sequence[Text], device: str, settings: Mapping[str, str]) -> list[TokenLogprob]:
    """What the engine says of every counted token, text by text."""
    longest = max(len(text.token_ids) for text in texts) + 1
    engine = LLMEngine.from_model_dir(folder, device=device, max_model_len=longest, max_num_seqs=32, **settings)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=NUM_LOGPROBS)
    for number, text in enumerate(texts):
        engine.add_request(Request(str(number), text.token_ids, params))
    found: dict[int, Sequence[TokenLogprob | None]] = {}
    while engine.has_unfinished():
        for completion in engine.step():
            assert completion.error is None and completion.prompt_logprobs is not None, completion.error
            found[int(completion.request_id)] = completion.prompt_logprobs
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    counted = [one for n, text in enumerate(texts) for one in found[n][text.num_prompt_tokens :]]
    return [one for one in counted if one is not None]


def perplexity(tokens: Sequence[TokenLogprob]) -> float:
    """exp of the mean loss."""
    return round(math.exp(-sum(token.logprob for token in tokens) / len(tokens)), 4)


def summary(ours: Sequence[TokenLogprob], exact: Sequence[TokenLogprob]) -> dict[str, float]:
    """Agreement, regret and gap over all positions."""
    differences = [difference(*both) for both in zip(ours, exact, strict=True)]
    regrets = [one.regret for one in differences if one.regret is not None]
    gaps = [one.gap for one in differences if one.gap is not None]
    return {
        "agreement": round(sum(one.agrees for one in differences) / len(differences), 4),
        "worst_regret": round(max(regrets), 4),
        "far_off": len(differences) - len(regrets),
        "worst_gap": round(max(gaps), 4),
        "mean_gap": round(sum(gaps) / len(gaps), 4),
    }


def difference(ours: TokenLogprob, exact: TokenLogprob) -> Difference:
    """One position; `top` is in descending order."""
    likely, chosen = dict(exact.top), ours.top[0][0]
    (best, best_logprob), mine = exact.top[0], dict(ours.top)
    regret = best_logprob - likely[chosen] if chosen in likely else None
    gaps = [abs(mine[token] - logprob) for token, logprob in exact.top[:NUM_COMPARED] if token in mine]
    return Difference(chosen == best, regret, max(gaps, default=None))


if __name__ == "__main__":
    main()
