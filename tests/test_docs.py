"""What the pages say can be done: commands and options exist, Python runs or at least compiles, links lead somewhere."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

import crosstune
from crosstune.cli import crosstune as command
from crosstune.recipe.recipe import Recipe
from crosstune.recipe.yaml_text import parse_yaml
from tests.tiny import CASES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {page: page.read_text(encoding="utf-8") for page in PAGES}


def blocks(*languages):
    """(page, block) of every fenced block in one of these languages."""
    for page, text in TEXT.items():
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
            if language in languages:
                yield page, block


def commands():
    """(page, words) of every `crosstune …` line in a block for a shell."""
    for page, block in blocks("sh", "console", "bash", ""):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\|", line.removeprefix("$ ")):
                if re.match(r"\s*crosstune [a-z]", part):
                    yield page.name, shlex.split(part, comments=True)


@pytest.mark.parametrize(("page", "words"), commands(), ids=str)
def test_every_command_has_its_verb_and_options(page, words):
    verb = command.commands.get(words[1])
    assert verb is not None, f"{page}: {words}"
    known = {flag for option in verb.params for flag in (*option.opts, *option.secondary_opts)}
    used = {word.partition("=")[0] for word in words[2:] if word.startswith("--")}
    assert used <= known, f"{page}: {words}"


def test_there_are_commands_to_check():
    assert {words[1] for _, words in commands()} >= {"run", "lint", "plan", "fit", "merge", "compare"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_compiles_and_names_what_the_package_has(page):
    for place, block in blocks("python"):
        if place == page:
            for node in ast.walk(ast.parse(block)):
                if (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.value, ast.Name)
                    and node.value.id == "crosstune"
                ):
                    assert hasattr(crosstune, node.attr), f"{page.name}: crosstune.{node.attr}"


@pytest.mark.parametrize(("page", "block"), blocks("yaml"), ids=lambda given: getattr(given, "name", ""))
def test_recipes_are_recipes(page, block):
    tree = parse_yaml(block)
    if set(tree) & set(Recipe.model_fields):  # others are of Kubernetes
        Recipe.build({"model": "m", "data": "d.jsonl", **tree})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_benchmarks_that_are_named_can_be_started(page):
    assert not re.search(r"python bench/", TEXT[page]), "python -m bench.…: they import one another"
    for module in re.findall(r"python -m (bench\.\w+)", TEXT[page]):
        assert importlib.util.find_spec(module) is not None, module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", TEXT[page]):
        assert (page.parent / target).exists(), target


def test_the_readmes_example_runs(tiny, tmp_path, monkeypatch, capsys):
    """As it stands, but for a model and rows that this computer has."""
    (example,) = (block for page, block in blocks("python") if page.name == "README.md")
    rows = [
        {**json.loads(line), "label": "ab"[at % 2]}
        for at, line in enumerate((CASES / "chat24.jsonl").read_text().splitlines())
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    hub = '{"name": "meta-llama/Meta-Llama-3-8B-Instruct", "quantization": "nf4"}'
    assert hub in example
    exec(compile(example.replace(hub, repr(str(tiny))), "README.md", "exec"), {})
    assert "base_loss" in capsys.readouterr().out
    assert (tmp_path / "runs" / "rows" / "scores.json").is_file()
