"""Plans: what fits is used, what is asked for is kept, and when nothing fits there are ways out."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from crosstune.errors import DeviceError
from crosstune.memory.explain import explain
from crosstune.memory.gpus import GIB, find_gpu, this_cpu
from crosstune.memory.picture import shown_parts
from crosstune.memory.plan import _candidates, plan_memory
from crosstune.memory.shape import ModelShape
from crosstune.memory.spare import use_spare
from crosstune.memory.speed import counts_near, step_tokens
from crosstune.memory.ways import ways_to_fit
from crosstune.memory.widths import make_plan
from crosstune.recipe.recipe import Recipe
from crosstune.resources import WIDTHS

LLAMA = ModelShape.read("tests/cases/llama3-8b")
ROWS = np.array([2048] * 10 + [300] * 190)


def recipe(**sections):
    return Recipe.build({"model": {"name": "tests/cases/llama3-8b"}, "data": "rows.jsonl", **sections})


def plan(gpu="a100-40", lengths=ROWS, lanes=5, free=None, shape=LLAMA, **sections):
    machine = this_cpu() if gpu == "cpu" else find_gpu(gpu)
    asked = recipe(**sections)
    precision = "fp32" if gpu == "cpu" else "bf16" if machine.capability >= (8, 0) else "fp16"
    return plan_memory(
        recipe=asked, shape=shape, lengths=np.asarray(lengths), num_lanes=lanes, ranks=[asked.lora.rank],
        free_bytes=free or machine.total_bytes, device_kind=machine.kind, precision=precision, machine=machine,
    )  # fmt: skip


@pytest.mark.parametrize("gpu", ["l4", "rtx-4090", "a100-40", "a100-80", "h200"])
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_a_plan_fits_and_its_parts_add_up(gpu, quantization):
    found = plan(gpu, model={"name": "x", "quantization": quantization})
    assert found.fits
    assert sum(found.parts.values()) == found.peak_bytes <= find_gpu(gpu).total_bytes
    assert found.lanes * found.waves >= 5
    assert found.micro_batch * found.accumulation >= 8
    assert found.larger is None or (found.larger.peak_bytes > found.free_bytes and found.larger.seconds < found.seconds)


def test_more_memory_is_never_slower():
    seconds = [
        plan("h200", free=size * GIB, model={"name": "x", "quantization": "nf4"}).seconds
        for size in (12, 16, 24, 40, 80, 139)
    ]
    assert all(later <= 1.2 * earlier for earlier, later in pairwise(seconds))
    assert seconds[-1] < seconds[0]


def test_lanes_share_a_wave_where_they_fit():
    assert plan("h200", model={"name": "x", "quantization": "nf4"}, lengths=[128] * 50).lanes == 5
    assert plan("l4", lengths=[2048] * 50).lanes == 1


def test_what_the_recipe_sets_is_kept():
    found = plan("h200", device={"lanes": 2, "micro_batch": 4, "checkpointing": 7})
    assert (found.lanes, found.waves, found.micro_batch, found.accumulation, found.checkpointed_layers) == (
        2,
        3,
        4,
        2,
        7,
    )
    assert plan("h200", device={"checkpointing": "all"}).checkpointed_layers == 32
    assert plan("h200", device={"lanes": 99, "micro_batch": 99}).micro_batch == 8  # not more rows than the batch has


def test_a_cpu_takes_all_lanes_in_one_wave_and_recomputes_nothing():
    tiny = ModelShape.from_config({"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
                                   "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152})  # fmt: skip
    found = plan("cpu", shape=tiny, lengths=[120] * 40, free=16 * GIB)
    assert (found.lanes, found.waves, found.checkpointed_layers) == (5, 1, 0)
    assert 500 < found.lanes * found.micro_batch * 120 <= 1024


def test_nothing_fits_names_three_ways_out():
    with pytest.raises(DeviceError, match=r"the smallest plan needs 1\d\.\d GiB of NVIDIA T4's 14\.6 GiB") as error:
        plan("t4")
    assert error.value.exit_code == 2
    assert "model.quantization=nf4 (saves" in error.value.fix
    assert error.value.fix.count(";") == 2


def test_each_way_out_gives_the_bytes_it_promises():
    found = plan("a100-80")
    for way in ways_to_fit(found.job, found):
        if set(way.options) <= {"model.quantization", "lora.rank", "lora.targets"}:
            other = found.job.like
            other = replace(
                other, quantization=way.options.get("model.quantization", "none"), rank=way.options.get("lora.rank", 16)
            )
            if "lora.targets" in way.options:
                other = replace(other, targets=LLAMA.targets(way.options["lora.targets"]))
            again = make_plan(replace(found.job, like=other), found.lanes, found.micro_batch, found.checkpointed_layers)
            assert again.peak_bytes == way.peak_bytes == found.peak_bytes - way.saves_bytes


def test_smaller_plans_end_and_each_needs_less():
    found = plan("h200", model={"name": "x", "quantization": "nf4"})
    chain = [found]
    while (smaller := chain[-1].smaller()) is not None:
        assert smaller.peak_bytes < chain[-1].peak_bytes
        assert smaller.lanes == found.lanes  # a wave goes on with its lanes
        assert smaller.micro_batch * smaller.accumulation >= found.job.batch_size  # the effective batch is kept
        chain.append(smaller)
    assert (chain[-1].micro_batch, chain[-1].checkpointed_layers) == (1, 32)
    assert 3 < len(chain) < 60


def test_evaluation_never_raises_the_peak_if_it_can_be_cut():
    found = plan("l4", model={"name": "x", "quantization": "nf4"})
    assert found.max_tokens * found.lanes <= found.evaluate_tokens <= 32768
    assert "evaluation" not in found.parts


def test_swept_options_count_at_their_widest():
    narrow = plan("h200", device={"lanes": 5, "micro_batch": 1, "checkpointing": "none"}, lora={"targets": ["q_proj"]})
    wide = plan("h200", device={"lanes": 5, "micro_batch": 1, "checkpointing": "none"}, lora={"targets": ["q_proj"]},
                sweep={"lora.targets": [["q_proj"], ["q_proj", "up_proj"]]})  # fmt: skip
    assert wide.parts["lanes: gradients"] > narrow.parts["lanes: gradients"]


def test_tokens_of_a_step_are_those_of_plainly_padded_passes():
    lengths, draw = np.array([3, 9, 4, 7, 12, 5]), np.random.default_rng(0)
    rows = draw.choice(lengths, size=(32, 2, 4))  # the same draws, padded slowly and plainly
    total = 0
    for step in rows:
        ordered = [sorted(lane, reverse=True) for lane in step.tolist()]
        for start in (0, 2):
            group = [lane[start : start + 2] for lane in ordered]
            total += max(max(part) for part in group) * 4
    assert step_tokens(lengths, lanes=2, batch_size=4, micro_batch=2) == (total / 32, 2)


def test_counts_near():
    assert list(counts_near(8)) == [8, 4, 3, 2, 1]


def test_case_m05_the_head_is_chunked_and_says_what_it_saves():
    asked = recipe(lora={"rank": 16, "targets": ["q_proj", "v_proj"]}, train={"batch_size": 1}, device={"kind": "cuda"})
    found = explain(asked, gpu="a100-80", lanes=1, lengths=[8192] * 10)
    told = found.to_json()
    assert told["base_parameters"] == 8_030_261_248
    assert told["base_bytes"] == 16_060_522_496
    assert told["trainable_parameters"] == 6_815_744
    assert told["logits_bytes"] == 8192 * 128_256 * 4
    assert "chunked" in told["logits"]
    assert told["parts"]["head: logits of a chunk"] <= 2 * 512 * 2**20


def test_case_m05_plan_stays_below_1_gb_and_never_loads_torch():
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from crosstune.memory.explain import explain\n"
        "from crosstune.recipe.recipe import Recipe\n"
        "r = Recipe.build({'model': 'tests/cases/llama3-8b', 'data': 'x.jsonl'})\n"
        "explain(r, gpu='h100', lengths=[8192] * 10).to_json()\n"
        # not ru_maxrss, which a program inherits from the process that starts it
        "print('torch' in sys.modules, Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, peak = done.stdout.split()
    assert (loaded, int(peak) < 1_000_000) == ("False", True)


def test_case_m03_the_peak_is_taken_at_the_longest_row():
    lengths = [38] * 32 + [3511] + [38] * 7
    asked = recipe(train={"batch_size": 2}, device={"micro_batch": 2, "kind": "cpu", "lanes": 1})
    found = explain(asked.model_dump(), memory="200GiB", lanes=1, lengths=lengths)  # a mapping is a recipe
    told = found.to_json()
    assert (told["max_tokens"], told["pass_tokens"]) == (3511, 7022)
    assert any("length-outlier: row 33 has 3511 tokens" in note for note in told["notes"])


def test_case_p01_explain_refuses_bf16_on_a_t4():
    with pytest.raises(DeviceError, match="bf16-unsupported: NVIDIA T4"):
        explain(recipe(device={"precision": "bf16"}), gpu="t4", lengths=[100])
    told = explain(recipe(model={"name": "tests/cases/llama3-8b", "quantization": "nf4"}), gpu="t4", lengths=[100] * 50)
    assert told.to_json()["settings"]["device.precision"] == "fp16"


def test_an_answer_that_nothing_fits_is_no_error():
    found = explain(recipe(), gpu="t4", lengths=[2048] * 20)
    told = json.loads(json.dumps(found.to_json()))
    assert (told["fits"], found.exit_code) == (False, 2)
    assert {"fits", "peak_bytes", "parts", "settings", "waves", "lanes_per_wave", "alternatives"} <= set(told)
    assert sum(way["fits"] for way in told["alternatives"]) >= 2
    assert sum(told["parts"].values()) == told["peak_bytes"]


def test_memory_can_be_named_in_place_of_a_gpu():
    found = explain(
        recipe(model={"name": "tests/cases/llama3-8b", "quantization": "nf4"}), memory="16GiB", lengths=[512] * 50
    )
    assert found.fits
    assert found.to_json()["free_bytes"] == 16 * GIB


def test_the_table_has_the_plans_own_row():
    found = explain(recipe(), gpu="h100", lengths=[512] * 50)
    rows = found.to_json()["table"]
    assert any(row["peak_bytes"] == found.plan.peak_bytes for row in rows)
    assert {row["checkpointing"] for row in rows} >= {"none", "all", 16}


def test_the_picture_is_an_svg_with_every_large_part():
    import xml.etree.ElementTree as Tree

    found = explain(recipe(), gpu="h100", lengths=[512] * 50)
    picture = found.picture()
    Tree.fromstring(picture)
    assert all(name in picture for name in shown_parts(found.plan.parts))
    assert "<svg" in found._repr_html_()


def test_the_picture_is_written_as_svg_or_png(tmp_path):
    pytest.importorskip("matplotlib")
    found = explain(recipe(), gpu="h100", lengths=[512] * 50)
    found.save_picture(tmp_path / "parts.svg")
    found.save_picture(tmp_path / "parts.png")
    assert (tmp_path / "parts.svg").read_text() == found.picture()
    assert (tmp_path / "parts.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_printed_names_the_verdict_and_the_ways(capsys):
    from rich.console import Console

    explain(recipe(), gpu="t4", lengths=[2048] * 20).show(Console(width=160))
    out = capsys.readouterr().out
    assert "does not fit on NVIDIA T4" in out
    assert "Ways to fit:" in out


def test_brackets_in_what_is_printed_are_no_markup(capsys):
    from rich.console import Console

    asked = recipe(model={"name": "tests/cases/llama3-8b", "quantization": "nf4"})
    found = explain(asked, gpu="t4", lengths=[2048] * 20)
    assert "lora.targets=[q_proj,v_proj]" in [way.change for way in found.alternatives[:3]]
    found.show(Console(width=200))
    assert "lora.targets=[q_proj,v_proj]" in capsys.readouterr().out


def test_rows_whose_tokens_cannot_be_counted_are_counted_themselves(cases):
    """The model's folder has no tokenizer: every row may be as long as the model allows."""
    told = explain(recipe(data=str(cases / "chat8.jsonl"), folds={"k": 4}), gpu="h100")
    as_long = explain(recipe(folds={"k": 4}), gpu="h100", lengths=[8192] * 8)
    assert any(note.startswith("8 rows of 8192 tokens are assumed") for note in told.notes)
    assert told.plan.seconds == as_long.plan.seconds


