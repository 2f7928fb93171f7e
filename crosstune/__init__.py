"""Cross-validated LoRA fine-tuning: the base loaded once, every fold an adapter, all folds trained together."""

__version__ = "0.1.0"
