"""What llama.cpp makes of the files written for it: `pytest -m slow` with llama-cpp-python, which compiles for minutes."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from crosstune.data.load import load_rows
from crosstune.deploy import merge
from crosstune.export.answer import encode_questions
from crosstune.export.gguf import write_gguf
from crosstune.fitting.fit import fit
from crosstune.progress import Quiet
from crosstune.recipe.sections import Data
from tests.test_deploy import LEARN_BY_HEART
from tests.test_fit import CHAT8, recipe
from tests.tiny import make_tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A tiny model that knows chat8 by heart: base, adapter, merged folder."""
    place = tmp_path_factory.mktemp("learned")
    base = make_tiny(place / "base")
    adapter = fit(recipe(base, place / "fit", **LEARN_BY_HEART), progress=Quiet()).adapter
    merge(adapter, place / "merged")
    return base, adapter, place / "merged"


def rows_and_answers():
    rows = load_rows(CHAT8, Data(path=CHAT8))
    return rows, [row.turns[-1].content for row in rows.rows]


def say(llama, prompt: str) -> tuple[str, str]:
    """(text, why it ended), from the chat template inside the file, greedily."""
    done = llama.create_chat_completion([{"role": "user", "content": prompt}], temperature=0.0, max_tokens=40)
    return done["choices"][0]["message"]["content"], done["choices"][0]["finish_reason"]


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
def test_a_merged_model_answers_by_heart_and_ends_by_itself(learned, tmp_path, kind):
    llama_cpp = pytest.importorskip("llama_cpp")
    file = write_gguf(learned[2], tmp_path / "model.gguf", kind=kind)
    llama = llama_cpp.Llama(str(file), n_ctx=256, verbose=False)
    rows, want = rows_and_answers()
    said = [say(llama, row.turns[0].content) for row in rows.rows]
    assert [text for text, _ in said] == want
    assert {reason for _, reason in said} == {"stop"}


def test_an_adapters_file_on_the_bases_file_answers_the_same(learned, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    base = write_gguf(learned[0], tmp_path / "base.gguf", kind="f32")
    adapter = write_gguf(learned[1], tmp_path / "adapter.gguf")
    llama = llama_cpp.Llama(str(base), lora_path=str(adapter), n_ctx=256, verbose=False)
    rows, want = rows_and_answers()
    assert [say(llama, row.turns[0].content)[0] for row in rows.rows] == want


def test_llama_cpp_reads_the_same_ids_and_gives_the_same_logits(learned, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    file = write_gguf(learned[2], tmp_path / "model.gguf", kind="f32")
    llama = llama_cpp.Llama(str(file), n_ctx=256, logits_all=True, verbose=False)
    tokenizer = AutoTokenizer.from_pretrained(learned[2])
    model = AutoModelForCausalLM.from_pretrained(learned[2], dtype=torch.float32)
    rows, _ = rows_and_answers()
    for row, ids in zip(rows.rows, encode_questions(rows, tokenizer), strict=True):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": row.turns[0].content}], tokenize=False, add_generation_prompt=True
        )
        assert llama.tokenize(text.encode(), add_bos=False, special=True) == ids
        llama.reset()
        llama.eval(ids)
        got = torch.tensor(llama.scores[: len(ids)])
        with torch.no_grad():
            want = model(torch.tensor([ids])).logits[0]
        assert torch.allclose(got, want, atol=2e-2)  # its matrix products round the input to 16 bit