def test_each_kind_of_work_has_its_peak():
    told = explain(
        recipe(model={"name": "tests/cases/llama3-8b", "quantization": "nf4"}), gpu="h100", lengths=[512] * 50
    ).to_json()
    peaks = told["peaks"]
    assert list(peaks) == ["train", "evaluate", "generate", "merge"]
    assert peaks["train"] <= told["peak_bytes"]
    assert max(peaks["train"], peaks["evaluate"]) <= told["peak_bytes"] * 1.01
    assert peaks["generate"] < told["free_bytes"]
    assert 16e9 < peaks["merge"] < 20e9  # one model in bf16


def test_answering_is_cut_to_what_is_free():
    """A long answer to every row would need a cache larger than the device; rows a batch make up for it."""
    asked = recipe(evaluate={"max_new_tokens": 4096})
    for gpu in ("rtx-4090", "a100-80"):
        found = explain(asked, gpu=gpu, lanes=1, lengths=[2048] * 500)
        assert found.to_json()["peaks"]["generate"] < found.plan.free_bytes


def test_wide_passes_are_taken_where_they_fit_with_room_to_spare():
    """5 lanes x 512 tokens on an H200: one pass a step in place of four, as it was measured to be no slower."""
    for quantization in ("none", "nf4"):
        model = {"name": "x", "quantization": quantization}
        found = plan("h200", lengths=[512] * 200, model=model, train={"batch_size": 4})
        assert (found.micro_batch, found.accumulation, found.checkpointed_layers) == (4, 1, 0)
        assert found.peak_bytes < 0.85 * found.free_bytes
    narrow = plan("h200", lengths=[8192] * 200, lanes=2, train={"batch_size": 8})
    assert narrow.micro_batch == 1  # 16,384 tokens already


