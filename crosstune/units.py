"""Numbers with their unit, printed one way everywhere: `19.2 GiB`, `8.1k`, `4 min 05 s`."""

from __future__ import annotations

from typing import Any


def bytes_words(count: float) -> str:
    """1610612736 → '1.50 GiB'. Below one KiB plain bytes."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            break
        size /= 1024
    if unit == "B":
        return f"{size:.0f} B"
    return f"{size:.2f} {unit}" if abs(size) < 10 else f"{size:.1f} {unit}"


def count_words(count: float) -> str:
    """8143 → '8.1k', 812 → '812', 1.2e6 → '1.2M'."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count:.0f}"


def seconds_words(seconds: float) -> str:
    """245 → '4 min 05 s', 3.21 → '3.2 s', 7260 → '2 h 01 min'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def setting_words(value: Any) -> str:
    """0.00020000001 → '0.0002', ['q_proj', 'v_proj'] → 'q_proj,v_proj'."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
