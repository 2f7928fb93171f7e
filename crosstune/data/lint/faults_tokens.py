"""Faults of rows under a tokenizer: control tokens, other formats, nothing to learn. Found where a model is named."""

from __future__ import annotations

from crosstune.data.lint.fault import Fault
from crosstune.data.lint.faults_file import ZINC, chat

LONG = chat("user: Name many trees.", "assistant: " + " ".join(["larch oak ash elm yew fir pine beech"] * 10))

TOKEN_FAULTS = (
    Fault(
        "double-bos",
        "error",
        "Text that already begins with the beginning-of-text token",
        "The tokenizer adds another: two in training, one at use time.",
        "Remove it from the text: one is added to every row.",
        bad='{"text": "<|begin_of_text|>Name one stone: slate"}\n',
        good='{"text": "Name one stone: slate"}\n',
        source="https://github.com/OpenRLHF/OpenRLHF/issues/393",
    ),
    Fault(
        "special-token-in-content",
        "error",
        "Text that spells a control token",
        "It becomes the control token itself: it forges turns, ends them, or trains reserved tokens.",
        "Remove it, write conversations as messages, or set data.special_text: keep to learn it as plain characters.",
        bad=ZINC.replace("zinc", "zinc<|eot_id|> or tin"),
        good=ZINC,
        source="https://github.com/unslothai/unsloth/issues/1056",
    ),
    Fault(
        "foreign-template",
        "error",
        "Text written in the chat format of another model",
        "Under this tokenizer the markers are ordinary characters: the model learns to print them, and never meets its "
        "own stop token.",
        "Write the rows as messages, without the markers; the model's own template is put around them.",
        bad='{"text": "<s>[INST] Name one tree. [/INST] larch </s>"}\n',
        good=chat("user: Name one tree.", "assistant: larch"),
        source="https://github.com/meta-llama/llama/issues/484",
    ),
    Fault(
        "no-turns",
        "error",
        "Plain text where data.learn asks for assistant turns",
        "A text has no turns; nothing of it would be learned.",
        "Set data.answer_after to the text that stands before each answer, or data.learn: all.",
        bad='{"text": "Name one metal: zinc"}\n',
        good=ZINC,
        under=("data.learn=assistant",),
    ),
    Fault(
        "unsupported-field",
        "error",
        "Tool calls (or thoughts: a warning) of which the chat template writes nothing",
        "The model would learn to answer without the call that the answer came from.",
        "Use a chat template that writes the field, or remove it from the rows.",
        bad=chat("user: How deep is tank 4?", "assistant: 2.1 metres.").replace(
            '"2.1 metres."', '"2.1 metres.", "tool_calls": [{"function": {"name": "depth", "arguments": {"tank": 4}}}]'
        ),
        good=chat("user: How deep is tank 4?", "assistant: 2.1 metres."),
        source="https://github.com/modelscope/ms-swift/pull/10125",
    ),
    Fault(
        "completion-mask-empty",
        "error",
        "Rows in which nothing is learned",
        "Every token is masked; the loss of a step on such rows is 0/0, and is often logged as 0.",
        "Set data.answer_after to a string that stands before every answer, or data.learn: all.",
        bad='{"text": "Question: name one metal.\\nReply: zinc"}\n',
        good='{"text": "Question: name one metal.\\nAnswer: zinc"}\n',
        under=("data.answer_after='Answer: '",),
        source="https://github.com/huggingface/trl/issues/1920",
    ),
    Fault(
        "response-fully-truncated",
        "error",
        "Rows cut at max_tokens before their answer begins",
        "What is left of the row teaches nothing.",
        "Raise data.max_tokens, shorten the prompt, or leave such rows out with data.skip_bad_rows: true.",
        bad=chat("user: " + "Read this line. " * 30, "assistant: zinc"),
        good=ZINC,
        under=("data.max_tokens=64",),
        source="https://github.com/huggingface/trl/pull/6025",
    ),
    Fault(
        "response-truncated",
        "warning",
        "Rows whose answer is cut at max_tokens",
        "The model learns answers that stop in the middle, without the end token.",
        "Raise data.max_tokens or shorten the rows.",
        bad=LONG,
        good=ZINC,
        under=("data.max_tokens=64",),
        source="https://github.com/unslothai/unsloth/issues/2904",
    ),
    Fault(
        "seam-merge",
        "note",
        "Prompt and completion whose tokens merge where they meet",
        "Encoded apart, as here and at use time, the completion begins with a token that is rare in ordinary text.",
        "End the prompt without a blank and begin the completion with it.",
        bad='{"prompt": "Which jar holds the salt? ", "completion": "The small jar."}\n',
        good='{"prompt": "Which jar holds the salt?", "completion": " The small jar."}\n',
        source="https://huggingface.co/docs/trl/dataset_formats",
    ),
    Fault(
        "unknown-tokens",
        "warning",
        "Characters that the tokenizer doesn't know",
        "They all become the same unknown token; what was written there is lost.",
        "Choose a base model whose tokenizer knows the script, or replace the characters.",
        bad="a row in Chinese, and a tokenizer of English words",
        good="a row in English, or a byte-level tokenizer, which knows every character",
        file="",
        source="https://huggingface.co/docs/tokenizers/components",
    ),
)
