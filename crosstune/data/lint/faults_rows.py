"""Faults of rows: turns, answers, characters, people's data, duplicates, lengths, balance."""

from __future__ import annotations

import json

from crosstune.data.lint.fault import Fault
from crosstune.data.lint.faults_file import GOOD, LARCH, ZINC, chat

LEE = "Lee et al. 2022, Deduplicating Training Data Makes Language Models Better, arXiv:2107.06499"
STORY = (
    "The lamp on the right shelf belongs to the keeper of the mill. He lights it when the river is high, and the boats "
    "that come down from the hills at night see it and keep to the left bank until they have passed the weir."
)
THINGS = (
    "shelf", "jar", "tin", "roof", "door", "lamp", "kettle", "bench", "mill", "river", "boat", "hill", "bank", "weir",
    "sluice", "barn", "gate", "well", "yard", "loft", "shed", "stove", "chest", "rope",
)  # fmt: skip
PLAIN_ROWS = "".join(
    chat(f"user: Where is the {a}?", f"assistant: By the {b}.") for a, b in zip(THINGS, THINGS[::-1], strict=True)
)
SORTED = "".join(chat(f"user: Sort part {i}.", f"assistant: {'scrap' if i % 3 else 'fits'}") for i in range(24))


def parts(*, scrap: int) -> str:
    """Rows of two classes, `scrap` of them of one."""
    return "".join(
        f'{{"text": "Part {i} of the {thing}.", "label": "{"scrap" if i < scrap else "fits"}"}}\n'
        for i, thing in enumerate(THINGS)
    )


TURN_FAULTS = (
    Fault(
        "empty-conversation",
        "error",
        "A conversation without a turn",
        "There is nothing to learn from; some templates render it as a bare header.",
        "Remove the row.",
        bad=GOOD + '{"messages": []}\n',
        good=GOOD,
        source="https://github.com/unslothai/unsloth/issues/334",
    ),
    Fault(
        "consecutive-roles",
        "warning",
        "Two turns of the same speaker in a row",
        "Most templates render it without complaint, but no chat model has seen it, and strict templates fail.",
        "Join the two turns, or put the missing one between them.",
        bad=chat("user: Name one tree.", "user: Any tree.", "assistant: larch"),
        good=chat("user: Name one tree. Any tree.", "assistant: larch"),
        source="https://github.com/huggingface/smol-course/issues/260",
    ),
    Fault(
        "assistant-first",
        "warning",
        "The assistant speaks first",
        "The model learns to begin from nothing, which no prompt at use time asks of it; strict templates fail.",
        "Begin with a user turn, or move the greeting into the system turn.",
        bad=chat("assistant: Hello.", "user: Name one stone.", "assistant: slate"),
        good=chat("user: Name one stone.", "assistant: slate"),
        source="https://github.com/huggingface/alignment-handbook/issues/93",
    ),
    Fault(
        "late-system",
        "warning",
        "A system turn after the conversation has begun",
        "Templates drop it, move it to the front or fail.",
        "Put the system turn first.",
        bad=chat("user: Where is the jar?", "system: Be brief.", "assistant: Left."),
        good=chat("system: Be brief.", "user: Where is the jar?", "assistant: Left."),
    ),
    Fault(
        "ends-without-assistant",
        "warning",
        "A conversation that doesn't end with an answer",
        "What follows the last answer costs tokens and teaches nothing.",
        "End the conversation with an assistant turn.",
        bad=chat("user: Name one metal.", "assistant: zinc", "user: Thanks."),
        good=ZINC,
    ),
    Fault(
        "no-assistant-turn",
        "error",
        "A conversation in which nobody answers",
        "No token of it is learned: a step on such rows has a loss of 0/0.",
        "Add the answer or remove the row.",
        bad=chat("user: Is anyone there?"),
        good=chat("user: Is anyone there?", "assistant: Yes."),
        source="https://github.com/unslothai/unsloth/issues/334",
    ),
    Fault(
        "empty-response",
        "error",
        "An answer of nothing, or of blanks",
        "The model is taught to answer with nothing; with the end token masked, the loss is 0/0.",
        "Write the answer or remove the row (data.skip_bad_rows: true leaves such rows out).",
        bad=ZINC.replace("zinc", " \\n"),
        good=ZINC,
        source="https://github.com/mosaicml/llm-foundry/issues/445",
    ),
    Fault(
        "empty-prompt",
        "warning",
        "A question of nothing",
        "The model learns to say this answer whenever a turn begins.",
        "Write the question or remove the row.",
        bad=ZINC.replace("Name one metal.", ""),
        good=ZINC,
    ),
)

