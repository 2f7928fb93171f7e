"""Five folds together against a plain PEFT loop over the folds, on the CPU: time and peak memory.

    python -m bench.cpu_folds [--rows 60] [--epochs 1] [--precision auto]

Both sides load the demo's model once, train the same rows in the same order with the same adapters' settings, score
every held-out row by the untuned base and by its fold, save each adapter, and run alone in a process of their own (the
peak is its largest resident set). The loop is what people write with PEFT and plain PyTorch: a padded batch, the
model's own loss, AdamW, clipping, a cosine schedule. Wall time counts on a machine that does nothing else; the
processor's own time is less disturbed by neighbours.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDS, BATCH = 5, 8


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rows", type=int, default=60)
    options.add_argument("--epochs", type=float, default=1)
    options.add_argument("--precision", default="auto", choices=["auto", "fp32", "bf16"])
    options.add_argument("--model", help="hub id, folder or .gguf (default: the demo's)")
    options.add_argument("--side", choices=["crosstune", "peft"], help=argparse.SUPPRESS)
    options.add_argument("--recipe", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.side:
        print(json.dumps({"crosstune": run_crosstune, "peft": run_peft_loop}[given.side](given.recipe)))
        return
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_recipe(given, Path(folder))
        sides = {side: run_side(side, recipe) for side in ("crosstune", "peft")}
    show(sides, given)


def write_recipe(given: argparse.Namespace, folder: Path) -> Path:
    from crosstune.demo import DemoSize, demo_recipe
    from crosstune.progress import Lines

    size = DemoSize(rows=given.rows, folds=FOLDS, epochs=given.epochs)
    changes = ["device.kind=cpu", f"device.precision={given.precision}", f"train.batch_size={BATCH}"]
    recipe = demo_recipe(size, changes, out=str(folder / "run"), model=given.model, progress=Lines())
    file = folder / "recipe.yaml"
    file.write_text(recipe.to_yaml())
    return file


def run_side(side: str, recipe: Path) -> dict:
    command = [sys.executable, __file__, "--side", side, "--recipe", str(recipe)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Clock:
    """Wall time and the processor's, from the moment the base is loaded; a progress display, so that it sees that."""

    def __init__(self, shown=None) -> None:
        self.shown, self.began, self.stages = shown, time.monotonic(), []
        self.base_loaded()

    def base_loaded(self) -> None:
        self.loaded, self.loaded_cpu = time.monotonic(), time.process_time()

    def report(self, losses: list[float]) -> dict:
        now, cpu = time.monotonic(), time.process_time()
        return {
            "seconds": now - self.loaded,
            "cpu": cpu - self.loaded_cpu,
            "whole": now - self.began,
            "losses": losses,
            "peak": peak_bytes(),
        }

    def start(self, stage: str, total: int | None = None) -> None:
        self.stages.append(stage)
        self.shown.start(stage, total)

    def advance(self, n: int = 1, **facts) -> None:
        self.shown.advance(n, **facts)

    def say(self, text: str) -> None:
        self.shown.say(text)

    def stop(self) -> None:
        if self.stages.pop() == "load":
            self.base_loaded()
        self.shown.stop()


def run_crosstune(recipe: str) -> dict:
    """The whole public call."""
    from crosstune import cross_validate
    from crosstune.progress import Lines

    clock = Clock(Lines())
    result = cross_validate(recipe, progress=clock)
    return clock.report([fold["loss"] for fold in result.trials[0]["folds"]])


