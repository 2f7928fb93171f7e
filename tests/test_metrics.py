"""Every metric against its library or a value computed by hand."""

import math
import warnings

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as some
from rouge_score.rouge_scorer import RougeScorer
from sklearn import metrics as sk

from crosstune.errors import RecipeError
from crosstune.metrics import METRICS, choice, find_metric, find_metrics, from_function, text

PREDICTED = ["The cat sat on the mat.", "Paris", "two and two is 4", "", "an Apple a day", "x"]
WANTED = ["the cat sat on a mat", "paris.", "two plus two is 4", "something", "Apple day", "x"]


def of(name, predicted=PREDICTED, wanted=WANTED):
    return find_metric(name).of_texts(predicted, wanted)


def test_matches_by_hand():
    assert of("exact_match") == pytest.approx(1 / 6)
    assert of("normalized_match") == pytest.approx(4 / 6)  # all but rows 3 and 4
    assert text.token_f1("two and two is 4", "two plus two is 4") == pytest.approx(2 * 4 / 10)
    assert text.token_f1("the", "a") == 1 and text.token_f1("", "something") == 0
    assert text.normalize_answer(" The  U.S.A., an 'end' ") == "usa end"


@settings(deadline=None, max_examples=50)
@given(some.text(alphabet="abc DE,.!1_", max_size=40), some.text(alphabet="abc DE,.!1_", max_size=40))
def test_rouge_equals_its_library_on_ascii(one, two):
    theirs = RougeScorer(["rouge1", "rouge2", "rougeL"]).score(two, one)
    ours = {name: find_metric(name).of_texts([one], [two]) for name in theirs}
    assert ours == pytest.approx({name: score.fmeasure for name, score in theirs.items()})


def test_rouge_counts_letters_of_other_scripts():
    assert text.rouge1("καλημέρα κόσμε", "καλημέρα σου κόσμε") == pytest.approx(2 * 2 / 5)
    assert text.rouge1("我爱你", "我爱他") == pytest.approx(2 / 3)


def test_bleu_and_chrf_equal_sacrebleu():
    assert of("bleu") == sacrebleu.corpus_bleu(PREDICTED, [WANTED]).score > 0
    assert of("chrf") == sacrebleu.corpus_chrf(PREDICTED, [WANTED]).score > 0


@pytest.mark.parametrize(
    "predicted, valid",
    [
        ('{"a": 1}', 1),
        ("[]", 1),
        ("3", 1),
        ('{"a": NaN}', 0),
        ("```json\n{}\n```", 0),
        ("{'a': 1}", 0),
        ("", 0),
        ("[" * 100_000, 0),
    ],
)
def test_json_validity(predicted, valid):
    assert text.json_valid(predicted, "{}") == valid


def test_json_fields_by_hand():
    wanted = '{"name": "Ada", "age": 36, "tags": ["x", "y"], "on": true}'  # five leaves
    assert text.json_fields(wanted, wanted) == 1
    assert text.json_fields('{"name": "Ada", "age": 36.0, "tags": ["x"]}', wanted) == pytest.approx(3 / 5)
    assert text.json_fields('{"name": "Ada", "age": 36, "tags": ["x", "y"], "on": 1}', wanted) == pytest.approx(4 / 5)
    assert text.json_fields('{"name": "Ada", "extra": null}', wanted) == pytest.approx(1 / 6)
    assert text.json_fields("Ada", wanted) == 0
    assert text.json_fields('{"a": {}}', '{"a": {}}') == 1


@pytest.mark.parametrize(
    "words, number",
    [
        ("It costs $1,234.50.", 1234.5), ("3 + 4 = 7", 7), ("7.", 7), ("-2e3", -2000), ("−5 degrees", -5), (".5", 0.5),
        ("so 12 #### 18\n", 18), ("1,2", 2), ("none", None), ("v1.2.3", 0.3), ("100%", 100), ("12,345,678", 12345678),
    ],
)  # fmt: skip
def test_last_number(words, number):
    assert text.last_number(words) == number


