"""What leaves the project: an adapter as a PEFT folder; base + adapter as one model, verified."""

from crosstune.export.adapter import save_adapter
from crosstune.export.merge import MergeReport, merge

__all__ = ["MergeReport", "merge", "save_adapter"]
