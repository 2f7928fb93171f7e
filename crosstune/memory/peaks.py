"""The most that each kind of work needs: training, evaluation, generation, merging. In closed form, without torch.

Evaluation happens while lanes train, beside their gradients and optimizer state. Generation happens after it
(workers/examine.py), with adapters in slots and no optimizer. Its key-value cache is cut to what is free:

  cache       2 · c · L · N rows · (prompt + answer) · width of the key heads, and one layer's again while it grows;
              with a mask transformers repeats a layer's for every query head
  prefill     hidden states of all N · prompt tokens, one block of transformers' own, an N · prompt² mask
  choosing    logits of N rows, in the compute type and in fp32

Merging reads the base tensor by tensor and needs no GPU; comparing the result holds one model at a time in RAM.
"""

from __future__ import annotations

from dataclasses import replace

from crosstune.memory.block import Block, block_of
from crosstune.memory.estimate import (
    base_parts,
    estimate,
    evaluation_bytes,
    fragmentation_bytes,
    lane_parts,
    outside_bytes,
)
from crosstune.memory.gpus import MIB
from crosstune.memory.precision import repeats_heads
from crosstune.memory.shape import ModelShape
from crosstune.memory.widths import Plan

POSITIONS_A_BATCH = {"cpu": 16_384, "mps": 32_768, "cuda": 262_144}  # rows × positions of a cache, at most
CACHE_SHARE = 0.5  # of what is free, that a cache may take
SHARD_BYTES = 5_000_000_000  # a file of a merged model
PROCESS_BYTES = 700 * MIB  # Python, torch, transformers


def peaks(plan: Plan, *, new_tokens: int, rows: int) -> dict[str, int]:
    """Bytes of the device (merge: of RAM) at the peak of each kind of work. `rows`: that a lane answers.

    Of a base over several devices, those of the one with the most layers.
    """
    merging = merge_bytes(plan.job.shape)
    training = plan.peak_bytes
    if plan.layout is not None:
        part = replace(plan.job.shape, layers=max(plan.layout.layers))
        plan = replace(plan, job=replace(plan.job, shape=part))
    else:
        training = estimate(plan.job.shape, replace(plan.widths, evaluate_tokens=0), plan.job.machine).peak_bytes
    return {
        "train": training,
        "evaluate": _evaluate(plan),
        "generate": _generate(plan, new_tokens, rows),
        "merge": merging,
    }


def cache_bytes(shape: ModelShape, number_bytes: int) -> int:
    """Of keys and values that one position takes in all layers."""
    return 2 * number_bytes * shape.layers * shape.keys


def rows_a_lane(plan: Plan, prompt: int, new_tokens: int, rows: int) -> int:
    """Rows of each lane that are answered at once (train/generate.py's cut_batches)."""
    kind, settings, shape = plan.job.machine.kind, plan.widths, plan.job.shape
    limit = POSITIONS_A_BATCH[kind]
    if kind == "cuda":
        free = plan.free_bytes - sum(_held(plan).values())
        limit = min(limit, int(CACHE_SHARE * max(0, free) / cache_bytes(shape, settings.number_bytes)))
    return min(rows, max(1, limit // (plan.lanes * (prompt + new_tokens))))


def merge_bytes(shape: ModelShape) -> int:
    """RAM: a shard with its largest matrix in fp32 three times, or one model in 16 bit to compare (fp32 if it fits)."""
    largest = max(shape.vocab * shape.hidden, *(linear.numel for linear in shape.linears))
    model = 2 * shape.parameters
    return PROCESS_BYTES + max(min(SHARD_BYTES, model) + 3 * 4 * largest, model)


def _held(plan: Plan) -> dict[str, int]:
    """What lies on the device while lanes answer."""
    shape, settings = plan.job.shape, plan.widths
    settings = replace(settings, copies=False, recorded=0)
    lanes = {name: size for name, size in lane_parts(shape, settings).items() if "optimizer" not in name}
    machine = plan.job.machine
    outside = {"cuBLAS workspaces": machine.cublas_bytes, "context and libraries": outside_bytes(settings, machine)}
    return {**base_parts(shape, settings), **lanes, **outside}


def _evaluate(plan: Plan) -> int:
    shape, settings, machine = plan.job.shape, plan.widths, plan.job.machine
    batch = evaluation_bytes(block_of(shape, settings, machine), plan.evaluate_tokens, machine.kind)
    training = estimate(shape, replace(settings, checkpointed=min(settings.checkpointed, shape.layers)), machine)
    stays = training.peak_bytes - training.transient_bytes - training.parts["fragmentation"]
    return stays + batch + fragmentation_bytes(batch, machine)


def _generate(plan: Plan, new_tokens: int, rows: int) -> int:
    shape, settings, machine = plan.job.shape, plan.widths, plan.job.machine
    c, prompt = settings.number_bytes, plan.max_tokens
    count = plan.lanes * rows_a_lane(plan, prompt, new_tokens, rows)
    cache = count * (prompt + new_tokens) * cache_bytes(shape, c)
    growing = cache // shape.layers
    seen = count * (prompt + new_tokens) * 2 * c * shape.queries  # keys and values of every query head, of one layer
    block = Block(shape, replace(settings, targets=settings.targets or shape.linears), repeats_heads(machine, "fp32"))
    mask = count * prompt * prompt * (1 + c)
    prefill = count * prompt * c * shape.hidden + mask + max(block.evaluation(count * prompt), seen)
    choosing = count * shape.vocab * (c + 4)
    transient = cache + max(prefill, growing + seen, choosing)
    holes = transient // 36 + 48 * MIB if machine.kind == "cuda" else 0  # that a growing cache leaves, in rehearsals
    return sum(_held(plan).values()) + transient + holes + fragmentation_bytes(transient, machine)
