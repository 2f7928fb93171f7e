"""No error and no warning on clean data: real text of eight shapes and languages, under three tokenizers, and the demo."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from crosstune.data.lint import lint
from crosstune.recipe.recipe import Recipe
from tests.corpora import CORPORA
from tests.lintbed import found
from tests.llama3 import llama3_tokenizer


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpora")


@pytest.fixture(scope="module")
def llama3() -> Any:
    return llama3_tokenizer()


@pytest.mark.parametrize("corpus", CORPORA)
@pytest.mark.parametrize("model", ["none", "tiny", "llama3"])
def test_clean_data_has_no_findings(
    corpus: str, model: str, files: Path, tiny: Path, request: pytest.FixtureRequest
) -> None:
    file = CORPORA[corpus](files)
    tokenizer = {"none": lambda: None, "tiny": lambda: str(tiny), "llama3": lambda: request.getfixturevalue("llama3")}
    report = lint(file, model=tokenizer[model]())
    assert report.num_rows >= 50
    assert found(report, "error", "warning") == {}, "\n".join(map(str, (*report.errors, *report.warnings)))
    assert report.exit_code == 0


@pytest.mark.parametrize("corpus", ["english_questions", "exceptions"])
def test_a_recipe_on_clean_data_has_no_findings(corpus: str, files: Path, tiny: Path) -> None:
    by = {"english_questions": [], "exceptions": ["folds.kind=stratified", "folds.by=kind"]}[corpus]
    report = lint(Recipe.build({"model": str(tiny), "data": str(CORPORA[corpus](files))}, by))
    assert found(report, "error", "warning") == {}


def test_the_demo_has_no_findings(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("chatterbot_corpus")
    from crosstune.demo import DemoSize, demo_recipe
    from crosstune.progress import Quiet

    recipe = demo_recipe(DemoSize(), out=str(tmp_path / "demo"), model=str(tiny), progress=Quiet())
    assert found(lint(recipe), "error", "warning") == {}


def test_the_llama3_tokenizer_as_packed_has_its_two_faults(files: Path) -> None:
    report = lint(CORPORA["english_questions"](files), model=llama3_tokenizer(instruct=False))
    assert set(found(report, "error", "warning")) == {"template-always-opens-turn", "stop-token-mismatch"}


def test_instructions_repeated_in_every_row_are_no_near_duplicates(tmp_path: Path) -> None:
    # One long instruction, a short input, a label: 90% of the words are equal in all rows.
    rng = random.Random(0)
    words = [line for line in _words() if line.isalpha()]
    instruction = " ".join(rng.choices(words, k=150))
    file = tmp_path / "labels.jsonl"
    rows = [
        {"prompt": f"{instruction}\n\n{' '.join(rng.sample(words, 12))}", "completion": rng.choice(["yes", "no"])}
        for _ in range(400)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert found(lint(file), "error", "warning") == {}


def test_template_made_questions_are_no_near_duplicates(tmp_path: Path) -> None:
    file = tmp_path / "boxes.jsonl"
    rows = [
        {"prompt": f"Box {i}: how many parts of kind {i * 7} are inside?", "completion": f"{i * 3} parts."}
        for i in range(300)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert found(lint(file), "error", "warning") == {}


@pytest.mark.parametrize(
    "text",
    [
        "The bracket [see plate 4] holds the lamp.",
        "Use <s>old</s> for struck text, and a < b > c.",
        "Call y = W @ x.mean(0) or q @ k.mT.to(device).",
        "Clone it: git@github.com:owner/name.git, or mail noreply@service.org.",
        "Write to you@example.com, admin@mail.test, root@localhost or name@yourcompany.com.",
        "The risk-averse task-force of sk-learn; eyJ is no token, AKIA neither.",
        "Set OPENAI_API_KEY=sk-xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
        'Answer in JSON: {"role": "admin", "content": null} or ["a", {"value": 1}].',
        "MANHÃ» e MAÇÃ são palavras; Âmbar também. São Paulo, coração, à noite.",
        "A cell of 200 Å², 5.4 Å³ in volume; see «Å» and «Ã» in the table.",
        "Zürich, naïve, façade, Ångström, smörgåsbord, Łódź, İstanbul, Đà Nẵng.",
        "First\tsecond\r\nthird\x0cfourth \x1b[1mbold\x1b[0m",
        "Is 3 <| 4 or 3 |> 4? ### Notes follow: - one",
        "👩‍👩‍👧 family, 🏳️‍🌈 flag, ½ cup, x² + y², “quoted” – dashed…",
        "pip install react@18.2.0 lodash@4.17.21 @types/node@20.1",
    ],
)
def test_text_that_only_looks_like_a_fault(text: str, tmp_path: Path) -> None:
    file = tmp_path / "row.jsonl"
    rows = [{"text": text}, {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]}]
    for row in rows:
        file.write_text(json.dumps(row) + "\n")
        assert found(lint(file)) == {}


def _words() -> list[str]:
    from pydoc_data.topics import topics

    return sorted({word.lower() for text in topics.values() for word in text.split()})