TEXT_FAULTS = (
    Fault(
        "nested-json",
        "warning",
        "A whole conversation as JSON text inside a field",
        "It is learned as ordinary text, braces and role names included.",
        "Write the list itself, without quotes around it.",
        bad='{"text": ' + json.dumps(ZINC.strip()) + "}\n",
        good=ZINC,
    ),
    Fault(
        "mojibake",
        "warning",
        "UTF-8 that was read as Windows-1252 or Latin-1",
        "The model learns to print Ã© in place of é.",
        "Read the source as UTF-8; ftfy mends text that is already damaged.",
        bad=ZINC.replace("zinc", "cafÃ©"),
        good=ZINC.replace("zinc", "café"),
        source="https://ftfy.readthedocs.io",
    ),
    Fault(
        "replacement-character",
        "warning",
        "U+FFFD, which stands where a character was lost",
        "The model learns to print it.",
        "Read the source again with the right encoding.",
        bad=ZINC.replace("zinc", "caf\ufffd"),
        good=ZINC.replace("zinc", "café"),
    ),
    Fault(
        "control-character",
        "warning",
        "Invisible control characters",
        "They come from binary files and broken exports, and each is a token of its own.",
        "Remove them.",
        bad=ZINC.replace("zinc", "zi\\u0000nc"),
        good=ZINC,
    ),
    Fault(
        "secret",
        "warning",
        "What looks like a key or a token",
        "Models give back what they were trained on, word for word (Carlini et al. 2021, arXiv:2012.07805).",
        "Revoke it and remove it from the data.",
        bad=ZINC.replace("zinc", "ghp" + "_16C7e42F292c6912E7710c838347Ae178B4a"),
        good=ZINC,
        source="arXiv:2012.07805",
    ),
    Fault(
        "email-address",
        "warning",
        "An e-mail address",
        "Models give back what they were trained on, word for word; the person was probably not asked.",
        "Replace it by one at example.com, or allow it: lint.allow: [email-address].",
        bad=ZINC.replace("zinc", "Write to mara.lind@millpost.org"),
        good=ZINC.replace("zinc", "Write to mara@example.com"),
        source="arXiv:2012.07805",
    ),
)

SET_FAULTS = (
    Fault(
        "duplicate-rows",
        "warning",
        "Rows that are equal, or differ only in Unicode form, case or white space",
        "Learned several times over; on both sides of a fold they flatter the score.",
        "Keep one of each. Folds keep them on one side unless folds.duplicates says otherwise.",
        bad=GOOD + ZINC.replace("zinc", "Zinc "),
        good=GOOD,
        source=LEE,
    ),
    Fault(
        "near-duplicates",
        "warning",
        "Long rows that are nearly the same",
        "One of them in training gives away most of the other in the held-out fold.",
        "Keep one of each, or give them one value of a group column and set folds.group.",
        bad=GOOD
        + chat("user: Tell the story.", f"assistant: {STORY} Good night.")
        + chat("user: Tell the story.", f"assistant: {STORY} The end."),
        good=GOOD + chat("user: Tell the story.", f"assistant: {STORY}"),
        source=LEE,
    ),
    Fault(
        "conflicting-answers",
        "warning",
        "One prompt with different answers",
        "Where there is one right answer, the rows cancel each other, and one of them is wrong. Where answers are free "
        "(talk, stories) this is a note.",
        "Decide for one answer, or keep the rows if both are right.",
        bad=SORTED + chat("user: Sort part 3.", "assistant: scrap"),
        good=SORTED,
        source="Northcutt et al. 2021, Pervasive Label Errors in Test Sets, arXiv:2103.14749",
    ),
    Fault(
        "length-outlier",
        "warning",
        "A few rows far longer than all others",
        "The longest row decides the memory of a step: the run dies at the one step that meets it, or every step pays.",
        "Cut or split the row, or set data.max_tokens.",
        bad=PLAIN_ROWS + chat("user: List the stock.", "assistant: " + "Shelf one holds jar two and tin three. " * 300),
        good=PLAIN_ROWS,
        source="https://github.com/Lightning-AI/litgpt/issues/159",
    ),
    Fault(
        "label-imbalance",
        "note",
        "A class more than ten times as frequent as another",
        "Accuracy then mostly measures the frequent class.",
        "Look at balanced accuracy or the scores by class; folds.kind: stratified keeps the shares.",
        bad=parts(scrap=1),
        good=parts(scrap=12),
    ),
    Fault(
        "language-mix",
        "note",
        "A few rows in another language or script than all others",
        "A handful of rows is too few to learn it and enough to make the model switch.",
        "Check that they belong here.",
        bad=PLAIN_ROWS + chat("user: Где стоит чайник?", "assistant: На левой полке."),
        good=PLAIN_ROWS,
    ),
)

ROW_FAULTS = TURN_FAULTS + TEXT_FAULTS + SET_FAULTS
__all__ = ["LARCH", "ROW_FAULTS"]
