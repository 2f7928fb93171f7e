"""What an adapter trained on an NF4 base loses or gains by each way of deploying it: held-out loss of all of them.

    python -m bench.merge_losses [--rows 200] [--epochs 3] [--keep FOLDER]

The demo's model in 16 bit, the demo's rows, a fifth of them held out; the lane is trained on the base in NF4.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from crosstune.demo import choose_rows, read_corpus
from crosstune.demo_model import find_model
from crosstune.deploy import rows_for
from crosstune.export.merge import merge
from crosstune.export.quantize import quantized_model, write_plain
from crosstune.export.verify import Loading, Outputs, difference, outputs_of
from crosstune.fitting.fit import fit
from crosstune.progress import Lines
from crosstune.recipe.recipe import Recipe


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rows", type=int, default=200)
    options.add_argument("--epochs", type=float, default=3)
    options.add_argument("--quantization", default="nf4", choices=["nf4", "int8"])
    options.add_argument("--keep", help="work here and keep what is made")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        show(*deploy(given, Path(given.keep or folder)))


def deploy(given: argparse.Namespace, work: Path) -> tuple[list[tuple[str, Outputs]], int]:
    """Train on the quantised base, deploy in every way, and run the held-out rows through each."""
    base = work / "base"
    if not (base / "config.json").is_file():
        write_plain(Path(find_model(Lines())), base, torch.bfloat16)
    file = work / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in choose_rows(read_corpus(), given.rows, 5)))
    recipe = Recipe.build(
        {
            "model": {"name": str(base), "quantization": given.quantization},
            "data": {"path": str(file), "max_tokens": 256},
            "lora": {"rank": 8, "alpha": 16},
            "train": {"epochs": given.epochs, "learning_rate": 1e-3, "batch_size": 8, "seed": 7},
            "output": str(work / "run"),
        }
    )
    adapter = fit(recipe, held_out=0.2, progress=Lines()).adapter
    rows = rows_for(adapter, most=10_000)
    loading = Loading(torch.device("cpu"), torch.float32)
    merge(adapter, work / "merged", rows=rows[:16])
    bits = given.quantization

    def of(model: object) -> Outputs:
        return outputs_of(model, rows, loading.device)

    def quantized(folder: Path) -> object:
        return quantized_model(folder, bits, device=loading.device, dtype=loading.dtype)

    def adapted(model: object) -> object:
        from peft import PeftModel

        return PeftModel.from_pretrained(model, adapter).eval()

    found = [
        ("16-bit base, no adapter", of(loading.load(base))),
        (f"{bits} base, no adapter", of(quantized(base))),
        (f"{bits} base + adapter (as trained)", of(adapted(quantized(base)))),
        ("16-bit base + adapter", of(adapted(loading.load(base)))),
        ("merged into the 16-bit base", of(loading.load(work / "merged"))),
        (f"merged, then {bits}", of(quantized(work / "merged"))),
    ]
    return found, len(rows)


def show(found: list[tuple[str, Outputs]], num_rows: int) -> None:
    trained = found[2][1]
    print(f"\n{num_rows} held-out rows\n")
    print("| deployed as | held-out loss | KL from what was trained | same next token |")
    print("|---|--:|--:|--:|")
    for name, outputs in found:
        gap = difference(trained.logits_PV, outputs.logits_PV)
        print(f"| {name} | {outputs.loss:.4f} | {gap.mean_kl:.4f} | {gap.same_next_token:.1%} |")


if __name__ == "__main__":
    main()
