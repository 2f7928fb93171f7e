"""Last hidden state → loss of every target, without the logits of a batch in memory.

With a vocabulary of 128,256 the fp32 logits of one row of 8,192 tokens take 4.2 GB, more than a quantised 8B base.
So only positions that predict a target meet the head, in chunks, and a frozen head's gradient is made at once in the
forward pass (p − onehot, weighted, times W), so that no chunk is computed twice. A head with adapters is recomputed
chunk by chunk in the backward pass instead, because its own gradients need autograd.

Shapes: K lanes, S target positions of a lane (padded, weight 0), H hidden, V vocabulary, C positions of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from crosstune.model.base import Base
from crosstune.model.elementwise import runs_triton
from crosstune.model.lora import LaneLinear
from crosstune.model.spread import make_current

# Bytes of one chunk's fp32 logits. Large enough that the product with the head runs at full rate (1,000 rows of a
# 128,256 vocabulary on a GPU, 300 rows of 49,152 on a CPU), small beside everything else.
CHUNK_BYTES = {"cpu": 64 << 20, "mps": 128 << 20, "cuda": 512 << 20}


@dataclass(frozen=True)
class HeadLoss:
    """What the head says of each target. `weighted` is a scalar with a gradient: the sum of weight × loss."""

    weighted: Tensor
    nll_KS: Tensor  # fp32, natural logarithm, unweighted
    hit_KS: Tensor  # bool: the target was the likeliest token


def chunk_rows(vocab_size: int, device_type: str) -> int:
    """Positions whose fp32 logits fill one chunk."""
    return max(8, CHUNK_BYTES[device_type] // (4 * vocab_size))


def head_loss(base: Base, hidden_NTH: Tensor, index_KS: Tensor, target_KS: Tensor, weight_KS: Tensor) -> HeadLoss:
    """Loss of each target. `index_KS` points into a lane's (rows × T) positions; `weight_KS` is 0 where padded."""
    if base.spread is not None:
        return _where_the_head_is(base, hidden_NTH, index_KS, target_KS, weight_KS)
    return _head_loss(base, hidden_NTH, index_KS, target_KS, weight_KS)


def _where_the_head_is(base: Base, hidden_NTH: Tensor, *given: Tensor) -> HeadLoss:
    """The same, where the base's layers lie on several devices; losses and hits come back to where the targets are."""
    device, back = base.head_device, given[0].device
    make_current(device)
    try:
        out = _head_loss(base, hidden_NTH.to(device), *(tensor.to(device) for tensor in given))
    finally:
        make_current(back)
    return HeadLoss(out.weighted, out.nll_KS.to(back), out.hit_KS.to(back))