def test_numeric_match():
    assert text.numeric_match("The answer is 1,000", "#### 1000.0") == 1
    assert text.numeric_match("18", "19") == 0 and text.numeric_match("none", "none") == 0


@settings(deadline=None, max_examples=60)
@given(seed=some.integers(0, 2**31), classes=some.integers(2, 4), rows=some.integers(5, 60))
def test_choice_metrics_equal_scikit_learn(seed, classes, rows):
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=rows)
    labels[:classes] = np.arange(classes)
    chances = rng.dirichlet(np.ones(classes), size=rows)
    best = chances.argmax(axis=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = {
            "accuracy": sk.accuracy_score(labels, best),
            "balanced_accuracy": sk.balanced_accuracy_score(labels, best),
            "macro_f1": sk.f1_score(labels, best, average="macro"),
            "micro_f1": sk.f1_score(labels, best, average="micro"),
            "mcc": sk.matthews_corrcoef(labels, best),
            "log_loss": sk.log_loss(labels, chances),
            "roc_auc": sk.roc_auc_score(labels, chances[:, 1] if classes == 2 else chances, multi_class="ovr"),
            "brier": sk.brier_score_loss(labels, chances[:, 1] if classes == 2 else chances),
        }
    assert {name: find_metric(name).of_chances(labels, chances) for name in theirs} == pytest.approx(theirs)
    assert (choice.confusion(labels, chances) == sk.confusion_matrix(labels, best)).all()


def test_calibration_against_a_slow_loop():
    rng = np.random.default_rng(0)
    chances = rng.dirichlet(np.ones(3), size=300)
    chances[0] = [1, 0, 0]
    labels = np.array([rng.choice(3, p=row) for row in chances])
    gap = 0.0
    for low in range(10):
        rows = [i for i in range(300) if low / 10 < max(chances[i]) <= (low + 1) / 10]
        if rows:
            gap += abs(sum(chances[i].argmax() == labels[i] for i in rows) - sum(max(chances[i]) for i in rows)) / 300
    assert choice.ece(labels, chances) == pytest.approx(gap)
    curve = choice.calibration(labels, chances)
    assert sum(part.rows for part in curve) == 300 and curve[-1].high == 1.0
    # Labels drawn from the probabilities themselves: calibrated, up to noise.
    assert gap < 0.1


def test_a_label_that_no_row_has_is_no_crash():
    labels, chances = np.array([0, 0, 1]), np.array([[0.8, 0.1, 0.1], [0.4, 0.5, 0.1], [0.2, 0.7, 0.1]])
    for name, metric in METRICS.items():
        if metric.kind == "choice":
            assert math.isfinite(metric.of_chances(labels, chances)), name
    assert math.isnan(choice.roc_auc(np.zeros(3, dtype=int), chances))


def test_a_function_of_ones_own(tmp_path, monkeypatch):
    def length_ratio(predicted, wanted):
        """How long the answers are."""
        return [len(p) / len(w) for p, w in zip(predicted, wanted, strict=True)]

    metric = from_function(length_ratio)
    assert metric.of_texts(["ab", "c"], ["a", "c"]) == 1.5 and metric.description == "How long the answers are."
    (tmp_path / "mine.py").write_text("def wrong(p, w): return float(p != w)\nwrong.higher_is_better = False\nx = 3\n")
    monkeypatch.chdir(tmp_path)
    loaded = find_metric("mine.py:wrong")
    assert loaded.of_texts(["a"], ["b"]) == 1 and not loaded.higher_is_better
    for name, words in [
        ("mine.py:rong", "has no 'rong'"),
        ("gone.py:f", "can't be loaded"),
        ("no.such:f", "can't be loaded"),
        ("mine.py:x", "not a function"),
    ]:
        with pytest.raises(RecipeError, match=words):
            find_metric(name)
    bad = from_function(lambda p, w: [1, 2, 3], name="bad")
    with pytest.raises(RecipeError, match=r"shape \(3,\) for 2 rows"):
        bad.of_texts(["a", "b"], ["a", "b"])


def test_unknown_names_are_all_named_with_the_nearest():
    with pytest.raises(RecipeError) as caught:
        find_metrics(["loss", "acuracy", "rouge_l"])
    assert "acuracy" in str(caught.value) and "accuracy" in caught.value.fix and "rouge_l" in caught.value.problem
    for written, meant in (("BLEU", "bleu"), ("ROUGE-L", "rougeL")):
        with pytest.raises(RecipeError) as caught:
            find_metrics([written])
        assert caught.value.fix.startswith(f"Did you mean {meant}"), caught.value.fix
    assert [metric.name for metric in find_metrics(["loss", "mcc"])] == ["loss", "mcc"]


def test_a_file_that_raises_when_it_is_loaded_is_named_with_what_it_raised(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("limit = LIMT\n\ndef f(said, wanted):\n    return 1.0\n")
    with pytest.raises(RecipeError, match=r"mine\.py' can't be loaded: NameError: name 'LIMT'"):
        find_metric(f"{file}:f")


@given(
    some.lists(some.tuples(some.text("ab1 {}", max_size=8), some.text("ab1 {}", max_size=8)), min_size=1, max_size=6),
    some.integers(0, 2**32 - 1),
)
@settings(max_examples=40, deadline=None)
def test_no_metric_leaves_its_limits(pairs, seed):
    draw = np.random.default_rng(seed)
    labels, chances = draw.integers(0, 3, 9), draw.dirichlet([0.2] * 3, 9)
    for metric in METRICS.values():
        if metric.kind == "text":
            found = metric.of_texts(*map(list, zip(*pairs, strict=True)))
        elif metric.kind == "choice":
            found = metric.of_chances(labels, chances)
        else:
            continue
        low, high = metric.limits
        assert math.isnan(found) or low - 1e-9 <= found <= high + 1e-9, (metric.name, found)


def test_every_metric_reaches_its_limits():
    wanted = ['{"red": 12, "green": "blue and yellow"}'] * 3
    two, three = np.array([0, 1, 0, 1]), np.array([0, 1, 2])  # of two labels Brier's score is at most 1
    for metric in METRICS.values():
        if metric.kind == "text":
            ends = metric.of_texts(["???"] * 3, wanted), metric.of_texts(wanted, wanted)
        elif metric.kind == "choice":
            ends = [
                metric.of_chances(labels, np.eye(many)[said])
                for many, labels in ((2, two), (3, three))
                for said in (labels, (labels + 1) % many)
            ]
        else:  # a target token's probability is 1, or nearly 0; all are the first choice, or none
            loss = 0.0, math.inf
            ends = {"loss": loss, "perplexity": tuple(map(math.exp, loss)), "token_accuracy": (0.0, 1.0)}[metric.name]
        low, high = metric.limits
        assert min(ends) == pytest.approx(low), metric.name
        assert max(ends) == pytest.approx(high) or (high == math.inf and max(ends) > 9), metric.name


def test_every_metric_says_what_it_is_and_none_without_rows():
    for metric in METRICS.values():
        assert metric.description.endswith(".") or metric.description.endswith(")."), metric.name
        if metric.kind == "text":
            assert math.isnan(metric.of_texts([], []))


@pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if metric.rows is not None])
@pytest.mark.parametrize("classes", [2, 3])
def test_a_choice_that_has_a_number_for_each_row_is_their_mean(name, classes):
    rng = np.random.default_rng(classes)
    labels, chances = rng.integers(0, classes, 80), rng.dirichlet(np.ones(classes), 80)
    chances[:2] = np.eye(classes)[[0, 1]]  # as sure as can be, once right and once wrong
    labels[:2] = 0
    metric = METRICS[name]
    assert metric.rows(labels, chances).mean() == pytest.approx(metric.of_chances(labels, chances), rel=1e-12)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", [metric.name for metric in METRICS.values() if metric.kind == "choice"])
def test_rows_of_one_label_that_is_picked_each_time_warn_of_nothing(name):
    score = find_metric(name).of_chances(np.zeros(5, dtype=np.intp), np.tile([0.9, 0.1], (5, 1)))
    assert math.isnan(score) == (name == "roc_auc")
