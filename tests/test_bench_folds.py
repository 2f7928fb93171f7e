"""The speed bench: every contestant does the same work, and what is counted and reckoned is right."""

from __future__ import annotations

import argparse
import gc
import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.folds import job as jobs
from bench.folds.child import run_child
from bench.folds.clock import StageClock
from bench.folds.job import Job, Prepared, base_parameters, prepare
from bench.folds.machine import mark_quantized, write_base
from bench.folds.ours import run_ours
from bench.folds.peer import STYLES, run_peer
from bench.folds.summary import summaries
from bench.shapes import random_model
from crosstune.model.base import adopt, load_base
from crosstune.recipe.sections import Model

ROOT = Path(__file__).parent.parent
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the bench itself would take the GPU")
VOCAB, LENGTHS = 384, [9, 31, 12, 17, 40, 23, 8, 28, 14, 36]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Iterator[Job]:
    """Ten rows of unlike lengths; a learning rate at which four steps change the loss by much more than 1e-3."""
    file = tmp_path_factory.mktemp("bench") / "lengths.json"
    file.write_text(json.dumps({"tokens": LENGTHS}))
    with patch.object(jobs, "LENGTHS", file):
        yield Job(tokens=0, rows=20, folds=5, learning_rate=0.02)


@pytest.fixture(scope="module")
def base() -> Iterator[Any]:
    """The tiny shape. What is imported is left out of garbage collection, half a second each time otherwise."""
    gc.freeze()
    yield random_model("tiny", "none", torch.device("cpu"), vocab=VOCAB)
    gc.unfreeze()


@pytest.fixture(scope="module")
def ours_mixed(base, mixed) -> dict:
    """crosstune's line of the mixed job."""
    said = io.StringIO()
    with redirect_stdout(said):
        run_ours(base, mixed, 5, argparse.Namespace(calls=1))
    return json.loads(said.getvalue().splitlines()[-1])


def lines_of(capsys) -> list[dict]:
    return [json.loads(text) for text in capsys.readouterr().out.splitlines() if text.startswith("{")]


def peer_lines(base: Any, name: str, job: Job, capsys) -> list[dict]:
    if name.startswith("trl"):
        # before 1.16 TRL's fused head is a Triton kernel wherever Triton is installed, on a CPU too
        pytest.importorskip("trl", minversion="1.16")
        from bench.folds.trl_loop import TrlPeer as Loop
    else:
        from bench.folds.peft_loop import PeftPeer as Loop
    model = mark_quantized(base, "none")
    run_peer(Loop(model, STYLES[name]), name, prepare(job, model), folds=5)
    return lines_of(capsys)


def our_lines(base: Any, job: Job, lanes: int, capsys, calls: int = 1) -> list[dict]:
    run_ours(base, job, lanes, argparse.Namespace(calls=calls))
    return lines_of(capsys)


@pytest.mark.parametrize("name", ["trl-small", "trl-best", "trl-free", "peft"])
def test_contestants_see_the_same_rows_and_reach_the_same_losses(base, mixed, ours_mixed, name, capsys):
    ours, prepared = ours_mixed, prepare(mixed, base)
    theirs = peer_lines(base, name, mixed, capsys)
    assert [line["kind"] for line in theirs] == ["fold"] * 5 + ["result"]
    assert theirs[-1]["rows"] == ours["rows"]
    learnt = [before - after for before, after in zip(ours["base_losses"], ours["losses"], strict=True)]
    assert min(learnt) > 0.1
    assert theirs[-1]["losses"] == pytest.approx(ours["losses"], abs=1e-3)
    said = summaries([ours, theirs[-1]])[0]["losses_agree"]
    assert said["within_noise"] and said["same_rows"]
    padded = 0.0 if name in ("trl-small", "trl-free") else padding(prepared, 4)
    assert theirs[-1]["train_waste"] == pytest.approx(padded, abs=1e-6)


