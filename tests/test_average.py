"""The average of adapters acts as the average of what each does to every weight."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from crosstune.errors import ModelError, RunError
from crosstune.export import merge
from crosstune.export.average import average_adapters
from crosstune.recipe.sections import Lora
from tests.adapters import TARGETS, export, random_adapter

LORAS = [Lora(rank=4, alpha=8), Lora(rank=2, alpha=8, rslora=True), Lora(rank=8, alpha=4)]


@pytest.fixture
def folds(tiny, tmp_path):
    """Three adapters of different rank and scale, and by hand the average change of each weight."""
    mean: dict[str, torch.Tensor] = {}
    for number, lora in enumerate(LORAS):
        tensors = random_adapter(tiny, lora, TARGETS, seed=number)
        export(tmp_path / f"fold-{number}", tiny, lora, TARGETS, tensors=tensors)
        scale = lora.alpha / (lora.rank**0.5 if lora.rslora else lora.rank)
        for key, a in tensors.items():
            if key.endswith("lora_A.weight"):
                delta = scale * tensors[key.replace("lora_A", "lora_B")].double() @ a.double()
                mean[key] = mean.get(key, 0) + delta / 3
    return [tmp_path / f"fold-{number}" for number in range(3)], mean


def change(folder, key: str) -> torch.Tensor:
    tensors = load_file(folder / "adapter_model.safetensors")  # alpha = rank: scale 1
    return tensors[key.replace("lora_A", "lora_B")].double() @ tensors[key].double()


def test_the_rank_sum_holds_the_average_exactly(folds, tmp_path):
    done = average_adapters(folds[0], tmp_path / "mean")
    assert done.rank == 14 and done.lost == 0.0 and "exactly" in done.words()
    for key, want in folds[1].items():
        assert torch.allclose(change(tmp_path / "mean", key), want, atol=1e-6)
    merge(tmp_path / "mean", tmp_path / "merged")  # and it opens like any adapter


@pytest.mark.parametrize("rank", [1, 4, 13])
def test_a_lower_rank_is_the_best_there_is_and_says_what_is_lost(folds, tmp_path, rank):
    done = average_adapters(folds[0], tmp_path / "mean", rank=rank)
    lost = whole = 0.0
    for key, want in folds[1].items():
        u, s, v = torch.linalg.svd(want)  # Eckart–Young: no matrix of this rank is nearer
        assert torch.allclose(change(tmp_path / "mean", key), (u[:, :rank] * s[:rank]) @ v[:rank], atol=1e-5)
        lost, whole = lost + float((s[rank:] ** 2).sum()), whole + float((s**2).sum())
    assert done.lost == pytest.approx((lost / whole) ** 0.5, rel=1e-6)
    assert done.worst[1] >= done.lost > 0


def test_an_average_takes_the_place_of_none_of_its_adapters(folds, tmp_path):
    before = load_file(folds[0][1] / "adapter_model.safetensors")
    with pytest.raises(RunError, match="would be lost"):
        average_adapters(folds[0], folds[0][1])
    assert load_file(folds[0][1] / "adapter_model.safetensors").keys() == before.keys()


def test_the_card_gives_no_score(folds, tmp_path):
    average_adapters(folds[0], tmp_path / "mean", rank=4)
    card = (tmp_path / "mean" / "README.md").read_text()
    assert "| score | none" in card and "share lost by the rank" in card


def test_adapters_of_different_layers_have_no_average(folds, tiny, tmp_path):
    export(tmp_path / "other", tiny, Lora(rank=4))
    with pytest.raises(ModelError, match="different layers"):
        average_adapters([folds[0][0], tmp_path / "other"], tmp_path / "mean")
    with pytest.raises(ModelError, match="two adapters or more"):
        average_adapters(folds[0][:1], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
