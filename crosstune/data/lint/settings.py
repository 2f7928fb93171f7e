"""Settings of a recipe against each other and against what the field has found, from the recipe and a few counts."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator

from crosstune.data.lint.catalogue import FAULTS
from crosstune.errors import Finding, Place
from crosstune.memory.shape import ModelShape
from crosstune.recipe.recipe import Recipe

# Published settings and a factor of two to spare: alpha / rank from QLoRA's 16/64 to "LoRA Without Regret"'s 32/1.
SCALES = (1 / 8, 64.0)
# LoRA's published rates run from 1e-5 (preference tuning) to 2e-3 (rank 1 and short runs); a factor of five to spare.
RATES = (2e-6, 1e-2)
# AdamW moves B by about the rate a step, so the weights move by rate times scale. Fastest published: 3e-3 times 32/1.
FASTEST = 0.2
FEWEST_STEPS = 10
DROPOUTS = (0.001, 0.5)


def scale_of(recipe: Recipe) -> float:
    """What the adapter's output is multiplied by: alpha / rank, or alpha / sqrt(rank) with rslora."""
    lora = recipe.lora
    return lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)


def check_adapter_scale(recipe: Recipe) -> Iterator[Finding]:
    """alpha / rank, or alpha / sqrt(rank)."""
    lora, scale = recipe.lora, scale_of(recipe)
    if not SCALES[0] <= scale <= SCALES[1]:
        how = "alpha / sqrt(rank)" if lora.rslora else "alpha / rank"
        message = f"lora.alpha {lora.alpha:g} and lora.rank {lora.rank} scale the adapter by {scale:g} ({how})"
        yield FAULTS["adapter-scale"].found(message, where=Place(field="lora.alpha"))


def check_learning_rate(recipe: Recipe) -> Iterator[Finding]:
    """A rate that is no rate of an adapter. 0 is a way to ask for the untuned model."""
    rate = recipe.train.learning_rate
    if rate and not RATES[0] <= rate <= RATES[1]:
        side = "below" if rate < RATES[0] else "above"
        message = f"train.learning_rate {rate:g} is far {side} any published one for LoRA (1e-5 to 2e-3)"
        yield FAULTS["learning-rate"].found(message, where=Place(field="train.learning_rate"))
    elif rate * scale_of(recipe) > FASTEST:
        moved = rate * scale_of(recipe)
        message = (
            f"train.learning_rate {rate:g} times the adapter's scale {scale_of(recipe):g} is {moved:g}; "
            f"published settings stay below {FASTEST / 2:g}"
        )
        fix = "Lower train.learning_rate, or lora.alpha."
        yield FAULTS["learning-rate"].found(message, where=Place(field="train.learning_rate"), fix=fix)


def check_dropout(recipe: Recipe) -> Iterator[Finding]:
    """So little that nothing is dropped, or so much that nobody uses it."""
    dropout = recipe.lora.dropout
    if dropout and not DROPOUTS[0] <= dropout <= DROPOUTS[1]:
        message = f"lora.dropout {dropout:g} " + (
            "drops less than one input in a thousand" if dropout < 0.1 else "drops more than half"
        )
        yield FAULTS["dropout-without-effect"].found(message, where=Place(field="lora.dropout"))


def num_steps(recipe: Recipe, num_sequences: int) -> int:
    """Optimizer steps of one lane that trains on so many sequences."""
    if recipe.train.max_steps:
        return recipe.train.max_steps
    return math.ceil(math.ceil(num_sequences / recipe.train.batch_size) * recipe.train.epochs)


def check_steps(recipe: Recipe, num_sequences: int) -> Iterator[Finding]:
    """`num_sequences`: training rows of a fold, or packed sequences of them."""
    steps = num_steps(recipe, num_sequences)
    if steps < FEWEST_STEPS:
        train = recipe.train
        how = (
            f"train.max_steps {train.max_steps}" if train.max_steps
            else f"{num_sequences} sequences a fold, batch {train.batch_size}, {train.epochs:g} epochs"
        )  # fmt: skip
        yield FAULTS["few-steps"].found(f"a lane makes {steps} optimizer step(s): {how}", where=Place(field="train"))


def check_packing(recipe: Recipe, num_rows: int, num_sequences: int) -> Iterator[Finding]:
    """`num_rows` training rows of a fold become `num_sequences` packed ones."""
    if recipe.data.packing and num_sequences < recipe.train.batch_size:
        message = (
            f"packing makes {num_sequences} sequence(s) of a fold's {num_rows} training rows, "
            f"fewer than train.batch_size {recipe.train.batch_size}: one step an epoch"
        )
        yield FAULTS["packing-few-rows"].found(message, where=Place(field="data.packing"))


def check_warmup(recipe: Recipe, num_sequences: int | None) -> Iterator[Finding]:
    """A number of warm-up steps that the training never gets past."""
    train = recipe.train
    steps = train.max_steps if num_sequences is None else num_steps(recipe, num_sequences)
    if steps and train.warmup >= 1 and train.warmup >= steps:
        message = f"train.warmup {train.warmup:g} steps, and a lane makes {steps} in all"
        yield FAULTS["warmup-never-ends"].found(message, where=Place(field="train.warmup"))


def check_without_effect(recipe: Recipe) -> Iterator[Finding]:
    """Options that were given and that other options switch off."""
    folds, data, kind = recipe.folds, recipe.data, recipe.folds.kind
    default = type(folds).model_fields
    given = {
        # A saved recipe holds every option: what stands at its default wasn't asked for.
        "folds.repeats": folds.repeats != default["repeats"].default and not kind.startswith("repeated"),
        "folds.test_share": folds.test_share != default["test_share"].default and kind != "shuffle",
        "folds.k": folds.k != default["k"].default and kind in ("leave-one-out", "leave-one-group-out", "column"),
        "data.answer_after": data.answer_after is not None
        and (data.learn == "all" or data.shape not in ("auto", "text")),
    }  # fmt: skip
    because = {"data.answer_after": "data.learn: all" if data.learn == "all" else f"data.shape: {data.shape}"}
    for option, useless in given.items():
        if useless:
            reason = because.get(option, f"folds.kind: {kind}")
            yield FAULTS["setting-without-effect"].found(
                f"{option} has no effect with {reason}", where=Place(field=option)
            )


def check_targets(recipe: Recipe, shape: ModelShape | None) -> Iterator[Finding]:
    """Each target must match a linear layer; one that does not is named with the nearest."""
    wanted = recipe.lora.targets
    if shape is None or not shape.known or isinstance(wanted, str):
        return
    names = [linear.name for linear in shape.linears]
    for target in wanted:
        last = target.rsplit(".", 1)[-1]
        if last not in names and last != "lm_head":
            near = difflib.get_close_matches(last, names, n=2, cutoff=0.6)
            hint = f"Did you mean {' or '.join(near)}? " if near else ""
            message = f"lora.targets: no linear layer is called {target!r}"
            fix = f"{hint}Layers: {', '.join(names)}."
            yield FAULTS["target-not-found"].found(message, where=Place(field="lora.targets"), fix=fix)


def check_allowed(allowed: tuple[str, ...]) -> Iterator[Finding]:
    """Codes in lint.allow that don't exist."""
    for code in allowed:
        if code not in FAULTS:
            near = difflib.get_close_matches(code, FAULTS, n=1, cutoff=0.6)
            fix = f"Did you mean {near[0]}? All codes: docs/findings.md." if near else ""
            yield FAULTS["unknown-code"].found(
                f"lint.allow: there is no code {code!r}", where=Place(field="lint.allow"), fix=fix
            )
