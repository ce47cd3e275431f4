"""In place of vLLM in a smoke run: a package with its class, and a script that takes the options of its benchmark."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = """
class LLM:
    def __init__(self, enable_prefix_caching=True):
        self.enable_prefix_caching = enable_prefix_caching
"""
_SCRIPT = """
import json, sys
from vllm import LLM
print(json.dumps({"total_tok_s": 5.0, "arguments": sys.argv[1:], "prefix_caching": LLM().enable_prefix_caching}))
print("a library says goodbye")
"""


def write(folder: Path) -> None:
    """The folder that `--vllm` names."""
    package = folder / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_PACKAGE, encoding="utf-8")
    (folder / "bench_vllm.py").write_text(_SCRIPT, encoding="utf-8")
