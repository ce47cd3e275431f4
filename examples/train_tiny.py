"""Train, export and evaluate `bundled:tiny`, a Qwen3-shaped model that summarizes Python functions.

    python examples/train_tiny.py train --minutes 80      # again: continues where it was
    python examples/train_tiny.py export                  # writes bulkrun/bundled/tiny
    python examples/train_tiny.py evaluate                # held-out modules, beside two baselines

The text is your own installation's (`extract_functions.py --packages all`); `tiny_data.py` makes pairs of it.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from extract_functions import extract, roots_of
from tiny_data import (
    IM_END,
    MAX_POSITIONS,
    VOCAB_SIZE,
    Pair,
    Split,
    encode,
    prompt_text,
    read_split,
    train_tokenizer,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

STATE = Path("out/tiny")
BUNDLED = Path(__file__).resolve().parent.parent / "bulkrun" / "bundled" / "tiny"
SEED = 0
BUCKET_TOKENS = (64, 96, 128, 144, 160, 176, 192, 224)  # a pair is padded to the next, or cut to the last
STEP_TOKENS = 8192
SOURCE_WEIGHT = 0.15  # of a source token's loss; a summary token's is 1
MUON_LR, ADAMW_LR, WARMUP = 4e-3, 3e-3, 0.02
CHECKPOINT_EVERY_S = 120
MAX_NEW_TOKENS = 48


class Batch(NamedTuple):
    """Padded pairs of like length. All three: (sequences, tokens)."""

    inputs: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


def new_model() -> Qwen3ForCausalLM:
    """The untrained model: 5.5 million parameters, embeddings included."""
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


def functions_file() -> Path:
    """The extracted functions of everything installed, extracted now if they are not there yet."""
    path = STATE / "functions.parquet"
    if not path.exists():
        extract(roots_of(["all"]), path)
    return path


def saved_tokenizer(split: Split) -> PreTrainedTokenizerFast:
    """The tokenizer of this training, trained on first use."""
    folder = STATE / "tokenizer"
    if not folder.exists():
        train_tokenizer(split.train).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def encode_pairs(tokenizer: PreTrainedTokenizerFast, pairs: list[Pair]) -> list[tuple[list[int], int]]:
    """Each pair as the token ids of prompt + summary + end, and how many of them are the prompt."""
    prompts = encode(tokenizer, [prompt_text(tokenizer, pair) for pair in pairs])
    summaries = encode(tokenizer, [pair.summary + IM_END for pair in pairs])
    return [(p + s, len(p)) for p, s in zip(prompts, summaries, strict=True) if len(p) < BUCKET_TOKENS[-1]]


def collate(examples: list[tuple[list[int], int]], num_tokens: int, source_weight: float) -> Batch:
    """Pad on the right: causal attention never looks there, and the padding weighs nothing."""
    ids = torch.zeros(len(examples), num_tokens + 1, dtype=torch.long)
    weights = torch.zeros(len(examples), num_tokens + 1)
    for row, (tokens, num_prompt) in enumerate(examples):
        tokens = tokens[: num_tokens + 1]
        ids[row, : len(tokens)] = torch.tensor(tokens)
        weights[row, :num_prompt] = source_weight
        weights[row, num_prompt : len(tokens)] = 1.0
    return Batch(ids[:, :-1], ids[:, 1:], weights[:, 1:])


def batches(examples: list[tuple[list[int], int]], epoch: int) -> list[tuple[int, list[int]]]:
    """One pass in a random order fixed by (seed, epoch): padded length and example numbers of each batch."""
    rng = random.Random(f"{SEED}-{epoch}")
    order = rng.sample(range(len(examples)), len(examples))
    planned = []
    shorter = 0
    for num_tokens in BUCKET_TOKENS:
        limit = math.inf if num_tokens == BUCKET_TOKENS[-1] else num_tokens
        bucket = [i for i in order if shorter < len(examples[i][0]) - 1 <= limit]
        size = STEP_TOKENS // num_tokens
        planned += [(num_tokens, bucket[at : at + size]) for at in range(0, len(bucket) - size + 1, size)]
        shorter = num_tokens
    rng.shuffle(planned)
    return planned


def batches_from(examples: list[tuple[list[int], int]], step: int) -> Iterator[Batch]:
    """The endless sequence of training batches, from the one of number `step`."""
    epoch, at = divmod(step, len(batches(examples, 0)))
    while True:
        for num_tokens, members in batches(examples, epoch)[at:]:
            yield collate([examples[i] for i in members], num_tokens, SOURCE_WEIGHT)
        epoch, at = epoch + 1, 0


def weighted_loss(model: Qwen3ForCausalLM, batch: Batch) -> torch.Tensor:
    """Cross entropy per unit of weight."""
    hidden = model.model(input_ids=batch.inputs, use_cache=False).last_hidden_state
    logits = F.linear(hidden, model.lm_head.weight).float().flatten(0, 1)
    losses = F.cross_entropy(logits, batch.targets.flatten(), reduction="none")
    return (losses * batch.weights.flatten()).sum() / batch.weights.sum()


class Trainer:
    """A bfloat16 model with float32 master weights: Muon for the hidden matrices, AdamW for the rest."""

    def __init__(self, device: str) -> None:
        self.model = new_model().to(device)
        self.params = list(self.model.parameters())
        self.masters = [param.detach().clone() for param in self.params]
        for param in self.params:
            param.data = param.data.bfloat16()
        embeddings = {id(self.model.lm_head.weight)}
        is_hidden = [param.dim() == 2 and id(param) not in embeddings for param in self.params]
        hidden = [m for m, yes in zip(self.masters, is_hidden, strict=True) if yes]
        rest = [m for m, yes in zip(self.masters, is_hidden, strict=True) if not yes]
        muon = torch.optim.Muon(hidden, lr=MUON_LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(rest, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0)
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [(muon, MUON_LR), (adamw, ADAMW_LR)]
        torch._dynamo.config.recompile_limit = 2 * len(BUCKET_TOKENS)  # one compilation for each length
        self.compiled_loss: Callable[..., torch.Tensor] = torch.compile(weighted_loss, dynamic=False)
        self.step = 0
        self.elapsed_s = 0.0

    def train_step(self, batch: Batch, progress: float) -> float:
        """One optimizer step; `progress` in [0, 1] sets the learning rate."""
        loss = self.compiled_loss(self.model, batch)
        loss.backward()
        for master, param in zip(self.masters, self.params, strict=True):
            assert param.grad is not None, "every parameter takes part"
            master.grad = param.grad.float()
            param.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        scale = min(1.0, progress / WARMUP) * (0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2)
        for optimizer, rate in self.optimizers:
            optimizer.param_groups[0]["lr"] = rate * scale
            optimizer.step()
        self.publish()
        self.step += 1
        return loss.item()

    def publish(self) -> None:
        """Copy the master weights into the model."""
        with torch.no_grad():
            for master, param in zip(self.masters, self.params, strict=True):
                param.copy_(master)

    def save(self, path: Path) -> None:
        """Write everything needed to continue; whole or not at all."""
        state = {
            "masters": self.masters,
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
            "step": self.step,
            "elapsed_s": self.elapsed_s,
        }
        torch.save(state, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)

    def load(self, path: Path) -> None:
        """Continue from what `save` wrote."""
        state = torch.load(path, map_location=self.masters[0].device, weights_only=True)
        for master, saved in zip(self.masters, state["masters"], strict=True):
            master.copy_(saved)
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]
        self.publish()


@torch.no_grad()
def held_out_loss(model: Qwen3ForCausalLM, examples: list[tuple[list[int], int]]) -> float:
    """Mean loss per summary token (its end token included)."""
    total = count = 0.0
    ordered = sorted(examples, key=lambda example: len(example[0]))
    for at in range(0, len(ordered), 32):
        part = ordered[at : at + 32]
        batch = collate(part, min(len(part[-1][0]) - 1, BUCKET_TOKENS[-1]), source_weight=0.0)
        batch = Batch(*(tensor.to(model.device) for tensor in batch))
        weight = batch.weights.sum().item()
        total, count = total + weighted_loss(model, batch).item() * weight, count + weight
    return total / count


def train(minutes: float, device: str) -> None:
    """Train until `minutes` are used up over all calls, then say the held-out loss."""
    split = read_split(functions_file())
    tokenizer = saved_tokenizer(split)
    examples, held_out = encode_pairs(tokenizer, split.train), encode_pairs(tokenizer, split.held_out)
    trainer, state = Trainer(device), STATE / "state.pt"
    if state.exists():
        trainer.load(state)
    print(
        f"{len(examples)} pairs, {len(held_out)} held out, {len(batches(examples, 0))} steps a pass",
        flush=True,
    )
    started_s = time.monotonic() - trainer.elapsed_s
    saved_s = trainer.elapsed_s
    recent: list[float] = []
    for batch in batches_from(examples, trainer.step):
        trainer.elapsed_s = time.monotonic() - started_s
        progress = trainer.elapsed_s / (60 * minutes)
        if progress >= 1:
            break
        recent.append(trainer.train_step(Batch(*(tensor.to(device) for tensor in batch)), progress))
        if trainer.elapsed_s - saved_s > CHECKPOINT_EVERY_S:
            saved_s = trainer.elapsed_s
            trainer.save(state)
            loss = sum(recent) / len(recent)
            print(f"{saved_s / 60:5.1f} min  step {trainer.step}  training loss {loss:.3f}", flush=True)
            recent = []
    trainer.save(state)
    print(f"step {trainer.step}: held-out loss {held_out_loss(trainer.model, held_out):.3f}", flush=True)


def export(folder: Path) -> None:
    """Write the trained model, its tokenizer and its generation settings to `folder`."""
    model = new_model()
    masters = torch.load(STATE / "state.pt", map_location="cpu", weights_only=True)["masters"]
    for param, master in zip(model.parameters(), masters, strict=True):
        param.data = master.bfloat16()
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0, do_sample=False)
    model.save_pretrained(folder)
    shutil.copytree(STATE / "tokenizer", folder, dirs_exist_ok=True)
    for path in folder.iterdir():
        path.chmod(0o644)
    print(f"{folder}: {sum(param.numel() for param in model.parameters()):,} parameters")


def words_of(text: str) -> list[str]:
    """The lower-case words and numbers of `text`."""
    return re.findall(r"[a-z]+|[0-9]+", text.lower())


def words_of_identifier(name: str) -> str:
    """`JSONDecoder.raw_decode` -> `raw decode`: the last part of a name, split into words."""
    return " ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", name.rsplit(".", 1)[-1])).lower()


def unigram_f1(guess: str, truth: str) -> float:
    """F1 of the words in common, however ordered."""
    left, right = words_of(guess), words_of(truth)
    common = sum((Counter(left) & Counter(right)).values())
    return 2 * common / (len(left) + len(right)) if common else 0.0


def rouge_l(guess: str, truth: str) -> float:
    """F1 of the longest common subsequence of words."""
    left, right = words_of(guess), words_of(truth)
    lengths = [0] * (len(right) + 1)
    for word in left:
        previous = lengths[:]
        for at, other in enumerate(right):
            lengths[at + 1] = previous[at] + 1 if word == other else max(previous[at + 1], lengths[at])
    return 2 * lengths[-1] / (len(left) + len(right)) if lengths[-1] else 0.0


@torch.no_grad()
def summarize(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: list[Pair]) -> list[str]:
    """The model's greedy summaries, in the order of `pairs`."""
    prompts = [prompt_text(tokenizer, pair) for pair in pairs]
    summaries: dict[int, str] = {}
    order = sorted(range(len(pairs)), key=lambda i: len(prompts[i]))
    for at in range(0, len(order), 32):
        members = order[at : at + 32]
        inputs = tokenizer(
            [prompts[i] for i in members],
            add_special_tokens=False,
            padding=True,
            padding_side="left",
            return_tensors="pt",
        ).to(model.device)
        ids = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS)[:, inputs["input_ids"].shape[1] :]
        summaries.update(zip(members, tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True))
    return [summaries[i] for i in range(len(pairs))]


