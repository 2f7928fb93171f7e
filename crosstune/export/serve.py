"""How the result is served elsewhere: vLLM, llama.cpp, Ollama; as printed by fit and merge, and in the model card."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase

from crosstune.export.card import is_path, public_name
from crosstune.export.turns import PlainTurns, plain_turns

MODELFILE = "Modelfile"
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's --max-lora-rank takes these only (config/lora.py, 0.11)
Kind = Literal["adapter", "merged"]


def serve_commands(
    folder: str | Path, *, kind: Kind, base_name: str = "", rank: int = 16, name: str = ""
) -> dict[str, str]:
    """Server → the shell command that serves `folder` under `name` (default: the folder's own).

    llama.cpp needs the GGUF file that `crosstune gguf` writes.
    """
    place, name = Path(folder), (name or Path(folder).name).lower()
    if kind == "merged":
        vllm: tuple[object, ...] = ("vllm", "serve", place)
        llama_cpp: tuple[object, ...] = ("llama-server", "-m", place / "model.gguf")
    else:
        most_rank = next((most for most in VLLM_RANKS if most >= rank), VLLM_RANKS[-1])
        lora = ("--enable-lora", "--max-lora-rank", most_rank, "--lora-modules", f"{name}={place}")
        vllm = ("vllm", "serve", base_name or "BASE", *lora)
        llama_cpp = ("llama-server", "-m", "BASE.gguf", "--lora", place / "adapter.gguf")
    return {
        "vllm": _shell(vllm),
        "llama.cpp": _shell(("crosstune", "gguf", place), llama_cpp),
        "ollama": _shell(("ollama", "create", name, "-f", place / MODELFILE), ("ollama", "run", name)),
    }


def serve_section(kind: Kind, *, base_name: str, rank: int = 16) -> str:
    """The same for a model card, where the folder is wherever the reader put it."""
    base = public_name(base_name)
    commands = serve_commands("FOLDER", kind=kind, base_name="BASE_FOLDER" if is_path(base_name) else base, rank=rank)
    lines = [f"# {server}\n{command}" for server, command in commands.items()]
    return "```sh\n" + "\n".join(lines) + "\n```"


def write_modelfile(
    folder: Path, tokenizer: PreTrainedTokenizerBase, stop_ids: Iterable[int], *, source: Mapping[str, str]
) -> None:
    """An Ollama Modelfile: where the weights are, the chat template as Go template, every stop token.

    source  its first lines by keyword: {"FROM": "."} for a merged model, {"FROM": base, "ADAPTER": "."} for an adapter.
    """
    lines = [f"{keyword} {place}" for keyword, place in source.items()]
    if "ADAPTER" in source:
        lines.insert(0, "# FROM is the base: its name in Ollama, its folder, or its .gguf file.")
    turns = plain_turns(tokenizer)
    if turns is None:
        lines.append("# The chat template does more than surround turns: Ollama has to recognise it by itself.")
    else:
        lines.append(f'TEMPLATE """{go_template(turns)}"""')
        lines += [f'SYSTEM """{turns.system}"""'] if turns.system else []
    stops = [tokenizer.decode([token]) for token in sorted(set(stop_ids))]
    lines += [f'PARAMETER stop "{stop}"' for stop in stops]
    (folder / MODELFILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def go_template(turns: PlainTurns) -> str:
    """Ollama's template of these turns. Its runner puts the BOS token first by itself, so `start` is left out."""
    text = "{{ range .Messages }}"
    for number, (role, (before, after)) in enumerate(turns.around.items()):
        keyword = "else if" if number else "if"
        text += f'{{{{ {keyword} eq .Role "{role}" }}}}{_go(before)}{{{{ .Content }}}}{_go(after)}'
    return text + "{{ end }}{{ end }}" + _go(turns.open)


def _go(text: str) -> str:
    """Literal text inside a Go template."""
    return text.replace("{{", '{{ "{{" }}')


def _shell(*commands: tuple[object, ...]) -> str:
    return " && ".join(shlex.join(str(word) for word in command) for command in commands)
