"""The measurements behind choices in crosstune/model: the same work done in several ways, milliseconds each.

python -m bench.choices                     # Llama-3-8B's widths, 5 lanes x 2,048 tokens
python -m bench.choices --tokens 128
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.step import seconds

Ways = dict[str, Callable[[], Any]]


def main() -> None:
    """One JSON line a piece of work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--divide", type=int, default=1, help="divide the widths, to test the script")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, ways in work(options, device):
        found = {}
        for way, run in ways.items():
            try:
                times = [seconds(run, device) for _ in range(15)][5:]
            except (RuntimeError, AttributeError, ImportError, NotImplementedError) as error:
                found[way] = str(error).split("\n")[0][:100]
                continue
            found[way] = round(statistics.median(times) * 1e3, 3)
        print(json.dumps({"work": name, **found}), flush=True)


def work(options: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, Ways]]:
    """Pieces of work by name, each as a choice of ways."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    lanes, tokens, rank = options.lanes, options.tokens, options.rank
    hidden, wide, kv = (size // options.divide for size in (4096, 14336, 1024))
    for name, inputs, outputs in (
        ("gate and up", hidden, 2 * wide),
        ("down", wide, hidden),
        ("q, k, v", hidden, hidden + 2 * kv),
    ):
        yield f"{name}: base and adapters forward", forward(randn, lanes, tokens, rank, inputs, outputs)
        yield f"{name}: gradient of B", gradient_b(randn, lanes, tokens, rank, outputs)
    yield "q, k, v: one product or three", apart(randn, lanes * tokens, hidden, (hidden, kv, kv))
    yield "gate, up: one product or two", apart(randn, lanes * tokens, hidden, (wide, wide))
    yield from attention(randn, lanes, tokens, hidden // 128 or 1, kv // 128 or 1)
    if device.type == "cuda":
        yield "gate and up: NF4 to 16 bit", nf4(randn(2 * wide, hidden))


def forward(randn: Callable[..., Tensor], lanes: int, tokens: int, rank: int, inputs: int, outputs: int) -> Ways:
    """y = x Wᵀ + low Bᵀ."""
    x, w, b = randn(lanes * tokens, inputs), randn(outputs, inputs), randn(lanes, outputs, rank)
    low, y, x_wide = (
        randn(lanes, tokens, rank),
        randn(lanes * tokens, outputs),
        randn(lanes * tokens, inputs + 16 * lanes),
    )
    y_lane, b_t = y.view(lanes, tokens, outputs), b.transpose(1, 2)
    x_wide, w_wide = (randn(count, inputs + rank * lanes) for count in (lanes * tokens, outputs))
    return {
        "product alone": lambda: torch.mm(x, w.t(), out=y),
        "product, then adapters onto it": lambda: (torch.mm(x, w.t(), out=y), y_lane.baddbmm_(low, b_t)),
        "adapters, then product onto them": lambda: (torch.bmm(low, b_t, out=y_lane), y.addmm_(x, w.t())),
        "adapters alone": lambda: torch.bmm(low, b_t, out=y_lane),
        "adapters onto y": lambda: y_lane.baddbmm_(low, b_t),
        "adapters as further columns of W": lambda: torch.mm(x_wide, w_wide.t(), out=y),
    }


def gradient_b(randn: Callable[..., Tensor], lanes: int, tokens: int, rank: int, outputs: int) -> Ways:
    """grad += gᵀ low, and g B."""
    g, low, b = randn(lanes, tokens, outputs), randn(lanes, tokens, rank), randn(lanes, outputs, rank)
    total = torch.zeros(lanes, outputs, rank, device=g.device)
    return {
        "16 bit, added in fp32": lambda: total.add_(torch.bmm(g.transpose(1, 2), low)),
        "fp32 by the product": lambda: torch.baddbmm(total, g.transpose(1, 2), low, out_dtype=torch.float32),
        "fp32, then added": lambda: total.add_(torch.bmm(g.transpose(1, 2), low, out_dtype=torch.float32)),
        "transposed": lambda: torch.bmm(low.transpose(1, 2), g),
        "g B": lambda: torch.bmm(g, b),
    }


def apart(randn: Callable[..., Tensor], count: int, inputs: int, outputs: tuple[int, ...]) -> Ways:
    """One wide product or several, into the columns of one tensor."""
    x, w, y = randn(count, inputs), randn(sum(outputs), inputs), randn(count, sum(outputs))
    parts = list(zip(w.split(outputs), y.split(outputs, 1), strict=True))
    return {
        "one": lambda: torch.mm(x, w.t(), out=y),
        "each": lambda: [torch.mm(x, w_part.t(), out=y_part) for w_part, y_part in parts],
    }


def attention(
    randn: Callable[..., Tensor], lanes: int, tokens: int, heads: int, groups: int
) -> Iterator[tuple[str, Ways]]:
    """Causal attention forward and backward; queries, keys and values as views of one tensor, or apart."""
    width = (heads + 2 * groups) * 128
    for rows, length in ((lanes, tokens), (4 * lanes, tokens // 4)):
        whole = randn(rows, length, width).requires_grad_()
        parts = whole.detach().split([heads * 128, groups * 128, groups * 128], 2)
        views = [part.unflatten(2, (-1, 128)).transpose(1, 2).detach().requires_grad_() for part in parts]
        apart_ = [view.detach().contiguous().requires_grad_() for view in views]
        g = randn(rows, length, heads, 128).transpose(1, 2)
        flat = [view.detach().transpose(1, 2).reshape(rows * length, -1, 128).requires_grad_() for view in views]
        starts = torch.arange(0, rows * length + 1, length, device=g.device, dtype=torch.int32)

        def run(given: list[Tensor], g: Tensor, kind: SDPBackend | None) -> None:
            def once() -> None:
                out = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
                out.backward(g)

            if kind is None:
                return once()
            with sdpa_kernel(kind):
                return once()

        def varlen(flat: list[Tensor], g: Tensor, starts: Tensor, length: int) -> None:
            from torch.nn.attention.varlen import varlen_attn

            options = {"window_size": (-1, 0), "enable_gqa": True}
            try:
                out = varlen_attn(*flat, starts, starts, length, length, **options)
            except TypeError:  # torch 2.10 and 2.11
                out = varlen_attn(*flat, starts, starts, length, length, is_causal=True)
            out.backward(g.transpose(1, 2).reshape(out.shape))

        ways: Ways = {}
        for label, given in (("views", views), ("apart", apart_)):
            for kind in (None, SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
                name = "chosen" if kind is None else kind.name.lower()
                ways[f"{name}, {label}"] = lambda given=given, kind=kind, g=g: run(given, g, kind)
        ways["varlen"] = lambda f=flat, g=g, s=starts, n=length: varlen(f, g, s, n)
        yield f"attention {rows} x {length}", ways


def nf4(weight: Tensor) -> Ways:
    """Undoing the quantisation."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    from crosstune.model import triton_nf4

    packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    out = torch.empty_like(weight)
    return {
        "bitsandbytes": lambda: dequantize_4bit(packed, state, out=out),
        "one Triton kernel": lambda: triton_nf4.make(packed, state, out),
        "a copy of the same size": lambda: out.copy_(weight),
    }


if __name__ == "__main__":
    main()
