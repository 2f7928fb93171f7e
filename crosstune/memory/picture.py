"""The parts of a plan as a stacked bar, with the device's limit as a line: an SVG in plain text, and a PNG of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from pathlib import Path

from crosstune.errors import MissingExtra
from crosstune.units import bytes_words

# Paul Tol's "muted" scheme: told apart in print and by colour-blind readers (personal.sron.nl/~pault).
COLOURS = ("#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499", "#BBBBBB")
WIDTH, BAR, LEFT, ROW = 720, 46, 12, 18


def draw_parts(parts: Mapping[str, int], limit_bytes: int, *, title: str = "") -> str:
    """SVG: one bar, a legend with bytes, the limit as a line."""
    shown = shown_parts(parts)
    total = sum(shown.values())
    scale = (WIDTH - 2 * LEFT) / (1.05 * max(total, limit_bytes, 1))
    pieces, legend, x = [], [], float(LEFT)
    for place, (name, size) in enumerate(shown.items()):
        colour, width = COLOURS[place % len(COLOURS)], size * scale
        words = f"{escape(name)}: {bytes_words(size)}"
        pieces.append(
            f'<rect x="{x:.1f}" y="30" width="{width:.2f}" height="{BAR}" fill="{colour}"><title>{words}</title></rect>'
        )
        column, row = place % 2, place // 2
        left, top = LEFT + column * WIDTH // 2, 30 + BAR + 34 + row * ROW
        legend.append(f'<rect x="{left}" y="{top - 10}" width="11" height="11" fill="{colour}"/>')
        legend.append(f'<text x="{left + 17}" y="{top}">{words}</text>')
        x += width
    line = LEFT + limit_bytes * scale
    anchor = "end" if line > WIDTH / 2 else "start"
    height = 30 + BAR + 34 + math.ceil(len(shown) / 2) * ROW
    heading = f"{escape(title)} {bytes_words(total)} of {bytes_words(limit_bytes)}".strip()
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="12" role="img" aria-label="{heading}">'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/><text x="{LEFT}" y="18" font-size="14">{heading}</text>'
        + "".join(pieces)
        + f'<line x1="{line:.1f}" x2="{line:.1f}" y1="24" y2="{30 + BAR + 6}" stroke="#CC3311" stroke-width="2"/>'
        f'<text x="{line:.1f}" y="{30 + BAR + 18}" text-anchor="{anchor}" fill="#CC3311">limit</text>'
        + "".join(legend)
        + "</svg>"
    )


def shown_parts(parts: Mapping[str, int]) -> dict[str, int]:
    """Largest first; what is below 0.5% of the whole goes together."""
    total = sum(parts.values())
    large = {name: size for name, size in sorted(parts.items(), key=lambda item: -item[1]) if size >= total / 200}
    rest = total - sum(large.values())
    return {**large, "the rest": rest} if rest else large


def save_png(parts: Mapping[str, int], limit_bytes: int, file: Path, *, title: str = "") -> None:
    """The same picture as a PNG; needs the extra `plot`."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib", "plot") from None
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes, left = figure.subplots(), 0.0
    for place, (name, size) in enumerate(shown_parts(parts).items()):
        label = f"{name}: {bytes_words(size)}"
        axes.barh([0], [size / 2**30], left=[left], color=COLOURS[place % len(COLOURS)], label=label)
        left += size / 2**30
    axes.axvline(limit_bytes / 2**30, color="#CC3311")
    axes.set(yticks=[], xlabel="GiB", title=title)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    figure.savefig(file, dpi=150)
