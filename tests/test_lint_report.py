"""What a person and a machine get to see of the findings, from any source of rows."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from crosstune.data.lint import LintReport, lint
from crosstune.data.lint.duplicates import BATCH, near_sets
from crosstune.data.lint.report import SHOWN_SINGLY
from crosstune.errors import Refused
from crosstune.progress import Lines
from crosstune.recipe.recipe import Recipe
from tests.lintbed import found, write_rows
from tests.tiny import CASES


def shown(report: LintReport, width: int = 100) -> str:
    out = io.StringIO()
    report.show(Console(file=out, width=width))
    return out.getvalue()


def test_table_groups_by_code_with_counts_and_two_examples() -> None:
    text = shown(lint(CASES / "D01-mixed-shapes.jsonl"))
    assert "wrong-type" in text and "3: 4, 5, 7" in text
    assert "messages[1].content is a list" in text and "messages[1].content is an int" in text
    assert "messages is text (str)" not in text, "two examples, not three"
    assert "4 errors, 0 warnings, 1 note in 9 rows" in text


def test_a_log_has_one_line_a_code() -> None:
    lines = list(lint(CASES / "E04-dupes.jsonl").lines())
    assert lines[0] == "warning duplicate-rows (5: 1, 9, 3, 7, 11): rows 1 and 9 are equal"
    assert len(lines) == 2
    (first, *_) = lint(CASES / "D07-empty.jsonl", allow=["empty-response"]).lines()
    assert "missing-content (2: 4, 5)" in first


def test_json_lines_hold_every_field() -> None:
    report = lint(CASES / "D05-bad-byte.jsonl")
    lines = [json.loads(line) for line in report.to_json_lines().splitlines()]
    assert len(lines) == len(report.findings)
    (error,) = (line for line in lines if line["severity"] == "error")
    assert error.keys() == {"code", "severity", "rows", "count", "where", "message", "fix"}
    assert error["rows"] == [3] and error["count"] == 1
    assert error["where"] == {"file": str(CASES / "D05-bad-byte.jsonl"), "line": 3, "byte": 307}


def test_thousands_of_equal_faults_become_one_finding_with_a_count(tmp_path: Path) -> None:
    report = lint(write_rows(tmp_path, *({"prompt": f"Question {i}?", "completion": ""} for i in range(5000))))
    singles, rest = report.errors[:-1], report.errors[-1]
    assert len(singles) == SHOWN_SINGLY
    assert rest.count == 5000 - SHOWN_SINGLY and rest.message.startswith("4900 more of this kind")
    assert report.rows("empty-response") == tuple(range(1, 5001)), "none is forgotten: skip_bad_rows leaves them out"
    last = json.loads(report.to_json_lines().splitlines()[SHOWN_SINGLY])
    assert len(last["rows"]) == 1000 and last["count"] == 4900, "row numbers are capped with a count"
    assert "5,000: 1, 2, 3" in shown(report)


def test_refusing_raises_all_errors_at_once() -> None:
    report = lint(CASES / "D04-roles.jsonl")
    with pytest.raises(Refused) as refused:
        report.refuse()
    assert {finding.code for finding in refused.value.findings} == {
        "unknown-role", "empty-conversation", "no-assistant-turn",
    }  # fmt: skip
    assert refused.value.exit_code == 2
    lint(CASES / "chat8.jsonl").refuse()


def test_rows_may_come_from_a_data_frame_a_data_set_or_a_list() -> None:
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    rows = [{"prompt": "Name one metal.", "completion": "zinc"}, {"prompt": "Name one tree.", "completion": " "}]
    for source in (rows, pandas.DataFrame(rows), datasets.Dataset.from_list(rows)):
        assert found(lint(source)) == {"empty-response": (2,)}


def test_every_trial_of_a_sweep_is_looked_at(tiny: Path) -> None:
    sweep = {"lora.alpha": [16, 5000], "train.learning_rate": [2e-4, 0.5]}
    tree = {"model": str(tiny), "data": str(CASES / "chat24.jsonl"), "train": {"batch_size": 1}, "sweep": sweep}
    warnings = found(lint(Recipe.build(tree)), "warning")
    assert warnings.keys() == {"adapter-scale", "learning-rate"}


def test_a_recipe_file_and_its_rows_are_judged_together(tiny: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {tiny}\ndata: {CASES / 'D07-empty.jsonl'}\nlora: {{targets: [q_porj]}}\nlint: {{allow: [empty-response]}}\n"
    )
    report = lint(recipe)
    assert {finding.code for finding in report.errors} >= {"missing-content", "target-not-found"}
    assert {finding.code for finding in report.allowed_errors} == {"empty-response"}


def test_missing_rows_do_not_hide_mistakes_in_the_recipe(tiny: Path, tmp_path: Path) -> None:
    tree = {"model": str(tiny), "data": str(tmp_path / "none.jsonl"), "lora": {"targets": ["q_porj"]}}
    assert found(lint(Recipe.build(tree)), "error").keys() == {"unreadable", "target-not-found"}


def test_progress_counts_the_rows(tmp_path: Path) -> None:
    out = io.StringIO()
    lint(write_rows(tmp_path, *({"text": f"Text {i}."} for i in range(4500))), progress=Lines(out, every_seconds=0))
    assert out.getvalue().splitlines()[-1].startswith("lint: row 4500")


# --- near duplicates against slow code -------------------------------------------------------------------------------


def test_near_duplicates_agree_with_jaccard_computed_in_full(tmp_path: Path) -> None:
    import random

    rng = random.Random(3)
    words = [f"w{i}" for i in range(3000)]
    texts: list[list[str]] = []
    for _ in range(150):
        text = rng.choices(words, k=80)
        texts.append(text)
        changed = list(text)
        for _ in range(rng.choice([0, 1, 2, 4, 8])):
            changed[rng.randrange(80)] = rng.choice(words)
        texts.append(changed)

    def shingles(text: list[str]) -> set[tuple[str, ...]]:
        return {tuple(text[i : i + 5]) for i in range(len(text) - 4)}

    def jaccard(a: list[str], b: list[str]) -> float:
        return len(shingles(a) & shingles(b)) / len(shingles(a) | shingles(b))

    report = lint(write_rows(tmp_path, *({"text": " ".join(text)} for text in texts)))
    told = {finding.rows for finding in report.findings if finding.code in ("near-duplicates", "duplicate-rows")}
    for pair in range(150):
        rows, similarity = (2 * pair + 1, 2 * pair + 2), jaccard(texts[2 * pair], texts[2 * pair + 1])
        if similarity >= 0.95:
            assert rows in told, similarity
        if similarity <= 0.65:  # three standard errors of 64 hashes below 0.8
            assert rows not in told, similarity
    assert all(rows[1] == rows[0] + 1 for rows in told), "rows that have nothing in common"


def test_near_duplicates_are_met_across_batches(tmp_path: Path) -> None:
    text = " ".join(f"word{i}" for i in range(60))
    rows = [{"text": f"{' '.join(f'other{j}x{i}' for j in range(25))}"} for i in range(BATCH + 50)]
    rows[3], rows[BATCH + 20] = {"text": f"{text} one"}, {"text": f"{text} two"}
    assert found(lint(write_rows(tmp_path, *rows))) == {"near-duplicates": (4, BATCH + 21)}


def test_chains_of_likeness_are_one_set() -> None:
    import numpy as np

    base = np.arange(64, dtype=np.uint32)
    second, third = base.copy(), base.copy()
    second[:6], third[:12] = 1000, 1000
    far = base + 5000
    ((members, least),) = near_sets(np.stack([base, far, second, third]))
    assert members.tolist() == [0, 2, 3]
    assert 0.8 <= least <= 58 / 64
