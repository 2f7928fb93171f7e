"""The same random births and deaths on a GPU's caching allocator: what it shows after each, as JSON.

    python tests/allocator_run.py > tests/cases/h200_allocator.json

Every number is what PyTorch says; tests/test_memory_allocator.py holds the model to it.
"""

import json
import random
import subprocess
import sys

SIZES = (700, 300_000, 1 << 20, 3 << 20, 12 << 20, 40 << 20, 100 << 20)
EVENTS = 500


def events(seed):
    """Births and deaths, and now and then an empty cache."""
    draw, alive = random.Random(seed), []
    for key in range(EVENTS):
        chance = draw.random()
        if chance < 0.02:
            yield ["empty", 0, 0]
        elif alive and chance < 0.47:
            yield ["died", alive.pop(draw.randrange(len(alive))), 0]
        else:
            alive.append(key)
            yield ["born", key, int(draw.choice(SIZES) * draw.uniform(0.5, 1))]


def shown(seed, expandable):
    """(allocated, reserved) bytes after each event, in a process of its own: settings count from its first tensor."""
    import torch

    torch.cuda.memory._set_allocator_settings(f"expandable_segments:{expandable}")
    tensors, found = {}, []
    for kind, key, count in events(seed):
        if kind == "born":
            tensors[key] = torch.empty(count, dtype=torch.uint8, device="cuda")
        elif kind == "died":
            del tensors[key]
        else:
            torch.cuda.empty_cache()
        found.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    return found


def all_shown():
    """Three traces, with fixed and with expandable segments."""
    lines = []
    for seed in range(3):
        for expandable in (False, True):
            command = [sys.executable, __file__, str(seed), str(expandable)]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            lines.append({"seed": seed, "expandable": expandable, "shown": json.loads(out)})
    return lines


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(shown(int(sys.argv[1]), sys.argv[2])))
    else:
        print("[" + ",\n".join(map(json.dumps, all_shown())) + "]")
