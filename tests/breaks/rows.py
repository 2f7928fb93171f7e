"""Broken rows: values, keys, shapes and speakers that no row may have."""

from __future__ import annotations

import json

from tests.breaks.bed import JSON, SHAPES, TURNS, Bed, Expected, breaks, turn_of, turns_of


@breaks(*JSON)
def value_of_another_type(bed: Bed) -> Expected:
    row = bed.pick()
    bed.answer(row, bed.rng.choice([42, 4.5, True, ["a", "b"], {"a": 1}, [], {}]))
    return "wrong-type", (row,)


@breaks(*JSON)
def null(bed: Bed) -> Expected:
    row = bed.pick()
    bed.answer(row, None)
    return "missing-content", (row,)


@breaks("messages", "sharegpt")
def key_missing(bed: Bed) -> Expected:
    row = bed.pick()
    turn = next(iter(bed.rows[row - 1].values()))[bed.rng.randrange(2)]
    del turn["content" if bed.shape == "messages" else "value"]
    return "missing-content", (row,)


@breaks("messages", "sharegpt")
def unknown_speaker(bed: Bed) -> Expected:
    row = bed.pick()
    turn = next(iter(bed.rows[row - 1].values()))[bed.rng.randrange(2)]
    turn["role" if bed.shape == "messages" else "from"] = bed.rng.choice(
        ["bot", "Assistant ", "USER", "", "narrator", "ai"]
    )
    return "unknown-role", (row,)


@breaks("messages", "sharegpt")
def conversation_as_a_string(bed: Bed) -> Expected:
    row = bed.pick()
    record = bed.rows[row - 1]
    name = next(iter(record))
    record[name] = json.dumps(record[name])
    return "wrong-type", (row,)


@breaks("messages", "sharegpt")
def no_turns(bed: Bed) -> Expected:
    row = bed.pick()
    record = bed.rows[row - 1]
    record[next(iter(record))] = []
    return "empty-conversation", (row,)


@breaks(*JSON)
def row_that_is_no_object(bed: Bed) -> Expected:
    row = bed.rng.randrange(1, len(bed.rows)) + 1
    bed.lines = bed.as_lines()
    bed.lines[row - 1] = bed.rng.choice([b"[1, 2]\n", b"7\n", b'"text"\n', b"null\n", b"true\n"])
    return "wrong-type", (row,)


@breaks(*JSON)
def row_of_no_known_shape(bed: Bed) -> Expected:
    row = bed.pick()
    bed.rows[row - 1] = {"words": "zinc", "more": 1}
    return "unknown-shape", (row,)


@breaks("messages", "sharegpt", "alpaca", "prompt")
def row_of_another_shape(bed: Bed) -> Expected:
    return "other-shape", (bed.add({"text": "Plain words about nothing in particular."}),)


@breaks("text")
def conversation_among_texts(bed: Bed) -> Expected:
    turns = [{"role": "user", "content": "Name one metal."}, {"role": "assistant", "content": "zinc"}]
    return "other-shape", (bed.add({"messages": turns}),)


@breaks(*SHAPES)
def blank_answer(bed: Bed) -> Expected:
    row = bed.pick()
    blanks = ["", " ", "\n\n", "\t \n", "\u00a0", "\u3000 "]
    bed.answer(row, bed.rng.choice(blanks))
    return "empty-response", (row,)


@breaks("messages", "sharegpt", "prompt", "csv", "alpaca")
def blank_question(bed: Bed) -> Expected:
    row = bed.pick()
    bed.answer(row, bed.rng.choice(["", "  ", "\n"]), question=True)
    return "empty-prompt", (row,)


@breaks(*TURNS)
def question_twice(bed: Bed) -> Expected:
    row = bed.pick()
    turns_of(bed, row).insert(0, turn_of(bed, "user", "One thing first."))
    return "consecutive-roles", (row,)


@breaks(*TURNS)
def answer_twice(bed: Bed) -> Expected:
    row = bed.pick()
    turns_of(bed, row).append(turn_of(bed, "assistant", "And one thing more."))
    return "consecutive-roles", (row,)


@breaks(*TURNS)
def assistant_begins(bed: Bed) -> Expected:
    row = bed.pick()
    turns_of(bed, row).insert(0, turn_of(bed, "assistant", "Hello."))
    return "assistant-first", (row,)


@breaks(*TURNS)
def system_turn_late(bed: Bed) -> Expected:
    row = bed.pick()
    turns_of(bed, row).insert(bed.rng.choice([1, 2]), turn_of(bed, "system", "Be brief."))
    return "late-system", (row,)


@breaks(*TURNS)
def ends_with_the_user(bed: Bed) -> Expected:
    row = bed.pick()
    turns_of(bed, row).append(turn_of(bed, "user", "Thanks."))
    return "ends-without-assistant", (row,)


@breaks(*TURNS)
def nobody_answers(bed: Bed) -> Expected:
    row = bed.pick()
    del turns_of(bed, row)[-1]
    return "no-assistant-turn", (row,)
