"""Reported failures of fold loops, through the public API: each must not happen here. Figures from the reports' cases."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from sklearn.model_selection import KFold
from transformers import AutoModelForCausalLM, AutoTokenizer

import crosstune
from crosstune.data.load import load_rows
from crosstune.data.tokenizer import ready_tokenizer
from crosstune.data.tokens import tokenize
from crosstune.errors import CrosstuneError
from crosstune.progress import Quiet
from crosstune.recipe.recipe import Recipe
from crosstune.recipe.sections import Data, Evaluate, Lora, Model, Train
from crosstune.store.run import Run
from crosstune.train import wave
from crosstune.train.cutting import Cutting
from crosstune.train.evaluate import score_base
from crosstune.train.lane import Lane, LaneJob
from crosstune.train.step import step_batches
from tests.lanes import fp32_base
from tests.tiny import CASES, make_tiny

CHAT8, CHAT24 = CASES / "chat8.jsonl", CASES / "chat24.jsonl"
QV = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch):
    monkeypatch.setenv("CROSSTUNE_CACHE", "")


def validate(tiny: Path, out: Path, data=CHAT8, **sections):
    """A small run; sections replace these."""
    given = {"folds": {"k": 3, "seed": 5}, "lora": QV, "train": {"epochs": 1, "batch_size": 4, "learning_rate": 5e-3}}
    given |= {"model": str(tiny), "output": str(out), "progress": Quiet()} | sections
    return crosstune.cross_validate(data=str(data) if isinstance(data, Path) else data, **given)


def sha(folder: Path) -> str:
    return hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()


# — the API on a model in memory, called twice (I02) —


def test_the_api_called_twice_on_one_model_leaves_no_adapter_on_it_and_writes_plain_keys(tiny, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    tokenizer, kind = AutoTokenizer.from_pretrained(tiny), type(model)
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    modules = {name: type(module) for name, module in model.named_modules()}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for place in ("first", "second"):
            result = validate(tiny, tmp_path / place, model=model, tokenizer=tokenizer)
            for adapter in result.adapters.values():
                from safetensors.torch import load_file

                keys = list(load_file(adapter / "adapter_model.safetensors"))
                assert len(keys) == 8
                pattern = r"^base_model\.model\.model\.layers\.[01]\.self_attn\.[qv]_proj\.lora_[AB]\.weight$"
                assert all(re.match(pattern, key) for key in keys)
    assert not [str(w.message) for w in seen if "second time" in str(w.message) or "already found" in str(w.message)]
    assert type(model) is kind and {name: type(module) for name, module in model.named_modules()} == modules
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == flags
    assert sha(tmp_path / "first/lanes/trial-0/fold-1/adapter") == sha(tmp_path / "second/lanes/trial-0/fold-1/adapter")


# — the shared base (I03) —


@pytest.mark.parametrize("options", [{"bias": "lora_only"}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_what_would_train_the_shared_base_is_refused_by_name(tmp_path, options):
    from peft import LoraConfig

    model_folder = make_tiny(tmp_path / "biased", attention_bias=True)
    with pytest.raises(CrosstuneError, match=next(iter(options))) as refused:
        validate(model_folder, tmp_path / "run", lora=LoraConfig(r=4, target_modules=["q_proj"], **options))
    assert refused.value.exit_code == 2 and not (tmp_path / "run").exists()


def test_a_biased_base_is_unchanged_and_a_peft_config_is_taken(tmp_path):
    from peft import LoraConfig

    folder = make_tiny(tmp_path / "biased", attention_bias=True)
    base = fp32_base(folder)
    before = base.digest()
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    result = validate(
        folder, tmp_path / "run", model=base.model, tokenizer=AutoTokenizer.from_pretrained(folder), lora=config
    )
    assert base.digest() == before
    saved = json.loads((next(iter(result.adapters.values())) / "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"], saved["lora_dropout"]) == (4, 8, 0.1)


# — seeds (I05) —

ONE_RUN = """
import sys, crosstune
from crosstune.progress import Quiet
crosstune.cross_validate(model=sys.argv[1], data=sys.argv[2], output=sys.argv[3], progress=Quiet(),
    folds={"k": 2, "seed": int(sys.argv[4])}, lora={"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"], "dropout": 0.1},
    train={"epochs": 1, "batch_size": 4, "learning_rate": 5e-3, "seed": int(sys.argv[4])})
