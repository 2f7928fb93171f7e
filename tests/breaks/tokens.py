"""What only the tokenizer and the template show: control tokens, seams, answers that are cut."""

from __future__ import annotations

from tests.breaks.bed import ASKED, SHAPES, Bed, Expected, breaks, turns_of


@breaks(*SHAPES)
def control_token_in_the_text(bed: Bed) -> Expected:
    bed.needs_tokenizer = True
    row = bed.pick()
    tokens = [
        "<|eot_id|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|reserved_special_token_28|>",
        "<|finetune_right_pad_id|>",
    ]
    bed.insert(row, bed.rng.choice(["{}", "word{}", "{}word"]).format(bed.rng.choice(tokens)))
    return "special-token-in-content", (row,)


@breaks("text", "prompt", "csv")
def text_that_brings_its_bos(bed: Bed) -> Expected:
    bed.needs_tokenizer = True
    row = bed.pick()
    question = bed.shape != "text"
    bed.answer(row, "<|begin_of_text|>" + bed.answer(row, question=question), question=question)
    return "double-bos", (row,)


FOREIGN = (
    "[INST] {} [/INST] {}", "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n{} [/INST] {} </s>",
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>", "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n{}",
    "<|user|>\n{}<|end|>\n<|assistant|>\n{}<|end|>", "<｜User｜>{}<｜Assistant｜>{}", "<|start|>user<|message|>{}<|end|><|start|>assistant<|message|>{}",
    "### Instruction:\n{}\n\n### Response:\n{}",
)  # fmt: skip


@breaks(*SHAPES)
def format_of_another_model(bed: Bed) -> Expected:
    bed.needs_tokenizer = True
    row = bed.pick()
    bed.answer(row, bed.rng.choice(FOREIGN).format("Name one tree.", "larch"))
    return "foreign-template", (row,)


@breaks("text")
def answer_that_is_not_marked(bed: Bed) -> Expected:
    bed.needs_tokenizer = True
    bed.options["answer_after"] = bed.rng.choice(["Answer: ", "Answer:"])
    row = bed.pick()
    bed.answer(row, bed.answer(row).replace("Answer:", bed.rng.choice(["Reply:", "answer:", "Answer :"])))
    return "completion-mask-empty", (row,)


@breaks(*SHAPES)
def answer_cut(bed: Bed) -> Expected:
    bed.needs_tokenizer = True
    bed.options["max_tokens"] = 400
    row = bed.pick()
    bed.answer(row, "zinc and tin " * bed.rng.randrange(300, 500))
    return "response-truncated", (row,)


@breaks(*ASKED)
def answer_gone(bed: Bed) -> Expected:
    bed.needs_tokenizer = True
    bed.options["max_tokens"] = 400
    row = bed.pick()
    bed.answer(row, "zinc and tin " * bed.rng.randrange(300, 500), question=True)
    return "response-fully-truncated", (row,)


@breaks("prompt", "csv")
def blank_at_the_seam(bed: Bed) -> Expected:
    bed.needs_tokenizer = True
    row = bed.pick()
    bed.answer(row, bed.answer(row, question=True) + " ", question=True)
    bed.answer(row, "The small jar.")  # " The" is one token of the tiny tokenizer
    return "seam-merge", (row,)


@breaks("messages")
def tool_call_that_the_template_drops(bed: Bed) -> Expected:
    bed.needs_tokenizer = True
    row = bed.pick()
    call = {"type": "function", "function": {"name": "depth", "arguments": {"tank": bed.rng.randrange(9)}}}
    turns_of(bed, row)[-1]["tool_calls"] = [call]
    return "unsupported-field", (row,)