def padding(prepared: Prepared, size: int) -> float:
    """Share of padding in batches of `size` rows of a lane's own order."""
    computed = real = 0
    for fold in prepared.folds:
        order = [int(prepared.tokens.lengths[row]) for row in prepared.order(fold)]
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            computed, real = computed + len(batch) * max(batch), real + sum(batch)
    return 1 - real / computed


def test_a_loop_leaves_the_base_as_it_was(base, mixed, capsys):
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    once = peer_lines(base, "peft", mixed, capsys)[-1]
    again = peer_lines(base, "peft", mixed, capsys)[-1]
    assert once["losses"] == again["losses"]
    after = base.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_other_learning_rates_are_not_taken_for_noise(base, mixed, ours_mixed, capsys):
    slower = Job(mixed.tokens, mixed.rows, mixed.folds, learning_rate=mixed.learning_rate / 2)
    theirs = peer_lines(base, "peft", slower, capsys)[-1]
    assert not summaries([ours_mixed, theirs])[0]["losses_agree"]["within_noise"]


def test_crosstunes_padding_is_counted(ours_mixed, mixed):
    real = sum(mixed.lengths()) * (mixed.folds - 1)
    assert ours_mixed["tokens_trained"] == real
    assert 0 < ours_mixed["train_waste"] < 1 and 0 < ours_mixed["evaluate_waste"] < 1


def test_one_lane_alone_is_a_wave_a_fold_and_forty_are_eight_trials(base, capsys):
    job = Job(tokens=12, rows=10, folds=5, learning_rate=0.02)
    alone, together, many = (our_lines(base, job, lanes, capsys)[-1] for lanes in (1, 5, 40))
    assert [len(call) for call in alone["waves_s"]] == [5]
    assert alone["losses"] == pytest.approx(together["losses"], abs=1e-4)
    assert many["losses"] == pytest.approx(together["losses"], abs=1e-4)
    assert many["tokens_trained"] == 8 * together["tokens_trained"]


def test_steady_leaves_out_no_more_than_what_a_first_step_takes_longer(base, capsys):
    line = our_lines(base, Job(tokens=12, rows=20, folds=5), 5, capsys, calls=2)
    for call in line[:-1]:
        extra = max(0.0, call["split"]["first step"] - call["split"]["median step"])
        assert call["waves_s"][0] - call["steady_waves_s"][0] == pytest.approx(extra, abs=1e-5)
    assert line[-1]["steady_s"] == line[1]["steady_waves_s"][0]


@on_cpu
def test_a_base_by_name_gives_the_same_losses_and_its_loading_is_not_counted(mixed, ours_mixed, capsys):
    options = argparse.Namespace(
        child="crosstune", by_name=True, shape="tiny", quantization="none", vocab=0, cap=0, mixed=True, tokens=[],
        rows=mixed.rows, folds=mixed.folds, learning_rate=mixed.learning_rate, lanes=[5], calls=2,
    )  # fmt: skip

    def slowly(*args: Any, **words: Any) -> Any:
        time.sleep(0.2)
        return load_base(*args, **words)

    with patch("crosstune.model.base.load_base", slowly):
        run_child(options)
    *calls, line = lines_of(capsys)
    assert [each["kind"] for each in (*calls, line)] == ["call", "call", "result"]
    assert all(each["by_name"] for each in (*calls, line)) and "by_name" not in ours_mixed
    assert (line["losses"], line["rows"]) == (ours_mixed["losses"], ours_mixed["rows"])
    assert line["load_s"] == calls[0]["load_s"] and line["whole_s"] == calls[0]["seconds"]
    for call in calls:
        assert call["load_s"] == call["split"]["load"] >= 0.2
        lasted = sum(seconds for name, seconds in call["split"].items() if ": " not in name and "step" not in name)
        assert sum(call["waves_s"]) < call["seconds"] < lasted - call["load_s"] + 1e-3


