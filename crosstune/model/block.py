"""A decoder block of the Llama family as four nodes of the graph, in place of some fifty.

While lanes are attached, attach.py puts `FusedBlock` where transformers' block was, over the same submodules under the
same names, and takes it out afterwards. The four nodes, h the hidden states that run past everything:

    QueryKeyValue   h → norm → q, k, v bundle → rotary                     keeps h, 1/rms
    attention       PyTorch's, whichever kernel it chooses                 keeps q, k, v, its output, logsumexp
    Output          h + o_proj(attention)                                  keeps that output
    Mlp             h + down_proj(swiglu(gate, up bundle(norm(h))))        keeps h, 1/rms, gate, up

Normed tensors and silu(gate) · up are not kept: the gradients of A need h only (bundle.py), and SwiGLU's backward
pass makes its product again where the gradient lay. Each node also keeps its bundles' low-rank tensors. h goes
through QueryKeyValue to Output, so that the gradient which comes back past the norm is added in the norm's own kernel.

Shapes: K lanes, N tokens of all lanes (B rows of T), H hidden, O outputs side by side, D head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from crosstune.model.attention import ON_CPU, ON_GPU
from crosstune.model.bundle import Bundle, Normed
from crosstune.model.elementwise import rms_norm, rms_norm_backward, rotate_, rotate_back, swiglu, swiglu_backward_
from crosstune.model.lora import Dropout, Pass
from crosstune.model.packed import packed_attention

# Kinds of device. On CPUs fused blocks are no faster by themselves, but passes can lie flat then: a fifth less time in
# bf16 (docs/speed.md, On a CPU); fp32 gains nothing.
FUSED_ON = {"cuda": True, "mps": False, "cpu": False, "cpu bf16": True}


def kind_of(device: torch.device, dtype: torch.dtype) -> str:
    """The kind of device as FUSED_ON and FLAT_ON (train/cutting.py) know it."""
    return "cpu bf16" if device.type == "cpu" and dtype == torch.bfloat16 else device.type


@dataclass(frozen=True)
class BlockParts:
    """A block's bundles and norms."""

    into: Bundle  # q, k, v
    out: Bundle
    wide: Bundle  # gate, up
    down: Bundle
    norms: tuple[Any, Any]  # before attention, before the MLP
    head_size: int

    @property
    def bundles(self) -> tuple[Bundle, Bundle, Bundle, Bundle]:
        """All four."""
        return self.into, self.out, self.wide, self.down

    @property
    def rotated(self) -> int:
        """Columns of queries and keys."""
        return self.into.parts[1].columns.stop

    @property
    def mlp_leaf(self) -> Tensor | None:
        """The MLP's node has two bundles."""
        return self.down.leaf if self.wide.leaf is None else self.wide.leaf