def run_peft_loop(recipe_path: str) -> dict:
    """The loop over folds: a fresh adapter on the one base, trained, scored and saved, then taken off."""
    import torch
    from peft import LoraConfig, get_peft_model

    from crosstune.inputs import judge, read_asked_rows
    from crosstune.model.base import load_base
    from crosstune.model.device import choose_device
    from crosstune.progress import Quiet
    from crosstune.recipe.asked import gather
    from crosstune.splits.splits import split_rows

    clock = Clock()
    asked = gather(recipe_path, sections={})
    recipe = asked.recipe
    inputs = judge(asked, read_asked_rows(asked, Quiet()), Quiet())
    place = choose_device(recipe.device)
    model = load_base(recipe.model, inputs.tokenizer, device=place.device, precision=place.precision.value).model
    clock.base_loaded()
    folds, losses = split_rows(inputs.rows, recipe.folds), []
    score(model, inputs.tokens, sorted(row for fold in folds for row in fold.held_out))
    for fold in folds:
        torch.manual_seed(recipe.train.seed)
        lora = LoraConfig(
            r=recipe.lora.rank, lora_alpha=recipe.lora.alpha, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        adapted = get_peft_model(model, lora)  # adapters are fp32 on a bf16 base: PEFT's autocast_adapter_dtype
        train_fold(adapted, inputs.tokens, recipe, fold)
        losses.append(score(adapted, inputs.tokens, fold.held_out))
        adapted.save_pretrained(f"{recipe.output}-peft/fold-{fold.index}")
        print(f"PEFT loop · fold {fold.index} · loss {losses[-1]:.4f}", file=sys.stderr, flush=True)
        model = adapted.unload()
    return clock.report(losses)


def train_fold(model, tokens, recipe, fold) -> None:
    import torch

    from crosstune.data.batches import lane_seed, steps_an_epoch, units_of_step
    from crosstune.train.lane import learning_rate

    units = [(row,) for row in fold.train]
    total = math.ceil(recipe.train.epochs * steps_an_epoch(len(units), BATCH))
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=0.0, weight_decay=0.0)
    for step in range(total):
        chosen = units_of_step(units, seed=lane_seed(recipe.train.seed, fold.index), step=step, batch_size=BATCH)
        loss = model(**padded(tokens, [row for (row,) in chosen])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, recipe.train.max_grad_norm)
        optimizer.param_groups[0]["lr"] = learning_rate(recipe.train, step, total)
        optimizer.step()
        optimizer.zero_grad()


def score(model, tokens, rows) -> float:
    """Token mean over the held-out rows, in batches of like lengths."""
    import torch

    total, count = 0.0, 0
    ordered = sorted(rows, key=lambda row: int(tokens.lengths[row]))
    with torch.no_grad():
        for start in range(0, len(ordered), BATCH):
            batch = padded(tokens, ordered[start : start + BATCH])
            targets = int((batch["labels"] != -100).sum())
            total, count = total + float(model(**batch).loss) * targets, count + targets
    return total / count


def padded(tokens, rows) -> dict:
    import torch

    width = max(int(tokens.lengths[row]) for row in rows)
    ids = torch.full((len(rows), width), tokens.pad_id)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for place, row in enumerate(rows):
        row_ids, learn = (torch.from_numpy(array.copy()).long() for array in tokens.row(row))
        ids[place, : len(row_ids)], mask[place, : len(row_ids)] = row_ids, 1
        labels[place, : len(row_ids)] = torch.where(learn.bool(), row_ids, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


LINES = {
    "train, score and save, s": ("seconds", 1),
    "  of the processor, s": ("cpu", 1),
    "whole process, s": ("whole", 1),
    "peak memory, GiB": ("peak", 2**30),
}


def show(sides: dict, given: argparse.Namespace) -> None:
    ours, loop = sides["crosstune"], sides["peft"]
    print(f"{cpu_name()}, {os.cpu_count()} cores")
    print(f"{given.rows} rows, {FOLDS} folds, batch {BATCH}, {given.epochs:g} epoch(s), precision {given.precision}")
    print(f"{'':28}{'5 folds together':>18}{'PEFT loop':>14}{'ratio':>9}")
    for name, (key, unit) in LINES.items():
        mine, other = ours[key] / unit, loop[key] / unit
        print(f"{name:28}{mine:18.1f}{other:14.1f}{other / mine:8.2f}×")
    mean = [sum(side["losses"]) / FOLDS for side in (ours, loop)]
    print(f"{'mean held-out loss':28}{mean[0]:18.4f}{mean[1]:14.4f}")


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