@on_cpu
def test_a_base_that_was_written_in_nf4_is_loaded_as_the_same_bytes(tmp_path):
    pytest.importorskip("bitsandbytes")
    write_base(tmp_path, "tiny", "nf4", VOCAB)
    loaded = load_base(
        Model(name=str(tmp_path), quantization="nf4"), None, device=torch.device("cpu"), precision="fp32"
    )
    made = random_model("tiny", "nf4", torch.device("cpu"), vocab=VOCAB)
    assert loaded.digest() == adopt(made, None).digest()


def test_loading_is_found_inside_other_stages_too():
    clock = StageClock()
    for stage in ("train", "load"):
        clock.start(stage)
    time.sleep(0.01)
    for _ in range(2):
        clock.stop()
    assert clock.loading() == clock.seconds["train: load"] >= 0.01


def test_the_floors_operations_are_those_that_pytorch_counts(base):
    """4 FLOP a token and parameter for training: the embeddings get no gradient, but the first layer's input does."""
    ids = torch.randint(VOCAB, (3, 16))
    embedded = base.get_input_embeddings()(ids).requires_grad_()
    with FlopCounterMode(display=False) as trained:
        base(inputs_embeds=embedded).logits.sum().backward()
    with FlopCounterMode(display=False) as scored, torch.no_grad():
        base(ids)

    def products(counter: FlopCounterMode) -> int:
        return sum(
            n
            for op, n in counter.get_flop_counts()["Global"].items()
            if op in (torch.ops.aten.mm, torch.ops.aten.addmm)
        )

    parameters = base_parameters("tiny", VOCAB)
    assert products(trained) == 4 * parameters * ids.numel()
    assert products(scored) == 2 * parameters * ids.numel()
    job = Job(tokens=16, rows=20, folds=5)
    assert job.flops("tiny", VOCAB) == 16 * (4 * 16 * 5 + 2 * 4 * 5) * parameters


def result(contestant: str, **facts) -> dict:
    facts = {
        "tokens": "128", "lanes": 1, "folds": 5, "peak_gib": 9.0, "reserved_gib": 99.0, "rows": "same", "card": "NVIDIA H200", "losses": [9.0] * 5,
        "steady_s": 25.0, "whole_s": 30.0, **facts,
    }  # fmt: skip
    return {"kind": "result", "contestant": contestant, **facts}


def ours(lanes: int = 5, **facts) -> dict:
    facts = {
        "steady_s": 2.0, "steady_wave_s": 2.5, "steady_call_s": 3.0, "whole_s": 4.0, "base_losses": [12.0] * 5,
        "tokens_trained": 25600, "steps": 10, "split": {"median step": 0.1}, **facts,
    }  # fmt: skip
    return result("crosstune", lanes=lanes, **facts)


def test_ratios_are_per_five_folds_per_one_and_per_forty():
    peers = [result("trl-small", steady_s=110.0, whole_s=120.0), result("trl-best"), result("unsloth", steady_s=20.0)]
    floor = {
        "kind": "floor",
        "contestant": "floor",
        "tokens": "128",
        "seconds": 1.0,
        "flops": 90,
        "tflops_a_second": 9e-11,
    }
    alone, five, forty = summaries([ours(1), ours(5), ours(40, steady_s=8.0), *peers, floor])
    assert (five["small_steady_x"], five["best_steady_x"], five["best"]) == (55.0, 10.0, "unsloth")
    assert (five["small_whole_x"], five["best_whole_x"], five["floor_share"]) == (30.0, 7.5, 0.5)
    # 90 FLOP at 90 a second: 80 of them train, in ten steps of 0.1 s
    assert five["step_share"] == pytest.approx(80 / 90) and five["tokens_per_s"] == 12800
    assert (five["best_steady_wave_x"], five["best_steady_call_x"]) == (8.0, pytest.approx(20 / 3))
    assert (alone["steady_s"], alone["small_steady_s"], alone["small_steady_x"]) == (0.4, 22.0, pytest.approx(55.0))
    assert alone["floor_s"] == 0.2 and alone["whole_s"] is None
    assert (forty["steady_s_a_lane"], forty["best_steady_s"], forty["best_steady_x"]) == (0.2, 160.0, 20.0)


