"""A tiny Llama-shaped model folder (random weights, seed 0) with a Llama-3-like tokenizer: 369 entries, 384 embedding rows.

360 <|begin_of_text|>, 361 <|end_of_text|>, 364 <|finetune_right_pad_id|>, 366/367 header, 368 <|eot_id|>. No pad token is set.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

CASES = Path(__file__).parent / "cases"
TURN = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}{{ '<|start_header_id|>' + m['role'] + "
    "'<|end_header_id|>\\n\\n' + (m['content'] | trim) + '<|eot_id|>' }}{% endfor %}"
)
OPEN = "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
INSTRUCT = TURN + "{% if add_generation_prompt %}" + OPEN + "{% endif %}"
TEMPLATES = {"instruct": INSTRUCT, "base": INSTRUCT, "genprompt": TURN + OPEN}


def make_tiny(
    out: Path,
    variant: str = "instruct",
    *,
    tie: bool = False,
    vocab: int = 384,
    attention_bias: bool = False,
    zero_rows: Sequence[int] = (),
    layers: int = 2,
    dtype: str = "float32",
    max_shard_size: str = "5GB",
) -> Path:
    """Write the model to `out`. Variants: instruct, base (eos is <|end_of_text|>), genprompt (template always opens a turn), notemplate."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(CASES / "tokenizer.json", out)
    eos, eos_id = ("<|end_of_text|>", 361) if variant == "base" else ("<|eot_id|>", 368)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": eos,
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    if variant in TEMPLATES:
        config["chat_template"] = TEMPLATES[variant]
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1))

    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=8192,
            rope_theta=500000.0,
            tie_word_embeddings=tie,
            attention_bias=attention_bias,
            bos_token_id=360,
            eos_token_id=eos_id,
        )
    )
    torch.random.set_rng_state(state)
    with torch.no_grad():
        for row in zero_rows:
            model.get_input_embeddings().weight[row].zero_()
            model.get_output_embeddings().weight[row].zero_()
        if attention_bias:
            for name, parameter in model.named_parameters():
                if name.endswith(".bias"):
                    parameter.fill_(0.01)
    model.generation_config = GenerationConfig(bos_token_id=360, eos_token_id=eos_id)
    model.to(getattr(torch, dtype)).save_pretrained(out, max_shard_size=max_shard_size)
    return out