"""


def test_a_seed_fixes_folds_initial_and_final_adapters_in_any_process_and_the_global_state_stays(tiny, tmp_path):
    def here(name: str, seed: int) -> Path:
        train = {"epochs": 1, "batch_size": 4, "learning_rate": 5e-3, "seed": seed}
        validate(tiny, tmp_path / name, folds={"k": 2, "seed": seed}, lora={**QV, "dropout": 0.1}, train=train)
        return tmp_path / name

    first = here("first", 11)
    torch.rand(1000), [random.random() for _ in range(10)], np.random.rand(10)
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    second = here("second", 11)
    assert torch.equal(before[0], torch.random.get_rng_state()) and before[1] == random.getstate()
    assert np.array_equal(before[2], np.random.get_state()[1])
    arguments = [str(tiny), str(CHAT8), str(tmp_path / "third"), "11"]
    subprocess.run([sys.executable, "-c", ONE_RUN, *arguments], check=True)
    other = here("other", 12)

    def marks(run: Path):
        folds = pyarrow.parquet.read_table(run / "folds.parquet").to_pydict()
        return folds, [sha(run / f"lanes/trial-0/fold-{fold}/adapter") for fold in range(2)]

    assert marks(first) == marks(second) == marks(tmp_path / "third")
    assert marks(first)[0] != marks(other)[0] and not set(marks(first)[1]) & set(marks(other)[1])


# — what is trained (T01, D10) —


def one_job(base, count: int, **changes) -> LaneJob:
    from crosstune.model.targets import resolve_targets

    given = {"packing": False, "train": Train(epochs=1, batch_size=4), **changes}
    targets = resolve_targets(base, ["q_proj"])
    rows = tuple(range(count))
    return LaneJob(0, 0, Lora(rank=4), given["train"], Evaluate(), rows, (), targets, packing=given["packing"])


def encoded(tiny: Path, file: Path, **model):
    ready = ready_tokenizer(Model(name=str(tiny), **model))
    data = Data(path=str(file))
    return tokenize(load_rows(str(file), data), ready.tokenizer, data, cache=None, limit=8192, stop_ids=ready.stop_ids)


@pytest.mark.parametrize("pad", [None, "<|eot_id|>"])
def test_end_tokens_are_targets_even_where_they_also_pad(tiny, pad):
    tokens = encoded(tiny, CHAT8, **({"pad_token": pad} if pad else {}))
    assert tokens.pad_id == (368 if pad else 364)
    lane, targets = Lane.start(one_job(fp32_base(tiny), 8), tokens), []
    while lane.is_fed:
        for batch in step_batches([lane], tokens, [1.0], Cutting(4)):
            real = batch.weight_KS > 0
            targets += batch.target_KS[real].tolist()
            width = batch.ids_NT.shape[1]
            row, place = batch.index_KS[real] // width, batch.index_KS[real] % width + 1
            assert (batch.ids_NT[row, place] == batch.target_KS[real]).all()
            assert (place < tokens.lengths[batch.row_KS[real]]).all()  # never a padded position
        lane.step += 1
    assert len(targets) == 47 and targets.count(368) == 8


def test_packed_rows_never_see_one_another(tiny):
    base, tokens = fp32_base(tiny), encoded(tiny, CASES / "D10-pack.jsonl")
    assert tokens.lengths.sum() == 134 and tokens.targets.sum() == 27
    lane = Lane.start(one_job(base, 6, packing=True), tokens)
    tokens_wide = tokens.__class__(
        **{**{f: getattr(tokens, f) for f in tokens.__dataclass_fields__}, "max_tokens": 256}
    )
    lane = Lane.start(one_job(base, 6, packing=True), tokens_wide)
    assert len(lane.units) == 1
    (batch,) = step_batches([lane], tokens_wide, [1.0], Cutting(1))
    assert (batch.weight_KS > 0).sum() == 27
    with torch.no_grad():
        packed = base.head(base.hidden(torch.from_numpy(batch.ids_NT), torch.from_numpy(batch.position_NT)))[0]
        start, nll = 0, 0.0
        for row in lane.units[0]:
            ids, learn = tokens.row(row)
            alone = base.model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
            torch.testing.assert_close(packed[start : start + len(ids)], alone, rtol=0, atol=1e-5)
            where = np.flatnonzero(learn)
            logs = alone.log_softmax(-1)
            nll -= sum(logs[j - 1, ids[j]].item() for j in where)
            start += len(ids)
        logs = packed.log_softmax(-1)
        mine = -sum(
            float(w) * logs[i, t].item()
            for i, t, w in zip(batch.index_KS[0], batch.target_KS[0], batch.weight_KS[0], strict=True)
        )
    assert mine == pytest.approx(nll / 27, abs=1e-5)


# — scores (E02) —


def test_every_row_is_scored_once_and_the_pooled_loss_is_the_token_mean(tiny, tmp_path):
    result = validate(tiny, tmp_path / "run", data=CASES / "E02-ten.jsonl")
    trial = result.trials[0]
    assert [fold["rows"] for fold in trial["folds"]] == [4, 3, 3] and sum(
        fold["tokens"] for fold in trial["folds"]
    ) == 83
    frame = result.out_of_fold
    assert sorted(frame["row"]) == list(range(1, 11))
    targets = [3, 4, 13, 5, 8, 8, 10, 10, 10, 12]
    assert frame.sort_values("row")["tokens"].tolist() == targets
    losses = [fold["loss"] for fold in trial["folds"]]
    assert trial["mean"] == pytest.approx(np.mean(losses)) and trial["std"] == pytest.approx(np.std(losses, ddof=1))
    assert trial["pooled_loss"] == pytest.approx((frame["loss"] * frame["tokens"]).sum() / 83, abs=1e-6)
    for fold in trial["folds"]:
        rows = frame[frame["fold"] == fold["fold"]]
        assert fold["loss"] == pytest.approx((rows["loss"] * rows["tokens"]).sum() / rows["tokens"].sum(), rel=1e-9)
        assert fold["perplexity"] == pytest.approx(math.exp(fold["loss"]))


def test_the_base_loss_is_what_plain_code_finds(tiny, tmp_path):
    frame = validate(tiny, tmp_path / "run").out_of_fold.sort_values("row")
    base, tokens = fp32_base(tiny), encoded(tiny, CHAT8)
    with torch.no_grad():
        for place, loss in enumerate(frame["base_loss"]):
            ids, learn = tokens.row(place)
            logs = base.model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].log_softmax(-1)
            plain = [-logs[j - 1, ids[j]].item() for j in np.flatnonzero(learn)]
            assert loss == pytest.approx(np.mean(plain), rel=1e-5)


# — a lane that fails (P02) —


def test_a_lane_that_goes_non_finite_fails_alone_and_is_counted(tiny, tmp_path, capfd):
    def poisoned(model):
        steps = {"seen": 0}

        def poison(module, inputs, output):
            if torch.is_grad_enabled():
                steps["seen"] += 1
                if steps["seen"] == 2:
                    rows = output.shape[0] // 4
                    output = output.clone()
                    output[2 * rows : 3 * rows] *= torch.inf
            return output

        model.get_input_embeddings().register_forward_hook(poison)
        return model

    settings = {"folds": {"k": 4}, "train": {"epochs": 3, "batch_size": 4, "learning_rate": 5e-3}}
    settings["device"] = {"micro_batch": 4}
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    load = lambda: AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)  # noqa: E731
    clean = validate(tiny, tmp_path / "clean", model=load(), tokenizer=tokenizer, **settings)
    result = validate(tiny, tmp_path / "run", model=poisoned(load()), tokenizer=tokenizer, **settings)
    assert result.failed == [{"trial": 0, "fold": 2, "reason": "non-finite-loss", "step": 2}]
    trial = result.trials[0]
    assert (trial["finished"], trial["asked"]) == (3, 4) and [fold["fold"] for fold in trial["folds"]] == [0, 1, 3]
    assert trial["mean"] == pytest.approx(np.mean([fold["loss"] for fold in trial["folds"]]))
    assert not list((tmp_path / "run/lanes/trial-0").glob("fold-2/**/*.safetensors"))
    for fold in (0, 1, 3):
        assert sha(result.adapters[0, fold]) == sha(clean.adapters[0, fold])


# — choosing a step on the held-out rows (C02) —


def test_each_fold_keeps_its_own_best_step_and_the_score_is_marked_optimistic(tiny, tmp_path, monkeypatch):
    told = {0: [0.1, 0.2, 0.3, 0.4], 1: [0.9, 0.5, 0.7, 0.8], 2: [0.9, 0.8, 0.7, 0.6]}
    monkeypatch.setattr(wave, "stop_loss", lambda lane, scores: told[lane.job.fold][lane.step - 1])
    train = {"epochs": 4, "batch_size": 6, "learning_rate": 5e-3, "keep": "best"}
    train["stop"] = {"on": "held_out", "patience": 9}
    result = validate(tiny, tmp_path / "run", data=CASES / "C02-best.jsonl", train=train, evaluate={"every": 1})
    run = Run.read(result.run)
    kept = {event["fold"]: event["kept_step"] for event in run.events("lane_finished")}
    assert kept == {0: 1, 1: 2, 2: 4}
    for fold, step in kept.items():
        own = result.run / f"lanes/trial-0/fold-{fold}"
        assert sha(own / "adapter") == sha(own / f"step-{step:06d}")
        at = {event["step"]: event["loss"] for event in run.events("lane_evaluated") if event["fold"] == fold}
        assert result.trials[0]["folds"][fold]["loss"] == at[step]
    assert len({sha(folder) for folder in result.adapters.values()}) == 3
    assert result.trials[0]["optimistic"] is True


def test_stopping_on_own_rows_keeps_the_held_out_score_honest(tiny, tmp_path):
    train = {"epochs": 6, "batch_size": 4, "learning_rate": 0.0, "stop": {"share": 0.25, "patience": 2}}
    result = validate(tiny, tmp_path / "run", data=CHAT24, train=train)
    assert result.trials[0]["optimistic"] is False
    for event in Run.read(result.run).events("lane_finished"):
        assert (
            event["status"] == "stopped" and event["steps"] == 3 * 3
        )  # the first, then two evaluations without a gain


# — memory (M01, M02) —


def test_the_run_tells_the_bytes_alive_before_and_after_each_wave(tiny, tmp_path):
    result = validate(tiny, tmp_path / "run", data=CHAT24, folds={"k": 4}, device={"lanes": 1})
    waves = Run.read(result.run).events("wave_finished")
    assert len(waves) == 4 and all(wave["live_bytes_after"] > 0 for wave in waves)


EVALUATE = """
import sys, torch
from tests.lanes import fp32_base, tokens_of
from crosstune.train.evaluate import score_base
from pathlib import Path
base, count = fp32_base(Path(sys.argv[1])), int(sys.argv[2])
ids = [360, 366, 100, 367, 10, 50, 368, 366, 101, 367, 10] + [200] * 244 + [368]
tokens = tokens_of([ids] * count, [[False] * 11 + [True] * 245] * count)
scores = score_base(base, tokens, range(count))
# not ru_maxrss, which a program inherits from the process that starts it
peak = Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]
print(peak, scores.loss, scores.token_accuracy)
"""


def test_evaluation_never_holds_the_logits_of_a_batch(tmp_path):
    folder = make_tiny(tmp_path / "wide", vocab=128256)

    def measure(rows: int) -> list[float]:
        out = subprocess.run(
            [sys.executable, "-c", EVALUATE, str(folder), str(rows)], check=True, capture_output=True, text=True
        )
        return [float(part) for part in out.stdout.split()]

    few, many = measure(4), measure(32)
    assert (many[0] - few[0]) * 1024 < 150e6  # 32 rows of fp32 logits would be 4,202,692,608 bytes
    base = fp32_base(folder)
    ids = torch.tensor([[360, 366, 100, 367, 10, 50, 368, 366, 101, 367, 10] + [200] * 244 + [368]])
    with torch.no_grad():
        logs = base.model(ids).logits[0].log_softmax(-1)
    plain = -np.mean([logs[j - 1, ids[0, j]].item() for j in range(11, 256)])
    assert few[1] == pytest.approx(plain, abs=1e-4) and many[1] == pytest.approx(plain, abs=1e-4)


def test_the_held_out_loss_does_not_depend_on_how_evaluation_is_batched(tiny, monkeypatch):
    from crosstune.train import evaluate

    base, tokens = fp32_base(tiny), encoded(tiny, CHAT24)
    usual = score_base(base, tokens, range(24))
    for budget in (1, 100, 10**6):
        monkeypatch.setitem(evaluate.TOKENS_A_BATCH, "cpu", budget)
        np.testing.assert_allclose(score_base(base, tokens, range(24)).nll, usual.nll, rtol=1e-6)


# — a finished run, another recipe, a splitter of one's own —


def test_a_finished_run_says_so_and_another_recipe_is_refused(tiny, tmp_path):
    first = validate(tiny, tmp_path / "run")
    again = validate(tiny, tmp_path / "run")
    assert again.to_json() == first.to_json()
    with pytest.raises(CrosstuneError, match="rank"):
        validate(tiny, tmp_path / "run", lora={**QV, "rank": 8})


def test_a_scikit_learn_splitter_gives_its_folds(tiny, tmp_path):
    splitter = KFold(4, shuffle=True, random_state=3)
    result = validate(tiny, tmp_path / "run", folds=splitter)
    table = pyarrow.parquet.read_table(result.run / "folds.parquet").to_pydict()
    theirs = [(int(row) + 1, fold) for fold, (_, held) in enumerate(splitter.split(np.zeros(8))) for row in held]
    assert sorted(zip(table["row"], table["fold"], strict=True)) == sorted(theirs)


def test_recipe_file_keywords_and_overrides_lead_to_the_same_run(tiny, tmp_path):
    tree = {"model": str(tiny), "data": str(CHAT8), "folds": {"k": 3, "seed": 5}, "lora": QV}
    tree["train"] = {"epochs": 1, "batch_size": 4, "learning_rate": "5e-3"}
    recipe = Recipe.build(tree, [f"output={tmp_path / 'file'}"])
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    one = crosstune.cross_validate(tmp_path / "recipe.yaml", progress=Quiet())
    two = validate(tiny, tmp_path / "words")
    assert one.trials == two.trials


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"data": Path("absent.jsonl")}, "absent.jsonl"),
        ({"model": "/nowhere/at/all"}, "nowhere"),
        ({"folds": {"kind": "stratified", "by": "lable", "k": 2}}, "lable"),
        ({"folds": {"k": 9}}, "9"),
        ({"lora": {**QV, "targets": ["q_proj", "v_porj"]}}, "v_proj"),
    ],
    ids=["missing file", "no model", "unknown column", "k larger than rows", "no such target"],
)
def test_a_users_mistake_is_one_clear_error_and_nothing_is_written(tiny, tmp_path, sections, words):
    with pytest.raises(CrosstuneError, match=re.escape(words)) as refused:
        validate(tiny, tmp_path / "run", **sections)
    assert refused.value.exit_code == 2 and refused.value.fix
    assert not (tmp_path / "run").exists()