def test_only_what_had_the_same_memory_is_compared_and_the_newest_counts():
    lines = [ours(), ours(cap_gib=16.0, steady_s=5.0), result("trl-best", steady_s=99.0), result("trl-best"),
             result("trl-best", cap_gib=16.0, steady_s=50.0)]  # fmt: skip
    free, small = summaries(lines)
    assert (free["best_steady_s"], small["best_steady_s"]) == (25.0, 50.0)


def test_under_a_cap_stands_beside_what_would_have_fit_it():
    lines = [ours(cap_gib=16.0), result("trl-best", reserved_gib=15.5), result("peft", steady_s=28.0, reserved_gib=15.0),
             result("trl-small", steady_s=110.0, reserved_gib=6.0)]  # fmt: skip
    row = summaries(lines)[0]
    assert (row["best"], row["best_steady_x"], row["small_steady_x"]) == ("peft", 14.0, 55.0)


def test_beside_a_capped_run_a_contestants_own_run_under_that_cap_counts_and_none_of_another_job():
    floor = {
        "kind": "floor",
        "contestant": "floor",
        "tokens": "128",
        "seconds": 1.0,
        "flops": 1e15,
        "tflops_a_second": 800.0,
    }
    lines = [
        floor, ours(cap_gib=16.0), result("peft", cap_gib=16.0, steady_s=60.0), result("peft", reserved_gib=6.0),
        result("trl-best", tokens="512", reserved_gib=6.0), result("trl-liger", cap_gib=12.0, reserved_gib=6.0),
        result("unsloth", reserved_gib=None),
    ]  # fmt: skip
    row = summaries(lines)[0]
    assert (row["best"], row["best_steady_s"], row["floor_s"]) == ("peft", 60.0, 1.0)
    assert list(row["losses_agree"]["apart"]) == ["peft"]


def test_what_a_card_shows_as_used_while_another_process_fills_it_is_not_a_contestants():
    facts = {"used_bytes": 12 * 2**30, "train_waste": 0.0, "evaluate_waste": 0.0}
    from docs.write_speed_page import memory

    free, capped = memory([], [ours(**facts), ours(cap_gib=16.0, **facts)]).splitlines()[-2:]
    assert "| 12.0 |" in free and "| 12.0 |" not in capped


def test_the_readmes_table_is_what_the_lines_say():
    lines = [json.loads(text) for text in (ROOT / "bench" / "folds_h200.jsonl").read_text().splitlines()]
    steady = {
        (line["tokens"], line.get("cap_gib"), line["contestant"]): line["steady_s"]
        for line in lines
        if line["kind"] == "result" and not line.get("by_name") and line["lanes"] == (5 if line["contestant"] == "crosstune" else 1)
    }  # fmt: skip
    table = (ROOT / "README.md").read_text().partition("| tokens a row | crosstune")[2].partition("\n\n")[0]
    peers, seen = ("peft", "trl-liger", "unsloth", "trl-small"), 0
    for row in table.splitlines()[2:]:
        name, ours_cell, *cells = (text.strip() for text in row.strip("|").split("|"))
        tokens = name.replace(",", "").split()[0]
        cap = 16.0 if "16 GiB" in name else None
        if tokens == "peak":
            continue
        mine = steady[tokens, cap, "crosstune"]
        assert float(ours_cell.removesuffix(" s")) == pytest.approx(mine, abs=0.05)
        for peer, text in zip(("trl-free",) * 4 if tokens == "mixed" else peers, cells, strict=True):
            if text:
                taken, times = text.split(" s (")[0], text.split("(")[1].split("×")[0]
                found = steady[tokens, None, peer]
                assert float(taken) == pytest.approx(found, abs=0.5 if found > 100 else 0.05), (name, peer)
                assert float(times) == pytest.approx(found / mine, abs=0.5 if found > 10 * mine else 0.05), (name, peer)
                seen += 1
    assert seen == 14


