"""The answers of vLLM's `run-batch` and of bulkrun to one OpenAI batch file: greedy, in float32, by the bundled model.

    python -m tests.benchmarks.cpu_peers setup --workdir DIR --models llama-20m --peers bulkrun vllm
    python -m tests.benchmarks.run_batch --workdir DIR

Each line of LINES asks for one thing that both take. Compared are text, finish_reason, usage and, where the line asks
for them, tokens and their log-probabilities; what differs is printed, and the exit status is 1 then. Not here: lines of
/v1/completions, which vLLM's run-batch does not serve, and what cannot be equal (sampled outputs: other noise).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bulkrun.errors import EXIT_OK, EXIT_ROW_ERRORS
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from tests.benchmarks.cpu_peers.environments import Workplace

MODEL = BUNDLED_ROOT / "tiny"
CODE = "Summarize this Python code in one sentence:\ndef rows(path):\n    return list(open(path))"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
LINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "max_completion_tokens": {"max_completion_tokens": 5},
    "stop": {"stop": ["zzz", " a"]},
    "stop in the text": {"stop": [" a"], "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": [333]},
    "min_tokens": {"min_tokens": 20, "max_tokens": 30},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 60},
    "logit_bias": {"logit_bias": {"300": 100}},
    "bad_words": {"bad_words": ["a", " a"]},
    "allowed_token_ids": {"allowed_token_ids": [300, 301, 302, 2]},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "other penalties": {"presence_penalty": 1.5, "frequency_penalty": 1.5, "ignore_eos": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 3, "max_tokens": 8},  # vLLM has them of the end token too
    "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    "json_object": {"response_format": {"type": "json_object"}},
    "choice": {"structured_outputs": {"choice": ["good", "bad"]}},
    "regex": {"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}},
    "GBNF": {"structured_outputs": {"grammar": "root ::= [a-c] digit{3}\ndigit ::= [0-9]"}},
    "a system message": {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": CODE}]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in ("Hello", CODE)]}]},
    "continued": {
        "messages": [{"role": "user", "content": CODE}, {"role": "assistant", "content": "This function"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
}


def requests() -> Iterator[dict[str, Any]]:
    """The lines of the batch file."""
    for name, asked in LINES.items():
        body = {"model": "m", "messages": [{"role": "user", "content": CODE}], "max_tokens": 60, "temperature": 0}
        yield {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body | asked}


def answers_of_vllm(place: Workplace, folder: Path) -> dict[str, Any]:
    module = ["-m", "vllm.entrypoints.openai.run_batch", "--model", str(MODEL), "--served-model-name", "m"]
    files = ["-i", str(folder / "in.jsonl"), "-o", str(folder / "vllm.jsonl")]
    settings = ["--dtype", "float32", "--enforce-eager"]
    command = [place.python("vllm"), *module, *files, *settings]
    subprocess.run(command, env=place.variables("vllm", 2), cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return _answers(folder / "vllm.jsonl")


def answers_of_bulkrun(folder: Path) -> dict[str, Any]:
    job = {"name": "b", "model": "bundled:tiny", "input": {"path": str(folder / "in.jsonl")}}
    job |= {"engine": {"device": "cpu", "dtype": "float32"}, "sampling": {"logprobs": 3}}
    (folder / "job.yaml").write_text(json.dumps(job | {"output": {"path": str(folder / "out")}}))
    export = ["export", str(folder / "out"), "--format", "openai", "-o", str(folder / "ours.jsonl")]
    for arguments in (["submit", str(folder / "job.yaml")], export):
        done = subprocess.run([sys.executable, "-m", "bulkrun", *arguments], check=False, stdout=subprocess.DEVNULL)
        assert done.returncode in (EXIT_OK, EXIT_ROW_ERRORS), "it has said why"
    return _answers(folder / "ours.jsonl")


def _answers(file: Path) -> dict[str, Any]:
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return {line["custom_id"]: (line["response"] or {}).get("body") or line["error"] for line in lines}


def said(answer: dict[str, Any], *, logprobs: bool) -> list[Any]:
    """What an answer says that another engine's must say too."""
    if "choices" not in answer:
        return [answer]
    [choice] = answer["choices"]
    usage = [answer["usage"][f"{kind}_tokens"] for kind in ("prompt", "completion")]
    chances = [
        [(token["token"], token["logprob"], token["bytes"]) for token in (one, *one["top_logprobs"])]
        for one in (choice["logprobs"] or {}).get("content") or ()
    ]
    return [choice["message"]["content"], choice["finish_reason"], *usage, *(chances if logprobs else ())]


def same(a: Any, b: Any) -> bool:
    """Whether both say the same; log-probabilities are as exact as float32 is after some layers."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return abs(a - b) < 1e-3 if isinstance(a, float) and isinstance(b, float) else bool(a == b)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, required=True, help="where `cpu_peers setup` made vLLM's environment")
    place = Workplace(parser.parse_args().workdir)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in requests()))
        theirs, ours = answers_of_vllm(place, folder), answers_of_bulkrun(folder)
    other = 0
    for name, asked in LINES.items():
        both = [said(answers[name], logprobs="logprobs" in asked) for answers in (theirs, ours)]
        if not same(*both):
            other += 1
            print(f"{name}\n  vLLM    {both[0]}\n  bulkrun {both[1]}")
    print(f"{len(LINES) - other} of {len(LINES)} answers are the same")
    return int(other > 0)


if __name__ == "__main__":
    sys.exit(main())
