"""Each code's bad example shows exactly that fault, its good example doesn't, and every code in the package is listed."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

from crosstune.data.lint import LintReport, lint
from crosstune.data.lint.catalogue import FAULTS, SECTIONS
from crosstune.data.lint.fault import Fault
from crosstune.data.lint.faults_file import chat
from crosstune.data.lint.faults_rows import PLAIN_ROWS
from crosstune.recipe.recipe import Recipe
from crosstune.recipe.sections import Model
from crosstune.recipe.yaml_text import parse_yaml
from tests.lintbed import tiny_models

# Which tiny model shows the fault, and which one doesn't, where it lies in the model; instruct for all others.
MODELS = {
    "no-template": ("notemplate", "notemplate"),
    "stop-token-mismatch": ("base", "instruct"),
    "untrained-special-tokens": ("untrained", "base"),
}
# Chat templates are tried on these rows.
TALK = chat("system: Be brief.", "user: Name one metal.", "assistant: zinc", "user: One more?", "assistant: tin")
EXAMPLES = [
    code for code, fault in FAULTS.items() if fault.file
]  # the others are described; tests/test_lint_*.py show them


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return tiny_models(tmp_path_factory.mktemp("models"))


def lint_example(fault: Fault, example: str | bytes, model: Path, folder: Path, *, good: bool = False) -> LintReport:
    """Lint an example of the catalogue as the documentation shows it: rows, or lines of a recipe."""
    file = folder / fault.file
    file.write_bytes(example if isinstance(example, bytes) else example.encode())
    if fault.file == "chat.jinja":
        rows = folder / "rows.jsonl"
        rows.write_text(TALK)
        return lint(rows, model=Model(name=str(model), chat_template=str(file)))
    if fault.file == "recipe.yaml":
        rows = folder / "rows.jsonl"
        rows.write_text(PLAIN_ROWS)
        tree = {"model": str(model), "data": str(rows), **parse_yaml(file.read_text())}
        return lint(Recipe.build(tree))
    # Where the bad part is the option, the good example is the same rows without it.
    under = () if good and fault.bad == fault.good else fault.under
    recipe = Recipe.build({"model": str(model), "data": str(file)}, under)
    if fault in SECTIONS["Folds"] + SECTIONS["Recipe"]:
        return lint(recipe)
    return lint(file, model=recipe.model if fault in SECTIONS["Tokenizer and template"] else None, data=recipe.data)


@pytest.mark.parametrize("code", EXAMPLES)
def test_the_bad_example_shows_the_fault(code: str, models: dict[str, Path], tmp_path: Path) -> None:
    fault = FAULTS[code]
    report = lint_example(fault, fault.bad, models[MODELS.get(code, ("instruct",))[0]], tmp_path)
    shown = [finding for finding in report.findings if finding.code == code]
    assert shown, f"shown instead: {sorted({finding.code for finding in report.findings})}"
    assert {finding.severity for finding in shown} == {fault.severity}
    assert all(finding.message and finding.fix for finding in shown)


@pytest.mark.parametrize("code", EXAMPLES)
def test_the_good_example_does_not(code: str, models: dict[str, Path], tmp_path: Path) -> None:
    fault = FAULTS[code]
    model = models[MODELS.get(code, ("instruct", "instruct"))[1]]
    report = lint_example(fault, fault.good, model, tmp_path, good=True)
    assert code not in {finding.code for finding in report.findings}
    if code not in MODELS:
        others = {f.code for f in report.findings if f.severity != "note"} - {"few-steps", "fold-without-class"}
        assert not others, "the good example has faults of its own"


def test_every_fault_has_a_bad_and_a_good_example() -> None:
    assert [code for code, fault in FAULTS.items() if not (fault.bad and fault.good)] == []


def test_every_code_in_the_package_is_in_the_catalogue() -> None:
    package = Path(__file__).parent.parent / "crosstune"
    kinds = {"Finding": 0, "Fault": 0, "RowError": 2}  # which argument is the code
    used = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds:
                place = kinds[node.func.id]
                if len(node.args) > place and isinstance(code := node.args[place], ast.Constant):
                    used.add(code.value)
    assert used <= FAULTS.keys()
    assert sum(len(faults) for faults in SECTIONS.values()) == len(FAULTS), "a code is listed twice"


def test_the_page_of_findings_is_up_to_date() -> None:
    docs = Path(__file__).parent.parent / "docs"
    page = runpy.run_path(str(docs / "write_findings_page.py"))["findings_page"]()
    assert (docs / "findings.md").read_text(encoding="utf-8") == page, "run: python docs/write_findings_page.py"