def report(title: str, guesses: list[str], pairs: list[Pair]) -> str:
    """One Markdown table row: mean ROUGE-L and unigram F1."""
    scores = [(rouge_l(g, p.summary), unigram_f1(g, p.summary)) for g, p in zip(guesses, pairs, strict=True)]
    rouge, unigram = (100 * sum(column) / len(scores) for column in zip(*scores, strict=True))
    return f"| {title} | {rouge:.1f} | {unigram:.1f} |"


def evaluate(folder: Path, num_samples: int) -> None:
    """Print held-out loss, text metrics beside the baselines, and random samples, as Markdown."""
    split = read_split(functions_file())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    print(f"Pairs: {len(split.train):,} for training, {len(split.held_out):,} held out.")
    print(f"Held-out loss per summary token: {held_out_loss(model, encode_pairs(tokenizer, split.held_out)):.3f}\n")
    guesses = summarize(model, tokenizer, split.held_out)
    counts = Counter(pair.summary for pair in split.train)
    (most_frequent, _), *_ = counts.most_common(1)
    for title, chosen in (
        ("All held-out pairs", range(len(guesses))),
        (
            "Only those whose summary is nowhere in training",
            [i for i, p in enumerate(split.held_out) if p.summary not in counts],
        ),
    ):
        pairs = [split.held_out[i] for i in chosen]
        print(f"| {title} ({len(pairs)}) | ROUGE-L F1 | unigram F1 |\n|---|---|---|")
        print(report("this model, greedy", [guesses[i] for i in chosen], pairs))
        print(report("the identifier split into words", [words_of_identifier(p.name) for p in pairs], pairs))
        print(report("the most frequent summary", [most_frequent] * len(pairs), pairs) + "\n")
    for i in random.Random(SEED).sample(range(len(guesses)), num_samples):
        pair = split.held_out[i]
        print(f"- `{pair.module}.{pair.name}`\n  - its author: {pair.summary}\n  - this model: {guesses[i]}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train until the time budget is used up; continues by itself")
    training.add_argument("--minutes", type=float, default=90, help="over all calls together (default: %(default)s)")
    training.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    exporting = commands.add_parser("export", help="write the trained model")
    exporting.add_argument("--out", type=Path, default=BUNDLED)
    evaluating = commands.add_parser("evaluate", help="measure an exported model on held-out modules")
    evaluating.add_argument("--model", type=Path, default=BUNDLED)
    evaluating.add_argument("--samples", type=int, default=10)
    args = parser.parse_args()
    if args.command == "train":
        train(args.minutes, args.device)
    elif args.command == "export":
        export(args.out)
    else:
        evaluate(args.model, args.samples)


if __name__ == "__main__":
    main()
