"""PEFT folder; merged model, verified."""

from crosstune.export.adapter import save_adapter

__all__ = ["save_adapter"]
