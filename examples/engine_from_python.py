"""The engine alone, without a job: three prompts in, three answers out.

python examples/engine_from_python.py [MODEL]
"""

import sys

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from bulkrun.models.config.find_model import resolve_model
from bulkrun.request import Request, SamplingParams
from bulkrun.text.stop import stop_matcher_factory
from bulkrun.text.tokenizer import Tokenizer

SOURCES = [
    "def read_lines(path):\n    with open(path) as file:\n        return file.readlines()",
    "def close(self):\n    self.socket.close()\n    self.socket = None",
    "def is_empty(self):\n    return len(self.items) == 0",
]


def main(model: str = "bundled:tiny") -> None:
    path = resolve_model(model, bundled_root=BUNDLED_ROOT)
    tokenizer = Tokenizer.from_dir(path)
    engine = LLMEngine.from_model_dir(path, stop_matcher_factory=stop_matcher_factory(tokenizer))

    chat = tokenizer.chat_renderer()
    for index, source in enumerate(SOURCES):
        question = {"role": "user", "content": f"Summarize this Python code in one sentence:\n{source}"}
        [prompt] = tokenizer.encode_batch([chat.render([question])], add_special_tokens=False)
        engine.add_request(Request(str(index), prompt, SamplingParams(max_tokens=32, temperature=0)))

    while engine.has_unfinished():
        for completion in engine.step():
            [text] = tokenizer.decode_batch([completion.token_ids])
            print(f"{completion.request_id}: {text} ({completion.finish_reason})")


if __name__ == "__main__":
    main(*sys.argv[1:])
