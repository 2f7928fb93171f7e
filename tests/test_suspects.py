"""Planted mistakes among good rows: how high they rank."""

import csv
import math

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.model_selection import cross_val_predict

from crosstune.errors import DataError
from crosstune.results.suspects import (
    conflict_suspects,
    join_suspects,
    label_suspects,
    loss_suspects,
    read_row_numbers,
    robust_z,
    write_suspects,
)


def precision_of(suspects, planted, count):
    score = np.zeros(count + 1)
    for suspect in suspects:
        score[suspect.row] = suspect.score
    truth = np.isin(np.arange(1, count + 1), list(planted))
    return average_precision_score(truth, score[1:])


def test_flipped_labels_rank_on_top():
    pytest.importorskip("cleanlab")
    images, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    flipped = rng.choice(len(labels), round(0.08 * len(labels)), replace=False)
    given = labels.copy()
    given[flipped] = (given[flipped] + rng.integers(1, 10, len(flipped))) % 10
    chances = cross_val_predict(LogisticRegression(max_iter=300), images / 16, given, cv=5, method="predict_proba")
    names = [str(digit) for digit in range(10)]
    suspects = label_suspects(np.arange(1, len(labels) + 1), given, chances, names)
    assert precision_of(suspects, flipped + 1, len(labels)) >= 0.8
    top = suspects[0]
    assert top.kinds == ("label",) and top.suggestion == str(labels[top.row - 1]) and "never saw" in top.reasons[0]


def test_labels_that_no_row_has_do_no_harm():
    pytest.importorskip("cleanlab")
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, 60) * 2  # of three labels the middle one never occurs
    chances = np.full((60, 3), 0.05)
    chances[np.arange(60), labels] = 0.9
    chances[7] = chances[7][::-1]
    suspects = label_suspects(np.arange(1, 61), labels, chances, ["a", "b", "c"])
    assert [suspect.row for suspect in suspects] == [8]
    assert label_suspects([1, 2], [0, 0], [[1, 0], [1, 0]], ["a", "b"]) == []


def test_garbled_rows_stand_out_by_loss_and_short_rows_do_not():
    rng = np.random.default_rng(2)
    targets = rng.integers(1, 200, 800)
    nll = targets * 2 + rng.normal(0, 1, 800) * np.sqrt(targets)  # a token's loss: mean 2, deviation 1
    nll[[100, 200]] = targets[[100, 200]] * 7
    suspects = loss_suspects(np.arange(1, 801), nll, targets)
    assert {101, 201} <= {suspect.row for suspect in suspects[:4]}
    # 3.5 robust deviations are rare among good rows, whatever their length.
    assert len(suspects) <= 2 + 0.01 * 800


def test_robust_z_by_hand():
    values = np.array([1.0, 2.0, 3.0, 4.0, 100.0])
    assert robust_z(values, np.ones(5)) == pytest.approx((values - 3) / 1.4826)
    assert robust_z(np.ones(9), np.ones(9)) == pytest.approx(np.zeros(9))
    alike = np.array([1.0] * 9 + [2.0])
    assert robust_z(alike, np.ones(10))[-1] == pytest.approx(1 / (1.2533 * 0.1))


def test_rows_of_one_length_are_judged_among_all_of_them():
    """Labels of two tokens: every row is of one length, and a tenth of them is garbled."""
    rng = np.random.default_rng(3)
    values = rng.normal(1, 0.2, 600)
    garbled = rng.choice(600, 60, replace=False)
    values[garbled] += 4
    middle = np.median(values)
    slow = (values - middle) / (1.4826 * np.median([value - middle for value in values if value >= middle]))
    assert robust_z(values, np.full(600, 2)) == pytest.approx(slow)
    suspects = loss_suspects(np.arange(1, 601), 2 * values, np.full(600, 2))
    assert {suspect.row for suspect in suspects[:60]} == set(garbled + 1)


