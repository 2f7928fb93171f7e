"""Settings that contradict each other, or the field's experience."""

from __future__ import annotations

from crosstune.data.lint.fault import Fault
from crosstune.data.lint.faults_file import GOOD
from crosstune.data.lint.faults_rows import PLAIN_ROWS

LORA = "Hu et al. 2021, LoRA, arXiv:2106.09685"
RSLORA = "Kalajdzievski 2023, A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA, arXiv:2312.03732"
REGRET = "Schulman et al. 2025, LoRA Without Regret, thinkingmachines.ai/blog/lora"
QLORA = "Dettmers et al. 2023, QLoRA, arXiv:2305.14314"

SETTING_FAULTS = (
    Fault(
        "target-not-found",
        "error",
        "An adapter target that no layer matches",
        "Other tools ignore it where another target matches, and train half of what was asked for.",
        "Choose from the layers named.",
        bad="lora: {targets: [q_proj, v_porj]}\n",
        good="lora: {targets: [q_proj, v_proj]}\n",
        file="recipe.yaml",
        source="https://github.com/huggingface/peft/issues/2699",
    ),
    Fault(
        "adapter-scale",
        "warning",
        "alpha and rank that scale the adapter far out of the range in use",
        "The adapter's output is multiplied by alpha / rank (alpha / sqrt(rank) with rslora). Published recipes lie "
        "between 1/4 (QLoRA: 16/64) and 32 (alpha 32 at rank 1); far below it nothing is learned, far above it "
        "training is unstable.",
        "Set lora.alpha to one or two times lora.rank (with rslora: to about sqrt(rank) times one or two).",
        bad="lora: {rank: 8, alpha: 1024}\n",
        good="lora: {rank: 8, alpha: 16}\n",
        file="recipe.yaml",
        source=f"{LORA}; {QLORA}; {RSLORA}",
    ),
    Fault(
        "learning-rate",
        "warning",
        "A learning rate far out of the range in use",
        "LoRA is trained with rates about ten times those of full fine-tuning: 1e-5 to 2e-3, QLoRA 1e-4 to 2e-4. The "
        "best one hardly depends on the rank while the scale is alpha / rank.",
        "Begin with 2e-4, and put it into a sweep.",
        bad="train: {learning_rate: 0.1}\n",
        good="train: {learning_rate: 2e-4}\n",
        file="recipe.yaml",
        source=f"{REGRET}; {QLORA}",
    ),
    Fault(
        "few-steps",
        "warning",
        "Fewer than ten optimizer steps a lane",
        "The adapter begins at zero and AdamW moves a weight by about the learning rate a step: after so few steps the "
        "model is nearly the untuned one.",
        "Lower train.batch_size, raise train.epochs, or give more rows.",
        bad="train: {epochs: 1, batch_size: 16}\n",
        good="train: {epochs: 3, batch_size: 4}\n",
        given=("24 rows", "24 rows"),
        file="recipe.yaml",
        source=LORA,
    ),
    Fault(
        "dropout-without-effect",
        "note",
        "A dropout that does nothing, or more than is ever used",
        "Below 0.1% less than one input in a thousand is dropped. QLoRA used 0.1 (7B, 13B) and 0.05 (33B, 65B); a "
        "dropout before a low rank acts on the sum over all inputs, and hardly acts at all in short runs.",
        "Set lora.dropout to 0, or to 0.05 to 0.1.",
        bad="lora: {dropout: 0.0001}\n",
        good="lora: {dropout: 0.05}\n",
        file="recipe.yaml",
        source=f"{QLORA}; Wang et al. 2024, LoRA Meets Dropout under a Unified Framework, arXiv:2403.00812",
    ),
    Fault(
        "packing-few-rows",
        "warning",
        "Packing that leaves fewer sequences than one batch",
        "An epoch is then one optimizer step or less; packing makes steps larger, and there are none to spare.",
        "Turn data.packing off, or lower data.max_tokens or train.batch_size.",
        bad=PLAIN_ROWS,
        good=PLAIN_ROWS,
        under=("data.packing=true",),
        source="https://huggingface.co/docs/trl/sft_trainer#packing",
    ),
    Fault(
        "warmup-never-ends",
        "warning",
        "A warm-up as long as the training",
        "The learning rate never reaches the value asked for.",
        "Set train.warmup to a share such as 0.03, or to fewer steps.",
        bad="train: {max_steps: 20, warmup: 50}\n",
        good="train: {max_steps: 20, warmup: 2}\n",
        file="recipe.yaml",
    ),
    Fault(
        "setting-without-effect",
        "warning",
        "An option that the other options leave without effect",
        "What was meant by it doesn't happen.",
        "Remove it, or change the option it depends on.",
        bad="folds: {kind: kfold, repeats: 5}\n",
        good="folds: {kind: repeated-kfold, repeats: 5}\n",
        file="recipe.yaml",
    ),
    Fault(
        "unknown-code",
        "error",
        "lint.allow names a code that doesn't exist",
        "The finding that was meant stays in force.",
        "See docs/findings.md for all codes.",
        bad="lint: {allow: [duplicate-row]}\n",
        good="lint: {allow: [duplicate-rows]}\n",
        file="recipe.yaml",
    ),
)
__all__ = ["GOOD", "SETTING_FAULTS"]
