"""What leaves the project: an adapter as a PEFT folder; base + adapter as one model, verified."""

from crosstune.export.adapter import save_adapter
from crosstune.export.answer import Answer, generate
from crosstune.export.merge import MergeReport, merge

__all__ = ["Answer", "MergeReport", "generate", "merge", "save_adapter"]