def test_what_the_page_of_speed_says_in_short_is_in_its_tables():
    text = (ROOT / "docs" / "speed.md").read_text()
    short = text.partition("**In short**")[2].partition("\n\n")[0]
    figures = set(re.findall(r"\d+\.\d+", short))
    assert len(figures) >= 12
    assert figures <= set(re.findall(r"\d+\.\d+", text.partition("<!-- tables")[2].partition("<!-- end")[0]))


def test_a_base_by_name_has_a_row_of_its_own():
    named = ours(by_name=True, load_s=9.0, whole_s=3.0, kernels="new")
    lines = [ours(kernels="new"), named, result("trl-small", steady_s=110.0, whole_s=120.0), result("peft")]
    usual, other = summaries(lines)
    assert [usual] == summaries([line for line in lines if line is not named])
    assert (usual["by_name"], usual["load_s"], usual["best_whole_x"]) == (False, None, 7.5)
    assert (other["by_name"], other["load_s"], other["small_whole_x"], other["best_whole_x"]) == (True, 9.0, 40.0, 10.0)


def test_other_rows_are_not_the_same_work():
    found = summaries([ours(), result("trl-best", rows="others")])[0]["losses_agree"]
    assert not found["within_noise"] and not found["same_rows"]


def test_lines_reach_stdout_and_the_file_and_what_is_missing_is_said(tmp_path):
    """The floor in its own process; a contestant that isn't installed is a line, not a failure."""
    out = tmp_path / "lines.jsonl"
    command = [sys.executable, "-m", "bench.folds", "--shape", "tiny", "--quantization", "none", "--tokens", "16",
               "--contestants", "floor", "unsloth", "--out", str(out)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == out.read_text()
    lines = [json.loads(text) for text in done.stdout.splitlines()]
    assert [line["kind"] for line in lines[:2]] == ["env", "floor"]
    assert lines[1]["flops"] == Job(16).flops("tiny", VOCAB)
    assert lines[2]["kind"] in ("absent", "failed", "fold")  # where Unsloth is installed it needs a GPU


def test_the_page_of_lines_has_their_ratios_and_refuses_lines_without_crosstune(tmp_path):
    from docs.write_speed_page import tables

    facts = {"train_waste": 0.0, "evaluate_waste": 0.0, "reserved_gib": 9.5, "versions": {"torch": "2"}}
    lines = [
        {"kind": "env", "at": "2026-12-01T10:00:00+00:00", "command": "python -m bench.folds --tokens 128"},
        ours(1, calls_s=[3.0], **facts), ours(5, calls_s=[4.0, 3.0], **facts),
        result("trl-small", steady_s=110.0, whole_s=120.0, per_fold_s=[24.0, 22.0], **facts),
        {"kind": "absent", "contestant": "unsloth", "reason": "not installed"},
    ]  # fmt: skip
    file = tmp_path / "folds_card.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = tables([file])
    for words in ("NVIDIA H200, 2026-12-01", "torch 2", "| 55.0× | 30.0× |", "5 over 1", "24.0 22.0", "not installed",
                  "python -m bench.folds --tokens 128"):  # fmt: skip
        assert words in text
    assert "by name" not in text
    lines += [
        ours(by_name=True, load_s=9.0, whole_s=3.0, calls_s=[3.0, 2.0], kernels="new", **facts),
        {"kind": "failed", "contestant": "crosstune", "job": ["--tokens", "9"], "by_name": True, "said": "no disk"},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    longer = tables([file])
    for words in ("crosstune loads the base by name", "| 128 | 5 | new | 3.00 | 9.00 | 40.0× | – | 3.00 |",
                  "| 128, by name | crosstune, 5 lanes | 3.00 2.00 |", "--tokens 9, by name: no disk"):  # fmt: skip
        assert words in longer
    left = [line for line in longer.splitlines() if line in text.splitlines()]
    assert [line for line in left if line] == [line for line in text.splitlines() if line]
    file.write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(SystemExit, match="no line of crosstune's own results"):
        tables([file])


def test_the_page_is_that_of_the_measured_lines():
    from docs.write_speed_page import PAGE, page

    assert PAGE.read_text(encoding="utf-8") == page()
