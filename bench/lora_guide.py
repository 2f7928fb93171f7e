"""Folk advice on LoRA, measured: one setting at a time around a default, five folds, two real data sets.

    python -m bench.lora_guide --model SmolLM2-135M-Instruct.Q4_1.gguf --out runs/guide --seeds 0 1 2

Data: question–answer rows of the package chatterbot-corpus, and rated words of the package vaderSentiment (a choice).
Each run goes on where it was stopped. Below each table stands what `sweep.prune: halving` would have trained of these
lanes, and which winner it would have found: a lane's result doesn't depend on the lanes beside it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import crosstune
from bench.word_rows import LABELS, rated_words, write_rows
from crosstune.demo import choose_rows, fastest_precision, read_corpus
from crosstune.memory.visible import visible_gpus
from crosstune.results.result import Result
from crosstune.results.scores import fold_scores
from crosstune.store.run import Run
from crosstune.sweep.pruning import Halving
from crosstune.sweep.sweep import Sweep

DEFAULT = {"lora": {"rank": 16, "alpha": 32, "dropout": 0.0, "targets": "all-linear"}, "learning_rate": 5e-4}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CASES: list[dict[str, Any]] = [
    {},
    {"lora.rank": 4}, {"lora.rank": 64}, {"lora.rank": 128},
    {"lora.alpha": 8}, {"lora.alpha": 64},
    {"lora.dropout": 0.1}, {"lora.dropout": 0.2},
    {"lora.targets": ["q_proj", "v_proj"]}, {"lora.targets": ATTENTION},
    {"train.learning_rate": 5e-5}, {"train.learning_rate": 2e-3},
]  # fmt: skip
DATA = ("qa", "words")


def run_sweep(asked: argparse.Namespace, data: str, seed: int, **more: Any) -> Result:
    """The twelve cases on five folds of one data set."""
    name = f"{data}-{seed}" + "".join(f"-{value}" for value in more.values())
    tree: dict[str, Any] = {
        "model": asked.model,
        "lora": DEFAULT["lora"],
        "train": {"learning_rate": DEFAULT["learning_rate"], "batch_size": 8, "seed": seed},
        "device": {"precision": fastest_precision(), "lanes": "auto" if visible_gpus() else 12},
        "sweep": {"cases": CASES, **more},
        "output": f"{asked.out}/{name}",
    }
    if data == "qa":
        rows = choose_rows(read_corpus(), asked.rows, 5)
        file = write_rows(Path(asked.out) / "qa.jsonl", rows)
        tree |= {"data": {"path": str(file), "max_tokens": 96}}
        tree["folds"] = {"kind": "stratified", "k": 5, "by": "category", "seed": seed}
        tree["train"]["epochs"] = asked.epochs
    else:
        file = write_rows(Path(asked.out) / "words.jsonl", rated_words(2 * asked.rows))
        tree |= {"data": {"path": str(file), "max_tokens": 64}}
        tree["folds"] = {"kind": "stratified", "k": 5, "by": "label", "seed": seed}
        tree["train"]["epochs"] = asked.epochs
        tree["evaluate"] = {"metrics": ["loss", "accuracy"], "labels": list(LABELS)}
    return crosstune.cross_validate(tree)


def table(result: Result) -> Iterable[str]:
    """A Markdown table: each case against the default, fold by fold."""
    ranking = {row["trial"]: row for row in result.report["ranking"]}
    yield "| setting | loss | 95% | against the best | P(best) | verdict |"
    yield "|---|--:|--:|--:|--:|---|"
    for trial, row in ranking.items():
        words = ", ".join(f"{key.split('.')[-1]} {value}" for key, value in CASES[trial].items()) or "default"
        yield (
            f"| {words} | {row['loss']:.4f} | {row['low']:.4f}–{row['high']:.4f} | {row['behind_best']:+.4f} | "
            f"{row['p_best']:.2f} | {row['verdict']} |"
        )


def pruned(result: Result) -> dict[str, Any]:
    """What halving would have trained of these lanes, and how good its winner is in the full sweep."""
    scores = {trial: by_metric["loss"] for trial, by_metric in fold_scores(Run.read(result.run)).items()}
    steps = {key: event["steps"] for key, event in Run.read(result.run).finished_lanes().items()}
    rule, taken = Halving(Sweep(prune="halving"), len(scores), 5), 0
    for fold in range(5):
        for trial in [trial for trial in scores if trial not in rule.given_up()]:
            rule.report(trial, fold, 1, scores[trial][fold], final=True)
            taken += steps[trial, fold]
    means = {trial["trial"]: trial["mean"] for trial in result.trials}
    winner = min((trial for trial in means if trial not in rule.given_up()), key=lambda trial: means[trial])
    best = min(means, key=lambda trial: means[trial])
    return {
        "run": result.run.name, "winner": CASES[best], "winner_pruned": CASES[winner], "same": winner == best,
        "behind": round(means[winner] / means[best] - 1, 5),
        "lane_steps": sum(steps.values()), "lane_steps_pruned": taken,
    }  # fmt: skip


def really_pruned(result: Result) -> dict[str, Any]:
    """What a sweep that was pruned has trained, and its winner."""
    steps = sum(lane["steps"] for lane in Run.read(result.run).finished_lanes().values())
    return {"run": result.run.name, "winner": CASES[result.report["best"]], "lane_steps": steps}


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--model", required=True)
    words.add_argument("--out", default="runs/guide")
    words.add_argument("--rows", type=int, default=100, help="question–answer rows; twice as many words")
    words.add_argument("--epochs", type=float, default=2)
    words.add_argument("--data", nargs="+", default=list(DATA), choices=DATA)
    words.add_argument("--seeds", type=int, nargs="+", default=[0])
    words.add_argument("--check-halving", action="store_true", help="run the sweeps with prune: halving only")
    asked = words.parse_args()
    for data in asked.data:
        for seed in asked.seeds:
            if asked.check_halving:
                print(json.dumps(really_pruned(run_sweep(asked, data, seed, prune="halving"))), flush=True)
                continue
            result = run_sweep(asked, data, seed)
            print(f"\n{result.run.name}: {result.report['conclusion']}\n", *table(result), sep="\n", flush=True)
            print(json.dumps(pruned(result)), flush=True)


if __name__ == "__main__":
    main()