def test_room_to_spare_is_worth_a_tenth_of_the_time():
    asked, roomy = recipe(train={"batch_size": 8}), 0
    for free in range(24, 120, 6):
        found = plan("h200", lengths=[512] * 200, free=free * GIB, train={"batch_size": 8})
        tried = [other for other in _candidates(found.job, asked) if other.fits and other.waves == found.waves]
        fastest = min(other.seconds for other in tried)
        assert found.seconds <= 1.1 * 1.02 * fastest
        roomy += found.peak_bytes <= 0.85 * found.free_bytes
        if found.peak_bytes > 0.85 * found.free_bytes:
            with_room = [other.seconds for other in tried if other.peak_bytes <= 0.85 * other.free_bytes]
            assert min(with_room, default=np.inf) > 1.1 * fastest
    assert roomy > 8


@pytest.mark.parametrize("tokens", [512, 2048])
def test_the_next_larger_plan_is_the_nearest_that_does_not_fit(tokens):
    """Oracle: every count of layers is tried."""
    looked_at = 0
    for free in range(12, 44, 4):
        found = plan("h200", lengths=[tokens] * 200, free=free * GIB, model=NF4)
        tried = [make_plan(found.job, found.lanes, found.micro_batch, count) for count in range(33)]
        beyond = [other.peak_bytes for other in tried if other.peak_bytes > found.free_bytes]
        assert not beyond or found.free_bytes < found.larger.peak_bytes <= min(beyond)
        looked_at += bool(beyond)
    assert looked_at >= 2