def test_skewed_losses_of_good_rows_are_rarely_outliers():
    """Choices have losses that are nearly 0 for most rows and spread above: of exponential ones e^-4.3 lie above 3.5."""
    z = robust_z(np.random.default_rng(5).exponential(size=20_000), np.full(20_000, 2))
    assert np.mean(z > 3.5) == pytest.approx(math.exp(-math.log(2) * (1 + 3.5 * 1.4826)), abs=0.003)


def test_neighbours_in_length_equal_a_slow_loop_whatever_the_order():
    rng = np.random.default_rng(4)
    lengths, values = rng.integers(1, 30, 300), rng.exponential(size=300)
    found, ascending = robust_z(values, lengths), sorted(lengths)
    for i, length in enumerate(lengths):
        # 25 rows to either side of those as long, 51 in all at least, and with a row all that are as long
        start = max(0, min(ascending.index(length) - 25, 300 - 51))
        end = min(299, max(ascending.index(length) + list(lengths).count(length) - 1 + 25, start + 50))
        near = values[(lengths >= ascending[start]) & (lengths <= ascending[end])]
        above = [value - np.median(near) for value in near if value >= np.median(near)]
        slow = (values[i] - np.median(near)) / (1.4826 * np.median(above))
        assert found[i] == pytest.approx(slow)
    turned = rng.permutation(300)
    assert robust_z(values[turned], lengths[turned]) == pytest.approx(found[turned], abs=0)


def test_conflicting_answers_to_near_equal_questions():
    prompts = [
        "What is the capital of France?",
        "what is  the capital of France ?",
        "How tall is Everest in metres?",
        "What is the capital of France?",
    ]
    answers = ["Paris", "Lyon is the capital city", "8849", "paris "]
    suspects = conflict_suspects([1, 2, 3, 4], prompts, answers, loss=[0.2, 3.0, 0.1, 0.3])
    assert [suspect.row for suspect in suspects] == [2, 4, 1]
    assert suspects[0].reasons[0].startswith("asks what rows 1, 4 ask")
    assert suspects[0].score > 0.5 > suspects[1].score


def test_a_shared_instruction_or_another_number_is_no_near_duplicate():
    frame = "You are a careful assistant. Read the review below and say if it is good or bad. Review: "
    prompts = [
        frame + text for text in ("a dull film", "what a joy", "what is 2 + 3?", "what is 2 + 5?", "never again")
    ]
    assert conflict_suspects(range(1, 6), prompts, ["bad", "good", "five", "seven", "bad"]) == []
    again = conflict_suspects(
        range(1, 7), [*prompts, frame + "A dull film!"], ["bad", "good", "five", "seven", "bad", "good"]
    )
    assert {suspect.row for suspect in again} == {1, 6}


def test_joined_rows_keep_all_reasons_and_files_read_back(tmp_path):
    one = conflict_suspects([5, 6], ["the same question"] * 2, ["yes, always", "no"], loss=[1, 9])
    two = loss_suspects([5, 6, *range(7, 60)], [1, 900, *[1.0 + 0.01 * i for i in range(53)]], [1] * 55)
    joined = join_suspects(one, two)
    assert joined[0].row == 6 and joined[0].kinds == ("conflict", "loss") and len(joined[0].reasons) == 2
    assert joined[0].score > max(s.score for s in (*one, *two) if s.row == 6) - 1e-12
    write_suspects(tmp_path / "suspects.csv", joined)
    lines = list(csv.DictReader((tmp_path / "suspects.csv").open()))
    assert [int(line["row"]) for line in lines] == [s.row for s in joined] and lines[0]["rank"] == "1"
    assert read_row_numbers(tmp_path / "suspects.csv") == {s.row for s in joined}


@pytest.mark.parametrize(
    "text, words", [("a,b\n1,2\n", "no column 'row'"), ("row\n0\n", "line 2: '0'"), ("row\nx\n", "line 2: 'x'")]
)
def test_a_file_that_names_no_rows_is_refused(tmp_path, text, words):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(DataError, match=words):
        read_row_numbers(tmp_path / "x.csv")
    with pytest.raises(DataError, match="can't be read"):
        read_row_numbers(tmp_path / "gone.csv")
