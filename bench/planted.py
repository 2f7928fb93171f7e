"""Planted mistakes in real rows: do the suspects find them, does the ranking find a setting made bad?

8% of the labels of a word-sentiment choice are flipped; a second trial trains with a learning rate of 0.

    python -m bench.planted --model SmolLM2-135M-Instruct.Q4_1.gguf --out runs/planted
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from sklearn.metrics import average_precision_score

import crosstune
from bench.word_rows import flip_labels, rated_words, write_rows
from crosstune.demo import fastest_precision


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--model", required=True)
    words.add_argument("--out", default="runs/planted")
    words.add_argument("--rows", type=int, default=300)
    words.add_argument("--epochs", type=float, default=2)
    words.add_argument("--seed", type=int, default=0)
    asked = words.parse_args()
    rows = rated_words(asked.rows, seed=asked.seed)
    planted = flip_labels(rows, 0.08, seed=asked.seed)
    data = write_rows(Path(f"{asked.out}-rows.jsonl"), rows)
    result = crosstune.cross_validate(
        {
            "model": asked.model,
            "data": {"path": str(data), "max_tokens": 64},
            "folds": {"kind": "stratified", "k": 5, "by": "label", "seed": asked.seed},
            "lora": {"rank": 16, "alpha": 32},
            "train": {"epochs": asked.epochs, "learning_rate": 5e-4, "batch_size": 16, "seed": asked.seed},
            "evaluate": {"metrics": ["loss", "accuracy", "log_loss", "ece"], "labels": ["negative", "positive"]},
            "sweep": {"train.learning_rate": [5e-4, 0.0]},
            "device": {"precision": fastest_precision()},
            "output": asked.out,
        }
    )
    score = np.zeros(asked.rows + 1)
    for suspect in result.suspects():
        score[suspect.row] = suspect.score
    truth = np.isin(np.arange(1, asked.rows + 1), planted)
    last = result.report["ranking"][-1]
    print(
        json.dumps(
            {
                "rows": asked.rows, "planted": len(planted), "suspects": len(result.suspects()),
                "found": len({s.row for s in result.suspects()} & set(planted)),
                "average_precision": round(float(average_precision_score(truth, score[1:])), 3),
                "accuracy": result.best["metrics"]["accuracy"]["pooled"],
                "base_accuracy": result.report["baselines"]["base"]["accuracy"],
                "last": last["name"], "p_last": last["p_last"], "verdict": last["verdict"],
                "conclusion": result.report["conclusion"],
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
