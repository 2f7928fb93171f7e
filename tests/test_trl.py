"""The field's own as oracle: TRL's SFTTrainer for the loss curve, PEFT for the exported adapter."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from crosstune.data.batches import unit_order
from crosstune.model.attach import LaneSpec, attached
from tests.lanes import PlanOf, fold_job, fp32_base, random_tokens, run


@pytest.fixture(scope="module")
def base(tiny):
    return fp32_base(tiny)


def peft_config(spec: LaneSpec) -> LoraConfig:
    """The lane as PEFT has it."""
    return LoraConfig(
        r=spec.lora.rank, lora_alpha=spec.lora.alpha, lora_dropout=spec.lora.dropout, use_rslora=spec.lora.rslora,
        target_modules=list(spec.targets), task_type="CAUSAL_LM", bias="none",
    )  # fmt: skip


@pytest.mark.parametrize(
    "settings", [{}, {"rslora": True, "targets": ["q_proj", "v_proj"]}], ids=["all-linear", "qv-rslora"]
)
def test_the_loss_curve_of_a_lane_is_trls(base, tiny: Path, tmp_path: Path, monkeypatch, settings):
    """Same rows, order and initial adapter, dropout off, fp32, micro-batch 2 × accumulation 2, the last step short."""
    # before 1.16 TRL's fused head is a Triton kernel wherever Triton is installed, on a CPU too
    pytest.importorskip("trl", minversion="1.16")
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from trl import SFTConfig, SFTTrainer

    tokens = random_tokens(29)
    job = fold_job(base, 1, num_rows=29, lora={"dropout": 0.0, **settings}, weight_decay=0.01, warmup=0.2, epochs=1)
    beside = [fold_job(base, fold, num_rows=29, lora={"dropout": 0.3, "rank": 7}) for fold in (0, 2)]
    mine = run(base, [beside[0], job, beside[1]], tokens, PlanOf(2)).lane(1)
    assert len(mine.losses) == 6  # 22 rows in batches of 4

    with attached(base, [job.spec]) as slots:
        initial = slots.adapter(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32), peft_config(job.spec))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".default." in name:
                parameter.copy_(initial[name.replace(".default.", ".")])

    order = [job.train_rows[i] for i in unit_order(job.seed, 0, len(job.train_rows))]
    rows = [
        {"input_ids": tokens.row(row)[0].tolist(), "completion_mask": tokens.row(row)[1].astype(int).tolist()}
        for row in order
    ]
    monkeypatch.setattr(
        SFTTrainer, "_get_train_sampler", lambda self, dataset=None: SequentialSampler(self.train_dataset)
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.pad_token = "<|finetune_right_pad_id|>"
    config = SFTConfig(
        output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        num_train_epochs=1, learning_rate=job.train.learning_rate, lr_scheduler_type="cosine", warmup_steps=2, weight_decay=0.01,
        logging_steps=1, save_strategy="no", report_to=[], bf16=False, max_length=None, completion_only_loss=True,
        disable_tqdm=True,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = SFTTrainer(
            model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
        )
        trainer.train()
    theirs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    np.testing.assert_allclose(mine.losses, theirs, rtol=1e-4)
    for name, parameter in model.named_parameters():
        if ".default." in name:
            difference = torch.linalg.norm(parameter.detach() - mine.adapter[name.replace(".default.", ".")])
            assert difference <= 1e-3 * torch.linalg.norm(parameter.detach())


def test_peft_loads_an_exported_lane_and_gives_its_logits(base, tiny: Path, tmp_path: Path):
    from crosstune.export.adapter import save_adapter

    tokens = random_tokens()
    jobs = [
        fold_job(base, 0, lora={"rank": 8}),
        fold_job(base, 1, lora={"rank": 3, "targets": ["q_proj", "v_proj", "lm_head"], "rslora": True}),
    ]
    outcome = run(base, jobs, tokens)
    ids = torch.from_numpy(np.stack([tokens.row(row)[0][:8] for row in range(4)]).astype(np.int64))
    for fold, job in enumerate(jobs):
        lane = outcome.lane(fold)
        save_adapter(
            tmp_path / str(fold),
            lane.adapter,
            job.lora,
            target_names=job.targets,
            base_name=str(tiny),
            tokenizer=None,
            stop_ids=(368,),
            card={},
        )
        with attached(base, [job.spec]) as slots, torch.no_grad():
            slots.load(0, lane.adapter)
            slots.begin_pass(None)
            mine = base.head(base.hidden(ids))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", FutureWarning)  # transformers' own, of a property that PEFT still reads
            model = PeftModel.from_pretrained(
                AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32), tmp_path / str(fold)
            )
        with torch.no_grad():
            theirs = model(ids).logits
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(mine, base.model(ids).logits, atol=1e-3)
