"""Failures that people reported in public (tests/cases), each found with its rows and figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crosstune.data.lint import LintReport, lint
from crosstune.data.load import load_rows
from crosstune.errors import DataError, Finding, RecipeError, Refused
from crosstune.progress import Quiet
from crosstune.recipe.recipe import Recipe
from crosstune.recipe.sections import Data
from tests.lintbed import found, lint_file, tiny_models
from tests.tiny import CASES

LintCase = Callable[..., LintReport]


@pytest.fixture(scope="module")
def lint_case(tmp_path_factory: pytest.TempPathFactory) -> LintCase:
    """Lint a case file under a tiny model: `lint_case("chat8.jsonl", "base", max_tokens=64)`."""
    models = tiny_models(tmp_path_factory.mktemp("models"))

    def lint_it(file: str, model: str = "instruct", **options: Any) -> LintReport:
        return lint_file(CASES / file, models[model], options)

    lint_it.models = models  # type: ignore[attr-defined]
    return lint_it


def only(report: LintReport, code: str) -> Finding:
    (finding,) = (finding for finding in report.findings if finding.code == code)
    return finding


# --- tokenizer and template ------------------------------------------------------------------------------------------


def test_t01_pad_that_is_the_stop_token_is_a_warning(lint_case: LintCase) -> None:
    chosen = only(lint_case("chat8.jsonl"), "pad-chosen")
    assert "<|finetune_right_pad_id|> (364)" in chosen.message
    model = str(lint_case.models["instruct"])  # type: ignore[attr-defined]
    recipe = Recipe.build({"model": {"name": model, "pad_token": "<|eot_id|>"}, "data": "x"})
    report = lint(CASES / "chat8.jsonl", model=recipe.model)
    assert only(report, "pad-is-stop-token").severity == "warning"
    assert report.exit_code == 0


def test_t02_second_bos_and_bos_inside_the_text(lint_case: LintCase) -> None:
    report = lint_case("T02-double-bos.jsonl")
    assert found(report) == {"double-bos": (3,), "special-token-in-content": (5,)}
    assert report.exit_code == 2


def test_t03_stop_token_that_ends_no_turn(lint_case: LintCase) -> None:
    report = lint_case("chat8.jsonl", "base")
    finding = only(report, "stop-token-mismatch")
    assert finding.severity == "warning"
    assert "361" in finding.message and "368" in finding.message
    assert report.exit_code == 0


def test_t04_template_that_always_opens_a_turn(lint_case: LintCase) -> None:
    finding = only(lint_case("chat8.jsonl", "genprompt"), "template-always-opens-turn")
    assert "<|start_header_id|>assistant<|end_header_id|>" in finding.message


def test_t05_llama2_format_under_a_llama3_tokenizer(lint_case: LintCase) -> None:
    report = lint_case("T05-llama2-text.jsonl")
    assert found(report) == {"foreign-template": (2, 4)}
    second, fourth = (finding.message for finding in report.errors)
    assert second.endswith("'<s>', '[INST]', '<<SYS>>', '[/INST]', '</s>'")
    assert fourth.endswith("'[INST]', '[/INST]'")
    assert report.exit_code == 2


def test_t06_control_tokens_in_content(lint_case: LintCase) -> None:
    report = lint_case("T06-special-in-content.jsonl")
    assert found(report) == {"special-token-in-content": (2, 4)}
    assert "<|reserved_special_token_28|>" in report.errors[1].message
    assert found(lint_case("T06-special-in-content.jsonl", special_text="keep")) == {}


def test_t08_untrained_control_tokens_of_a_base_model(lint_case: LintCase) -> None:
    report = lint_case("chat8.jsonl", "untrained")
    finding = only(report, "untrained-special-tokens")
    assert finding.severity == "error"
    for token in ("366 <|start_header_id|>", "367 <|end_header_id|>", "368 <|eot_id|>"):
        assert token in finding.message
    assert "364" not in finding.message, "a token that the rows never use"
    assert "untrained-special-tokens" not in found(lint_case("chat8.jsonl", "base"))


def test_t09_rows_in_which_nothing_is_learned(lint_case: LintCase) -> None:
    assert found(lint_case("T09-multiturn.jsonl")) == {}
    assert found(lint_case("T09-text.jsonl", answer_after="Answer: ")) == {}, "matched on characters"
    report = lint_case("T09-text.jsonl", answer_after="Reply:")
    assert "6 of 6 rows" in only(report, "completion-mask-empty").message
    assert report.exit_code == 2


@pytest.mark.parametrize(
    "file",
    [
        "T02-double-bos.jsonl",
        "T05-llama2-text.jsonl",
        "T06-special-in-content.jsonl",
        "D04-roles.jsonl",
        "D06-pretty.json",
        "D07-empty.jsonl",
    ],
)
def test_a_run_refuses_before_anything_is_written(file: str, tiny: Path, tmp_path: Path) -> None:
    import crosstune

    with pytest.raises((Refused, DataError)) as refused:
        crosstune.cross_validate(
            data=str(CASES / file), model=str(tiny), folds={"k": 2}, output=str(tmp_path / "run"), progress=Quiet()
        )
    assert refused.value.exit_code == 2
    assert not (tmp_path / "run").exists()


# --- rows and files --------------------------------------------------------------------------------------------------


def test_d01_mixed_shapes_and_wrong_types(lint_case: LintCase) -> None:
    report = lint_case("D01-mixed-shapes.jsonl")
    assert found(report) == {"wrong-type": (4, 5, 7), "unknown-role": (6,)}
    fields = {finding.rows[0]: finding.where.field for finding in report.errors}
    assert fields[4] == fields[5] == "messages[1].content"
    assert fields[7] == "messages"
    assert report.exit_code == 2


@pytest.mark.parametrize("file", ["D02-words.csv", "D02-codes.csv"])
def test_d02_words_and_digits_stay_text(lint_case: LintCase, file: str) -> None:
    report = lint_case(file)
    assert found(report, "error", "warning") == {}
    notes = found(report, "note")
    if file == "D02-words.csv":
        assert notes["words-kept"] == (1, 2, 3, 4) and notes["digits-kept"] == (6,)
        answers = [row.completion for row in load_rows(CASES / file, Data(path="")).rows]
        assert answers == ["null", "NA", "None", "nan", 'He wrote "Mind\nthe step", then left.', "007", "both, please"]
    else:
        assert notes["digits-kept"] == (1, 2, 3)


def test_d03_tool_calls_that_the_template_leaves_out(lint_case: LintCase) -> None:
    report = lint_case("D03-tool-calls.jsonl")
    assert found(report) == {"unsupported-field": (1, 2)}
    assert report.exit_code == 2
    first, second = load_rows(CASES / "D03-tool-calls.jsonl", Data(path="")).rows
    arguments = [row.turns[1].extra["tool_calls"][0]["function"]["arguments"] for row in (first, second)]
    assert arguments == [{"tank": 4}, {"name": "B", "open": True}]


def test_d04_disordered_roles(lint_case: LintCase) -> None:
    report = lint_case("D04-roles.jsonl")
    assert found(report) == {
        "unknown-role": (8,),
        "empty-conversation": (7,),
        "no-assistant-turn": (6,),
        "consecutive-roles": (2,),
        "assistant-first": (3,),
        "late-system": (4,),
        "ends-without-assistant": (5, 6),
    }
    assert {6, 7} <= {row for finding in report.errors for row in finding.rows}
    assert report.exit_code == 2


def test_d05_encodings(lint_case: LintCase) -> None:
    assert found(lint_case("D05-clean.jsonl")) == {}
    assert set(found(lint_case("D05-bom-crlf.jsonl"))) == {"bom", "crlf"}
    bad = lint_case("D05-bad-byte.jsonl")
    assert found(bad) == {"encoding": (3,)}
    assert (bad.errors[0].where.line, bad.errors[0].where.byte) == (3, 307)
    assert found(lint_case("D05-surrogate.jsonl")) == {"lone-surrogate": (2,)}


def test_d06_json_mistakes(lint_case: LintCase) -> None:
    report = lint_case("D06-trailing-comma.jsonl")
    assert [(f.code, f.where.line, f.where.column) for f in report.errors] == [
        ("json-syntax", 2, 125), ("json-syntax", 4, 105), ("json-syntax", 5, 110),
    ]  # fmt: skip
    assert report.num_rows == 6
    pretty = lint_case("D06-pretty.json")
    (finding,) = pretty.errors
    assert "line 1 is not a complete object" in finding.message and "one object per line" in finding.message


def test_d07_empty_answers(lint_case: LintCase) -> None:
    report = lint_case("D07-empty.jsonl")
    assert found(report) == {"empty-response": (2, 3), "missing-content": (4, 5)}
    assert report.exit_code == 2


def test_d07_bad_rows_are_left_out_when_asked_for(lint_case: LintCase) -> None:
    model = str(lint_case.models["instruct"])  # type: ignore[attr-defined]
    recipe = Recipe.build(
        {"model": model, "data": {"path": str(CASES / "D07-empty.jsonl"), "skip_bad_rows": True}, "folds": {"k": 2}}
    )
    report = lint(recipe)
    assert report.exit_code == 0
    assert report.left_out == {2, 3, 4, 5}


def test_d09_truncation(lint_case: LintCase) -> None:
    report = lint_case("D09-long.jsonl", max_tokens=64)
    assert found(report) == {"response-fully-truncated": (2,), "response-truncated": (4,)}
    assert "row 2 (0 of 10 targets left)" in only(report, "response-fully-truncated").message
    assert "row 4 (44 of 86 targets left)" in only(report, "response-truncated").message
    assert report.exit_code == 2
    uncut = lint_case("D09-long.jsonl")
    assert found(uncut) == {}
    assert "8,192" in only(uncut, "max-tokens").message, "the limit in force is said"


def test_d10_short_rows_packed_without_findings(lint_case: LintCase) -> None:
    assert found(lint_case("D10-pack.jsonl", packing=True)) == {}


def test_m03_length_outlier(lint_case: LintCase) -> None:
    report = lint_case("M03-long-outlier.jsonl", max_tokens=4096)
    assert found(report) == {"length-outlier": (33,)}
    assert "3511 tokens" in only(report, "length-outlier").message
    assert report.exit_code == 0


# --- folds -----------------------------------------------------------------------------------------------------------


def lint_folds(lint_case: LintCase, file: str, *overrides: str) -> LintReport:
    model = str(lint_case.models["instruct"])  # type: ignore[attr-defined]
    return lint(Recipe.build({"model": model, "data": str(CASES / file)}, ["train.batch_size=1", *overrides]))


def test_e03_groups(lint_case: LintCase) -> None:
    grouped = ("folds.kind=group", "folds.group=well")
    report = lint_folds(lint_case, "E03-groups.jsonl", *grouped, "folds.k=3")
    assert found(report) == {"missing-group": (11, 12)}
    nine = lint_folds(lint_case, "E03-groups.jsonl", *grouped, "folds.k=9")
    message = only(nine, "too-few-groups").message
    assert "5 named groups" in message and "7" in message
    assert nine.exit_code == 2
    unknown = lint_folds(lint_case, "E03-groups.jsonl", "folds.kind=group", "folds.group=wall", "folds.k=3")
    finding = only(unknown, "unknown-column")
    assert "'wall'" in finding.message and "well" in finding.message
    assert unknown.exit_code == 2


def test_e04_duplicates(lint_case: LintCase) -> None:
    report = lint_folds(lint_case, "E04-dupes.jsonl", "folds.k=3")
    exact, normal = (finding for finding in report.findings if finding.code == "duplicate-rows")
    assert (exact.rows, normal.rows) == ((1, 9), (3, 7, 11))
    assert "are equal" in exact.message and "differ only in Unicode form, case or white space" in normal.message
    assert {exact.severity, normal.severity} == {"warning"}
    assert report.exit_code == 0


def test_e05_small_classes(lint_case: LintCase) -> None:
    stratified = ("folds.kind=stratified", "folds.by=label")
    three = lint_folds(lint_case, "E05-classes.jsonl", *stratified, "folds.k=3")
    message = only(three, "class-smaller-than-k").message
    assert "'scrap'" in message and "2 < 3" in message
    assert three.exit_code == 2
    allowed = lint_folds(lint_case, "E05-classes.jsonl", *stratified, "folds.k=3", "folds.allow_small_classes=true")
    assert allowed.exit_code == 0
    assert found(lint_folds(lint_case, "E05-classes.jsonl", *stratified, "folds.k=2"), "error", "warning") == {}
    ten = lint_folds(lint_case, "E05-classes.jsonl", *stratified, "folds.k=10")
    assert "10 > 9" in only(ten, "k-larger-than-rows").message


# --- recipe ----------------------------------------------------------------------------------------------------------


def test_f01_misspelt_and_misplaced_keys_are_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text((CASES / "F01-typo.yaml").read_text() + f"data: {CASES / 'chat8.jsonl'}\n")
    with pytest.raises(RecipeError) as error:
        lint(recipe)
    assert "lora.ranl" in error.value.problem and "rank" in error.value.problem
    assert "learning_rate" in error.value.problem and "train" in error.value.problem
    assert error.value.exit_code == 2


def test_c03_misspelt_target_is_named_with_the_nearest(lint_case: LintCase) -> None:
    report = lint_folds(lint_case, "chat24.jsonl", "lora.targets=[q_proj, v_porj]")
    finding = only(report, "target-not-found")
    assert "'v_porj'" in finding.message and "v_proj" in finding.fix
    assert report.exit_code == 2


def test_allowed_errors_are_listed_and_stop_nothing(lint_case: LintCase) -> None:
    report = lint(CASES / "D07-empty.jsonl", allow=["empty-response", "missing-content"])
    assert report.exit_code == 0
    assert {finding.code for finding in report.allowed_errors} == {"empty-response", "missing-content"}
    lines = [json.loads(line) for line in report.to_json_lines().splitlines()]
    assert all(line["allowed"] for line in lines if line["severity"] == "error")