NF4 = {"name": "x", "quantization": "nf4"}


def short_rows(gpu="h200", model=NF4, **more):
    """Five lanes of four rows of 128 tokens: a pass of an 8B model computes for less time than its launch takes."""
    return plan(gpu, lengths=[128] * 50, model=model, train={"batch_size": 4}, **more)


def test_spare_memory_is_spent_on_graphs_and_copies_and_what_they_take_is_in_the_plan():
    roomy = short_rows()
    assert roomy.recorded == roomy.pass_tokens and roomy.copies
    plain = roomy.spending(graphs=False, copies=False)
    assert roomy.parts["copies of the base"] == 2 * LLAMA.block_parameters
    assert roomy.peak_bytes > plain.peak_bytes + 2 * LLAMA.block_parameters + roomy.parts["CUDA graphs"]
    assert sum(roomy.parts.values()) == roomy.peak_bytes
    assert roomy.seconds < plain.seconds
    assert (roomy.lanes, roomy.micro_batch, roomy.checkpointed_layers) == (5, plain.micro_batch, 0)


def test_where_less_than_15_percent_would_stay_free_nothing_is_spent():
    roomy = short_rows()
    plain = roomy.spending(graphs=False, copies=False)
    for spent in (roomy.spending(copies=False), roomy.spending(graphs=False)):
        job = replace(plain.job, free_bytes=int(spent.peak_bytes / 0.85) - 1)
        tight = make_plan(job, plain.lanes, plain.micro_batch, plain.checkpointed_layers)
        assert use_spare(tight).recorded == 0 or spent.copies
        job = replace(plain.job, free_bytes=int(spent.peak_bytes / 0.85) + 2)
        enough = use_spare(make_plan(job, plain.lanes, plain.micro_batch, plain.checkpointed_layers))
        assert enough.recorded or enough.copies


