"""16-bit copies of a 4-bit base, kept while memory is plenty: a weight is then made once a wave, not twice a pass.

Making an 8B model's weights takes an H200 10 ms a pass: a tenth of a pass of 5 lanes x 4 rows x 128 tokens, a quarter
of one lane's. The copies take 13 GiB, and are the first that is given back when memory runs out. The numbers are the
same with them and without.
"""

from __future__ import annotations

from crosstune.memory.plan import Plan
from crosstune.model.base import Base

SPARE_SHARE = 0.15  # of all that may be used, left free beside plan and copies


def copies_that_fit(base: Base, plan: Plan) -> int:
    """Bytes of the copies; 0 where there is nothing to copy or not the room."""
    if base.device.type != "cuda" or base.spread is not None:
        return 0
    layers = (module for module in base.model.modules() if type(module).__name__ == "Linear4bit")
    needed = sum(2 * layer.in_features * layer.out_features for layer in layers)
    return needed if plan.peak_bytes + needed < (1 - SPARE_SHARE) * plan.free_bytes else 0
