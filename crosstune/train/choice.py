"""Labels scored by log-likelihood, all lanes and all labels at once: prompts run once, each label from their cache.

Shapes: N rows of all lanes, C labels, T positions of a label.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crosstune.data.questions import Choices
from crosstune.model.base import Base
from crosstune.model.head import next_logits
from crosstune.train.generate import Filled, Prompt, cut_batches, fill_cache, without_checkpointing, work_through


@dataclass(frozen=True)
class LabelScores:
    """Per row: positions into the data, log-likelihood of each label as the whole answer, and its tokens."""

    rows: NDArray[np.int64]  # (n,)
    log_likelihood: NDArray[np.float64]  # (n, C)
    tokens: NDArray[np.int64]  # (n, C)

    def chances(self, *, by_token: bool) -> NDArray[np.float64]:
        """Probability of each label among the labels; `by_token` divides log-likelihoods by their number of tokens."""
        score = self.log_likelihood / np.maximum(self.tokens, 1) if by_token else self.log_likelihood
        weight = np.exp(score - score.max(axis=1, keepdims=True))
        return weight / weight.sum(axis=1, keepdims=True)


def score_labels(
    base: Base,
    prompts_K: Sequence[Sequence[Prompt]],
    choices: Choices,
    *,
    pad_id: int,
    tick: Callable[[int], None] | None = None,
) -> list[LabelScores]:
    """Score every label on `prompts_K[k]` with lane k's adapter; K is 1 for a bare base."""
    count = len(choices.names)
    found: list[dict[int, NDArray[np.float64]]] = [{} for _ in prompts_K]
    longest = max(len(ids) for labels in choices.ids for ids in labels)
    with torch.inference_mode(), without_checkpointing(base):
        batches = cut_batches(base, prompts_K, longest, copies=count + 1)
        for batch_K, scores_NC in work_through(
            base, batches, lambda batch_K: _score_batch(base, batch_K, choices, pad_id)
        ):
            each = max(len(batch) for batch in batch_K)
            for lane, batch in enumerate(batch_K):
                for place, prompt in enumerate(batch):
                    found[lane][prompt.row] = scores_NC[lane * each + place]
            if tick is not None:
                tick(sum(len(batch) for batch in batch_K))
    result = []
    for scored in found:
        rows = sorted(scored)
        tokens = np.array([[len(ids) for ids in choices.ids[row]] for row in rows], dtype=np.int64).reshape(-1, count)
        likely = np.array([scored[row] for row in rows]).reshape(-1, count)
        result.append(LabelScores(np.array(rows, dtype=np.int64), likely, tokens))
    return result


def _score_batch(base: Base, batch_K: Sequence[Sequence[Prompt]], choices: Choices, pad_id: int) -> NDArray[np.float64]:
    filled = fill_cache(base, batch_K, pad_id)
    ids_NCT = _label_ids(batch_K, choices, filled.rows_each, pad_id)
    rows, count, width = ids_NCT.shape
    label_NCT = torch.from_numpy(np.maximum(ids_NCT, 0)).to(base.device)
    known_NCT = torch.from_numpy(ids_NCT >= 0).to(base.device)
    # The first token of every label is predicted by the prompt's last position.
    first_NV = torch.log_softmax(next_logits(base, filled.hidden_NH), -1)
    score_NC = first_NV.gather(1, label_NCT[:, :, 0]).double() * known_NCT[:, :, 0]
    if width > 1:
        score_NC += _later_tokens(base, filled, label_NCT, known_NCT).double()
    return score_NC.cpu().numpy().reshape(rows, count)


def _later_tokens(base: Base, filled: Filled, label_NCT: Tensor, known_NCT: Tensor) -> Tensor:
    """Σ log p of each label's second and later tokens: the cache copied once a label, labels padded on the right."""
    rows, count, width = label_NCT.shape
    cache: Any = filled.cache
    cache.batch_repeat_interleave(count)
    mask = filled.mask_NT.repeat_interleave(count, 0)
    mask = torch.cat([mask, torch.ones(rows * count, width - 1, dtype=mask.dtype, device=mask.device)], 1)
    start = filled.next_position_N.repeat_interleave(count, 0)
    position = start[:, None] + torch.arange(width - 1, device=mask.device)
    hidden = base.hidden_cached(label_NCT.flatten(0, 1)[:, :-1], position, mask, cache)
    total = torch.zeros(rows * count, device=mask.device)
    for place in range(width - 1):  # one position at a time: logits of all would be (labels × rows × vocabulary)
        log_p = torch.log_softmax(next_logits(base, hidden[:, place]), -1)
        target = label_NCT.flatten(0, 1)[:, place + 1]
        total += log_p.gather(1, target[:, None])[:, 0] * known_NCT.flatten(0, 1)[:, place + 1]
    return total.view(rows, count)


def _label_ids(batch_K: Sequence[Sequence[Prompt]], choices: Choices, each: int, pad_id: int) -> NDArray[np.int64]:
    """(N, C, T) ids, −1 where a label has no token."""
    count = len(choices.names)
    width = max(len(ids) for batch in batch_K for prompt in batch for ids in choices.ids[prompt.row])
    out = np.full((len(batch_K) * each, count, width), -1, np.int64)
    for lane, batch in enumerate(batch_K):
        for place, prompt in enumerate(batch):
            for label, ids in enumerate(choices.ids[prompt.row]):
                out[lane * each + place, label, : len(ids)] = ids
    return out