class QueryKeyValue(torch.autograd.Function):
    """(h, cos, sin) → h itself, and queries, keys, values as (B, heads, T, D) views of one tensor."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        h_BTH: Tensor,
        _leaf: Tensor | None,
        parts: BlockParts,
        turn: tuple[Tensor, Tensor],
        dropout: Dropout | None,
    ) -> tuple[Tensor, ...]:
        rows, length, _ = h_BTH.shape
        h_NH, norm = h_BTH.reshape(-1, h_BTH.shape[-1]), parts.norms[0]
        x_NH, inverse_N = rms_norm(h_NH, norm.weight, norm.variance_epsilon)
        y_NO, low_NR = parts.into.forward(x_NH, dropout)
        rotate_(y_NO, *turn, parts.rotated)
        ctx.save_for_backward(h_NH, inverse_N, low_NR, *turn)
        ctx.parts, ctx.dropout, ctx.shape = parts, dropout, h_BTH.shape
        heads_BTD = (
            y_NO[:, part.columns].view(rows, length, -1, parts.head_size).transpose(1, 2) for part in parts.into.parts
        )
        return h_BTH.view_as(h_BTH), *heads_BTD

    @staticmethod
    def backward(ctx: Any, g_BTH: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        h_NH, inverse_N, low_NR, *turn = ctx.saved_tensors
        weight_H = ctx.parts.norms[0].weight
        g_NO = rotate_back(grads, *turn)  # type: ignore[arg-type]
        gx_NH = ctx.parts.into.backward(
            g_NO, h_NH, low_NR, ctx.dropout, normed=Normed(inverse_N, weight_H), wants_input=ctx.needs_input_grad[0]
        )
        if gx_NH is not None:
            past_NH = g_BTH.reshape(gx_NH.shape)
            gx_NH = rms_norm_backward(gx_NH, h_NH, weight_H, inverse_N, past_NH).view(ctx.shape)
        return gx_NH, None, None, None, None


class Output(torch.autograd.Function):
    """h + o_proj(attention)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, h_BTH: Tensor, seen_NI: Tensor, _leaf: Tensor | None, parts: BlockParts, dropout: Dropout | None
    ) -> Tensor:
        y_NH, low_NR = parts.out.forward(seen_NI, dropout, h_BTH.reshape(-1, h_BTH.shape[-1]))
        ctx.save_for_backward(seen_NI, low_NR)
        ctx.parts, ctx.dropout = parts, dropout
        return y_NH.view(h_BTH.shape)

    @staticmethod
    def backward(ctx: Any, g_BTH: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        seen_NI, low_NR = ctx.saved_tensors
        g_NH = g_BTH.reshape(-1, g_BTH.shape[-1])
        wants_input = ctx.needs_input_grad[1]
        g_seen_NI = ctx.parts.out.backward(g_NH, seen_NI, low_NR, ctx.dropout, wants_input=wants_input)
        return g_BTH, g_seen_NI, None, None, None


class Mlp(torch.autograd.Function):
    """h + down_proj(silu(gate_proj(x)) · up_proj(x)), x the normed h."""

    @staticmethod
    def forward(ctx: Any, h_BTH: Tensor, _leaf: Tensor | None, parts: BlockParts, dropout: Dropout | None) -> Tensor:  # type: ignore[override]
        h_NH, norm = h_BTH.reshape(-1, h_BTH.shape[-1]), parts.norms[1]
        x_NH, inverse_N = rms_norm(h_NH, norm.weight, norm.variance_epsilon)
        wide_NO, low_wide_NR = parts.wide.forward(x_NH, dropout)
        del x_NH
        out_NH, low_down_NR = parts.down.forward(swiglu(wide_NO), dropout, h_NH)
        ctx.save_for_backward(h_NH, inverse_N, wide_NO, low_wide_NR, low_down_NR)
        ctx.parts, ctx.dropout = parts, dropout
        return out_NH.view(h_BTH.shape)

    @staticmethod
    def backward(ctx: Any, g_BTH: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        h_NH, inverse_N, wide_NO, low_wide_NR, low_down_NR = ctx.saved_tensors
        parts, dropout, weight_H = ctx.parts, ctx.dropout, ctx.parts.norms[1].weight
        g_NH = g_BTH.reshape(h_NH.shape)
        g_low_NR = parts.down.low_gradient(g_NH, low_down_NR)
        g_NF = parts.down.input_gradient(g_NH, g_low_NR, dropout)
        swiglu_backward_(g_NF, wide_NO)  # now g_NF holds the product, and wide_NO its own gradient
        parts.down.add_a_gradient(g_low_NR, g_NF, dropout)
        del g_NF
        normed, wants_input = Normed(inverse_N, weight_H), ctx.needs_input_grad[0]
        gx_NH = parts.wide.backward(wide_NO, h_NH, low_wide_NR, dropout, normed=normed, wants_input=wants_input)
        if gx_NH is not None:
            gx_NH = rms_norm_backward(gx_NH, h_NH, weight_H, inverse_N, g_NH).view(g_BTH.shape)
        return gx_NH, None, None, None


class FinalNorm(torch.autograd.Function):
    """The norm after the last block."""

    @staticmethod
    def forward(ctx: Any, h_NH: Tensor, weight_H: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        y_NH, inverse_N = rms_norm(h_NH, weight_H, eps)
        ctx.save_for_backward(h_NH, weight_H, inverse_N)
        return y_NH

    @staticmethod
    def backward(ctx: Any, g_NH: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        h_NH, weight_H, inverse_N = ctx.saved_tensors
        return rms_norm_backward(g_NH.contiguous(), h_NH, weight_H, inverse_N, None), None, None


class FusedNorm(nn.Module):
    """transformers' RMSNorm of the Llama family as one node."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, hidden_states: Tensor) -> Tensor:
        flat_NH = hidden_states.reshape(-1, hidden_states.shape[-1])
        return FinalNorm.apply(flat_NH, self.weight, self.variance_epsilon).view(hidden_states.shape)


class FusedBlock(GradientCheckpointingLayer):
    """transformers' block of the Llama family. With a key-value cache (generation) the block itself runs."""

    def __init__(self, block: Any, now: Pass, parts: BlockParts) -> None:
        super().__init__()
        for name, module in block.named_children():
            self.add_module(name, module)
        self.now, self.parts = now, parts
        self._block = (block,)  # in a tuple, so that it is no submodule and no name changes
        self.training = block.training

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if kwargs.get("cache") is not None or kwargs.get("past_key_values") is not None:
            kwargs |= {"attention_mask": attention_mask, "position_ids": position_ids}
            return self._block[0](hidden_states, position_embeddings=position_embeddings, **kwargs)
        assert position_embeddings is not None
        parts, dropout, attention = self.parts, self.now.dropout_of_training(), self._block[0].self_attn
        rows, length, _ = hidden_states.shape
        turn = tuple(part.reshape(-1, parts.head_size) for part in position_embeddings)
        passed, query, key, value = QueryKeyValue.apply(hidden_states, parts.into.leaf, parts, turn, dropout)
        if kwargs.get("rows") is not None:
            seen_NI = packed_attention(query, key, value, kwargs["rows"], attention.scaling)
        else:
            attend: Any = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
            seen, _ = attend(attention, query, key, value, attention_mask, dropout=0.0, scaling=attention.scaling)
            seen_NI = seen.reshape(rows * length, -1)
        passed = Output.apply(passed, seen_NI, parts.out.leaf, parts, dropout)
        return Mlp.apply(passed, parts.mlp_leaf, parts, dropout)


def fused_block(block: nn.Module, now: Pass, dtype: torch.dtype) -> FusedBlock | None:
    """A block that computes as `block` does; None for a kind of block that isn't known here."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
    from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

    if type(block) not in (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer):
        return None
    known: Any = block
    attention, mlp = known.self_attn, known.mlp
    config = attention.config
    if config.hidden_act not in ("silu", "swish") or config._attn_implementation not in ("sdpa", ON_GPU, ON_CPU):
        return None
    bundles = [
        Bundle.of(layers, now, dtype)
        for layers in (
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (attention.o_proj,),
            (mlp.gate_proj, mlp.up_proj),
            (mlp.down_proj,),
        )
    ]
    into, out, wide, down = bundles
    if into is None or out is None or wide is None or down is None:
        return None
    norms = (known.input_layernorm, known.post_attention_layernorm)
    return FusedBlock(block, now, BlockParts(into, out, wide, down, norms, attention.head_dim))


def fused_norm(norm: nn.Module) -> FusedNorm | None:
    """A norm that computes as `norm` does; None for a kind that isn't known here."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.mistral.modeling_mistral import MistralRMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    return FusedNorm(norm) if type(norm) in (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm) else None
