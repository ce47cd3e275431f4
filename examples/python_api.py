"""bulkrun from Python: a model to ask, a stream of prompts without end, and a whole job.

python examples/python_api.py [MODEL]
"""

import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import bulkrun

SOURCES = [
    "def read_lines(path):\n    with open(path) as file:\n        return file.readlines()",
    "def close(self):\n    self.socket.close()\n    self.socket = None",
    "def is_empty(self):\n    return len(self.items) == 0",
]
ASK = "Summarize this Python code in one sentence:\n"


def a_list_of_conversations(llm: bulkrun.LLM) -> None:
    """A list in, a list out. A prompt that cannot be answered is an output with an error, not an exception."""
    conversations = [[{"role": "user", "content": ASK + source}] for source in SOURCES]
    for output in llm.chat([*conversations, []], {"temperature": 0, "max_tokens": 32}):
        print(output.index, output.text if output.error is None else output.error.message)


def a_stream_without_end(llm: bulkrun.LLM) -> None:
    """An iterator in, an iterator out: at most 2 x max_num_seqs prompts are in memory."""

    def prompts() -> Iterator[str]:
        for number in itertools.count():
            yield f"def function_{number}(self):"

    outputs = llm.generate(prompts(), {"temperature": 0.8, "max_tokens": 8, "logprobs": 0})
    for output in itertools.islice(outputs, 100):
        if output.index % 25 == 0:
            print(output.index, repr(output.text), round(output.cumulative_logprob or 0, 1))


def a_job(model: str, folder: Path) -> None:
    """What `bulkrun submit` does: durable, resumable, Parquet at the end. The same call again does nothing."""
    rows = [{"id": f"f{number}", "source": source} for number, source in enumerate(SOURCES)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = bulkrun.run_job(
        {
            "name": "summaries",
            "model": model,
            "input": {"path": str(folder / "rows.jsonl"), "id": "id"},
            "prompt": {"template": ASK + "{{ source }}"},
            "sampling": {"temperature": 0, "max_tokens": 32},
            "output": {"path": str(folder / "out")},
        }
    )
    print(f"{done.totals.status}: {done.totals.rows} rows, {done.totals.completion_tokens} tokens")


def main(model: str = "bundled:tiny") -> None:
    llm = bulkrun.LLM(model, max_num_seqs=16)
    a_list_of_conversations(llm)
    a_stream_without_end(llm)
    with tempfile.TemporaryDirectory() as folder:
        a_job(model, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