@pytest.mark.parametrize(
    ("gpu", "sections"),
    [
        ("h200", {"device": {"graphs": False}}),  # asked for
        ("h200", {"model": {"name": "x", "quantization": "int8"}}),  # asks the device for values
        ("cpu", {"model": {"name": "x"}}),
    ],
)
def test_no_pass_is_recorded(gpu, sections):
    found = short_rows(gpu, shape=LLAMA if gpu != "cpu" else replace(LLAMA, layers=2), **sections)
    assert found.recorded == 0 and found.settings["device.graphs"] is False


def test_passes_that_compute_for_longer_than_they_launch_are_not_recorded():
    assert plan("h200", lengths=[8192] * 50, model=NF4, device={"lanes": 5}).recorded == 0


def test_copies_go_first_then_graphs_then_the_widths():
    chain = [short_rows()]
    while (smaller := chain[-1].smaller()) is not None and len(chain) < 4:
        chain.append(smaller)
    assert [(p.recorded > 0, p.copies) for p in chain] == [(True, True), (True, False), (False, False), (False, False)]
    widths = [(p.lanes, p.micro_batch, p.checkpointed_layers) for p in chain]
    assert widths[0] == widths[1] == widths[2] != widths[3]
    assert all(one.peak_bytes > other.peak_bytes for one, other in pairwise(chain))
    assert chain[0].smaller_evaluation() == chain[1]


def test_a_continued_run_records_passes_if_it_did_before():
    before = short_rows()
    device = {key.partition(".")[2]: value for key, value in before.settings.items() if key in WIDTHS}
    least = before.spending(copies=False).peak_bytes  # fits, without 15% beside it
    again = short_rows(device=device, free=least + GIB)
    assert (again.recorded, again.copies, again.lanes) == (before.recorded, False, 5)