def _head_loss(base: Base, hidden_NTH: Tensor, index_KS: Tensor, target_KS: Tensor, weight_KS: Tensor) -> HeadLoss:
    num_lanes, hidden_size = index_KS.shape[0], hidden_NTH.shape[-1]
    hidden_KSH = hidden_NTH.reshape(num_lanes, -1, hidden_size)
    hidden_KSH = hidden_KSH.gather(1, index_KS[:, :, None].expand(-1, -1, hidden_size))
    rows = chunk_rows(base.vocab_size, hidden_NTH.device.type)
    head = base.head
    if isinstance(head, LaneLinear) and not head.now.bypass:
        return _adapted(base, head, (hidden_KSH, index_KS, target_KS, weight_KS), max(1, rows // num_lanes))
    linear: Any = head.base if isinstance(head, LaneLinear) else head
    factor, cap = base.logit_rule()
    flat = (hidden_KSH.reshape(-1, hidden_size), target_KS.reshape(-1), weight_KS.reshape(-1))
    weighted, nll, hit = _Frozen.apply(*flat, linear.weight, linear.bias, (factor, cap, rows))
    return HeadLoss(weighted, nll.view_as(target_KS), hit.view_as(target_KS))


def next_logits(base: Base, hidden_NH: Tensor) -> Tensor:
    """fp32 logits (N, V) of the token after each hidden state; rows lie lane by lane where the head is adapted."""
    factor, cap = base.logit_rule()
    if base.spread is None:
        return _to_logits(base.head(hidden_NH), factor, cap)
    try:
        return _to_logits(base.head(hidden_NH), factor, cap).to(hidden_NH.device)
    finally:
        make_current(hidden_NH.device)


def _to_logits(raw: Tensor, factor: float, cap: float | None) -> Tensor:
    logits = raw.float()
    if factor != 1.0:
        logits = logits * factor
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _judge(logits_CV: Tensor, target_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log-sum-exp, loss, hit) of each position."""
    lse_C = torch.logsumexp(logits_CV, -1)
    nll_C = lse_C - logits_CV.gather(1, target_C[:, None])[:, 0]
    return lse_C, nll_C, logits_CV.argmax(-1) == target_C


def _frozen_chunk(
    given: tuple[Tensor, Tensor, Tensor | None],
    weight_VH: Tensor,
    bias_V: Tensor | None,
    rule: tuple[float, float | None],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(loss, hit, gradient of the hidden states) of one chunk: a function, so that its logits die before the next."""
    hidden_CH, target_C, weight_C = given
    factor, cap = rule
    logits_CV = functional.linear(hidden_CH, weight_VH, bias_V)
    if cap is None and runs_triton(hidden_CH):
        nll_C, hit_C = (torch.empty_like(target_C, dtype=dtype) for dtype in (torch.float32, torch.bool))
        if not hidden_CH.is_meta:
            from crosstune.model import triton_head

            triton_head.judge(logits_CV, target_C, weight_C, factor, nll_C, hit_C)
        return nll_C, hit_C, None if weight_C is None else logits_CV @ weight_VH
    logits_CV = _to_logits(logits_CV, factor, cap)
    lse_C, nll_C, hit_C = _judge(logits_CV, target_C)
    if weight_C is None:
        return nll_C, hit_C, None
    slope_CV = None if cap is None else 1 - (logits_CV / cap).square()
    grad_CV = logits_CV.sub_(lse_C[:, None]).exp_()
    grad_CV.scatter_add_(1, target_C[:, None], torch.full_like(lse_C, -1.0)[:, None])
    grad_CV.mul_(weight_C[:, None] * factor)
    if slope_CV is not None:
        grad_CV.mul_(slope_CV)
    return nll_C, hit_C, grad_CV.to(hidden_CH.dtype) @ weight_VH


class _Frozen(torch.autograd.Function):
    """A head without adapters: losses, and the gradient of the hidden states made on the way."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden_SH: Tensor,
        target_S: Tensor,
        weight_S: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        rule: tuple[float, float | None, int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        factor, cap, rows = rule
        nll_S = torch.empty(len(target_S), device=hidden_SH.device)
        hit_S = torch.empty(len(target_S), device=hidden_SH.device, dtype=torch.bool)
        wants_gradient = ctx.needs_input_grad[0]
        grad_SH = torch.empty_like(hidden_SH) if wants_gradient else None
        for start in range(0, len(target_S), rows):
            part = slice(start, start + rows)
            given = (hidden_SH[part], target_S[part], weight_S[part] if wants_gradient else None)
            nll_S[part], hit_S[part], grad_CH = _frozen_chunk(given, weight_VH, bias_V, (factor, cap))
            if grad_SH is not None and grad_CH is not None:
                grad_SH[part] = grad_CH
        if grad_SH is not None:
            ctx.save_for_backward(grad_SH)
        ctx.mark_non_differentiable(nll_S, hit_S)
        return (nll_S * weight_S).sum(), nll_S, hit_S

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _nll: Any, _hit: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (grad_SH,) = ctx.saved_tensors
        return grad_SH * grad.to(grad_SH.dtype), None, None, None, None, None


def _adapted(base: Base, head: LaneLinear, given: tuple[Tensor, Tensor, Tensor, Tensor], rows: int) -> HeadLoss:
    hidden_KSH, index_KS, target_KS, weight_KS = given
    factor, cap = base.logit_rule()
    dropout = head.now.dropout
    key_KS = None if dropout is None else dropout.key_KS.gather(1, index_KS)

    def judge(hidden_KCH: Tensor, target_KC: Tensor, key_KC: Tensor | None) -> tuple[Tensor, Tensor]:
        if dropout is not None and key_KC is not None:  # the head sees target positions only, not all of the pass
            head.now.dropout = replace(dropout, key_KS=key_KC)
        logits = _to_logits(head(hidden_KCH), factor, cap).flatten(0, 1)
        head.now.dropout = dropout
        _, nll, hit = _judge(logits, target_KC.reshape(-1))
        return nll.view_as(target_KC), hit.view_as(target_KC)

    losses, hits = [], []
    for start in range(0, target_KS.shape[1], rows):
        stop = start + rows
        part = (hidden_KSH[:, start:stop], target_KS[:, start:stop], None if key_KS is None else key_KS[:, start:stop])
        if torch.is_grad_enabled():
            nll, hit = checkpoint(judge, *part, use_reentrant=False, preserve_rng_state=False)
        else:
            nll, hit = judge(*part)
        losses.append(nll)
        hits.append(hit)
    nll_KS, hit_KS = torch.cat(losses, 1), torch.cat(hits, 1)
    return HeadLoss((nll_KS * weight_KS).sum(), nll_KS.detach(), hit_KS)
