"""Rows into spans: what is learned is what the model has to say, whatever the chat template looks like."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstune.data.load import load_rows
from crosstune.data.render import Renderer, Span
from crosstune.data.rows import Row
from crosstune.data.template import ChatTemplate, RowError
from crosstune.errors import CrosstuneError, ModelError
from crosstune.recipe.sections import Data
from tests.tiny import INSTRUCT, OPEN, TURN

BOS, EOT, EOS = "<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>"


@pytest.fixture
def tokenizer(tiny: Path):
    """A fresh one for each test: tests change its template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny)


def render_row(row: Row, tokenizer: Any, data: Data) -> list[Span]:
    return Renderer(tokenizer, data).spans(row)


def rows_of(*records: dict[str, Any]):
    return load_rows(list(records), Data(path="x")).rows


def talk(*turns: str | tuple[str, str] | dict[str, Any]) -> dict[str, Any]:
    """User and assistant in turn, from plain texts."""
    roles = ("user", "assistant")
    return {
        "messages": [
            t
            if isinstance(t, dict)
            else {"role": t[0], "content": t[1]}
            if isinstance(t, tuple)
            else {"role": roles[i % 2], "content": t}
            for i, t in enumerate(turns)
        ]
    }


def learned(tokenizer, record: dict[str, Any], **options: Any) -> list[str]:
    """The texts that are learned, after a check that the spans are the whole rendered row."""
    (row,) = rows_of(record)
    spans = render_row(row, tokenizer, Data(path="x", **options))
    return [span.text for span in spans if span.learn]


def whole(tokenizer, record: dict[str, Any]) -> str:
    (row,) = rows_of(record)
    return "".join(span.text for span in render_row(row, tokenizer, Data(path="x")))


# --- conversations -------------------------------------------------------------------------------------------------


def test_assistant_turns_and_their_end_are_learned_and_nothing_else(tokenizer):
    record = talk(
        ("system", "Be brief."),
        ("user", "Name one metal."),
        ("assistant", "zinc"),
        ("user", "Another?"),
        ("assistant", " tin\n"),
    )
    assert learned(tokenizer, record) == ["zinc" + EOT, "tin" + EOT]
    assert whole(tokenizer, record) == tokenizer.apply_chat_template(record["messages"], tokenize=False)


def test_spans_are_cut_where_inference_opens_the_turn(tokenizer):
    record = talk("a", "b", "c", "d")
    (row,) = rows_of(record)
    spans = render_row(row, tokenizer, Data(path="x"))
    prompt = tokenizer.apply_chat_template(record["messages"][:1], tokenize=False, add_generation_prompt=True)
    assert [s.learn for s in spans] == [False, True, False, True] and spans[0].text == prompt


@pytest.mark.parametrize(
    "answer", ["zinc", "assistant", "Why?", "", "a" + EOT + "b", "<|start_header_id|>", "\n\nx", "x " * 50]
)
def test_answers_that_look_like_the_template_are_found(tokenizer, answer):
    record = talk("assistant", answer, answer or "x", "end")
    (row,) = rows_of(record)
    spans = render_row(row, tokenizer, Data(path="x"))
    assert [s.text for s in spans if s.learn] == [answer.strip() + EOT, "end" + EOT]
    assert "".join(s.text for s in spans) == tokenizer.apply_chat_template(record["messages"], tokenize=False)


def test_where_no_header_opens_a_turn_the_blank_before_the_answer_is_learned(tokenizer):
    tokenizer.chat_template = TEMPLATES["pairs in brackets"]
    assert learned(tokenizer, talk("a", "b")) == [" b " + EOT]


def test_an_assistant_that_speaks_first_is_learned_without_its_header(tokenizer):
    assert learned(tokenizer, talk(("assistant", "Hello."), ("user", "Hi"), ("assistant", "Yes?"))) == [
        "Hello." + EOT,
        "Yes?" + EOT,
    ]


def test_turns_that_are_not_to_be_learned_are_not(tokenizer):
    record = talk("a", {"role": "assistant", "content": "b", "weight": 0}, "c", "d")
    assert learned(tokenizer, record) == ["d" + EOT]
    assert learned(
        tokenizer, {"prompt": talk("a", "b", "c")["messages"], "completion": [{"role": "assistant", "content": "d"}]}
    ) == ["d" + EOT]


def test_learn_all_learns_the_whole_conversation(tokenizer):
    assert learned(tokenizer, talk("a", "b"), learn="all") == [whole(tokenizer, talk("a", "b"))]


def test_an_empty_conversation_and_one_without_answer_have_nothing_to_learn(tokenizer):
    assert render_row(rows_of({"messages": []})[0], tokenizer, Data(path="x")) == []
    assert learned(tokenizer, talk("a")) == []


# --- other templates -----------------------------------------------------------------------------------------------

HEAD = "{{ bos_token }}{% for m in messages %}"
CHATML = HEAD + "{{ '<|start_header_id|>' + m.role + '\\n' + m.content + '<|eot_id|>\\n' }}{% endfor %}"
CHATML_OPEN = "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant\\n' }}{% endif %}"
# Qwen 3: thoughts of all turns but the last are left out, so what was written once is not what is written later.
THINKING = (
    HEAD + "{% set text = m.content %}{% if not loop.last and '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ '<|start_header_id|>' + m.role + '\\n' + text + '<|eot_id|>\\n' }}{% endfor %}" + CHATML_OPEN
)  # fmt: skip
TEMPLATES = {
    "as it is": INSTRUCT,
    "line end after the turn": CHATML + CHATML_OPEN,
    "always open": TURN + OPEN,
    "always open with line ends": CHATML + "{{ '<|start_header_id|>assistant\\n' }}",
    "never open": CHATML,
    "eos at the very end": CHATML + "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant\\n' }}{% else %}{{ '<|end_of_text|>' }}{% endif %}",
    "opened with a thought": CHATML + "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant\\n<think>\\n' }}{% endif %}",
    "thoughts left out": THINKING,
    "marked, end included": HEAD + "{{ '<|start_header_id|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|eot_id|>' }}{% endgeneration %}{% else %}{{ m.content + '<|eot_id|>' }}{% endif %}{{ '\\n' }}{% endfor %}" + CHATML_OPEN,
    "marked, end left out": HEAD + "{{ '<|start_header_id|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '<|eot_id|>\\n' }}{% endfor %}" + CHATML_OPEN,
    "counts its messages": "{{ bos_token + messages|length|string }}" + CHATML.removeprefix("{{ bos_token }}") + CHATML_OPEN,
    "pairs in brackets": HEAD + "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + ' <|eot_id|>' }}{% endif %}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_turn_is_found_in_every_kind_of_template(tokenizer, name):
    tokenizer.chat_template = TEMPLATES[name]
    said = [text.strip() for text in learned(tokenizer, talk("Why?", "Because.", "Because?", "Yes."))]
    gap = " " if name == "pairs in brackets" else ""
    assert said == [f"Because.{gap}{EOT}", f"Yes.{gap}{EOT}"]
    assert whole(tokenizer, talk("Why?", "Because.", "Because?", "Yes.")).count("<|start_header_id|>assistant") in (
        0,
        2,
    )


PIECES = [*"ab \n<|>[]/é", "<|eot_id|>", "assistant", "\u3000"]
WORDS = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


@pytest.mark.parametrize(
    "name",
    ["as it is", "line end after the turn", "always open", "never open", "eos at the very end", "marked, end left out"],
)
def test_any_answer_is_found_whole_and_the_spans_are_the_rendered_row(tokenizer, name):
    tokenizer.chat_template = TEMPLATES[name]
    renderer = Renderer(tokenizer, Data(path="x"))

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3))
    def check(pairs):
        record = talk(*(text for pair in pairs for text in pair))
        (row,) = rows_of(record)
        spans = renderer.spans(row)
        rendered = tokenizer.apply_chat_template(record["messages"], tokenize=False)
        assert "".join(s.text for s in spans) == rendered.removesuffix(renderer.template.tail)
        shown = [answer.strip() if name in ("as it is", "always open") else answer for _, answer in pairs]
        assert [s.text for s in spans if s.learn] == [answer + EOT for answer in shown]

    check()


def test_a_template_that_always_opens_a_turn_is_said_and_its_header_cut(tokenizer):
    tokenizer.chat_template = TURN + OPEN
    template = ChatTemplate(tokenizer)
    assert [f.code for f in template.findings] == ["template-always-opens-turn"]
    assert template.tail == "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert whole(tokenizer, talk("a", "b")).endswith("b" + EOT)


@pytest.mark.parametrize(
    ("name", "codes"),
    [("as it is", []), ("never open", ["template-never-opens-turn"]), ("pairs in brackets", []),
     ("always open with line ends", ["template-always-opens-turn"]), ("eos at the very end", [])],
)  # fmt: skip
def test_what_is_odd_about_a_template_is_said(tokenizer, name, codes):
    tokenizer.chat_template = TEMPLATES[name]
    assert [f.code for f in ChatTemplate(tokenizer).findings] == codes


def test_a_turn_without_end_token_is_learned_and_said(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    assert [f.code for f in ChatTemplate(tokenizer).findings] == ["no-end-of-turn"]
    assert learned(tokenizer, talk("a", "b", "c", "d")) == ["b\n", "d\n"]


def test_a_template_that_opens_turns_otherwise_than_it_writes_them_is_noticed(tokenizer):
    tokenizer.chat_template = TEMPLATES["opened with a thought"]
    renderer = Renderer(tokenizer, Data(path="x"))
    renderer.spans(rows_of(talk("a", "b"))[0])
    assert renderer.template.unlike == [1]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content + m.content }}{% endfor %}",
        "{% for m in messages|reverse %}{{ m.role + m.content + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}x{% endif %}",
    ],
)
def test_a_turn_that_cannot_be_found_is_refused_never_guessed(tokenizer, template):
    tokenizer.chat_template = template
    try:
        spans = render_row(rows_of(talk("a", "b", "c", "d"))[0], tokenizer, Data(path="x"))
    except CrosstuneError as error:
        assert error.fix
    else:
        assert [s.text.removesuffix(EOT) for s in spans if s.learn] == ["d", "b"], "in the order of the template"


def test_a_template_that_refuses_a_row_names_the_row_and_its_reason(tokenizer):
    tokenizer.chat_template = (
        "{% if messages|length > 3 and messages[1].role == 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"
        + INSTRUCT
    )
    with pytest.raises(RowError, match=r"row 1: .*roles must alternate") as caught:
        render_row(
            rows_of(talk(("user", "a"), ("user", "b"), ("user", "c"), ("assistant", "d")))[0], tokenizer, Data(path="x")
        )
    assert (caught.value.code, caught.value.finding().rows) == ("template-error", (1,))


def test_a_template_that_writes_no_content_is_refused(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + '<|eot_id|>' }}{% endfor %}"
    with pytest.raises(ModelError, match="leaves the assistant's answer out"):
        render_row(rows_of(talk("a", "b"))[0], tokenizer, Data(path="x"))


def test_a_template_for_lists_of_parts_gets_lists_of_parts(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{% for part in m.content %}{{ m.role + ':' + part.text }}{% endfor %}{{ '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    assert learned(tokenizer, talk("a", "b", "c", "d")) == ["b" + EOT, "d" + EOT]


def test_a_template_that_is_broken_or_missing_is_a_model_error(tokenizer):
    row = rows_of(talk("a", "b"))[0]
    for template in ("{% for m in messages %}", "{{ messages.nothing.at_all }}", None):
        tokenizer.chat_template = template
        with pytest.raises(ModelError, match="template"):
            render_row(row, tokenizer, Data(path="x"))


def test_the_date_is_the_same_for_all_rows_and_days(tokenizer):
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + INSTRUCT
    assert whole(tokenizer, talk("a", "b")).startswith("26 Jul 2024")
    assert [f.code for f in ChatTemplate(tokenizer).findings] == ["template-date"]


# TRL's own marked variants of these templates mark the content and its end alone, as is done here without marks.
MARKED_BY_TRL = (
    "cohere",
    "cohere2",
    "gemma",
    "gemma3",
    "lfm2",
    "llama3",
    "phi3",
    "phi3_5",
    "qwen2_5_vl",
    "qwen3_instruct_2507",
    "qwen3_vl",
)


@pytest.mark.parametrize("name", MARKED_BY_TRL)
def test_what_is_learned_without_marks_is_what_trl_marks(tokenizer, name):
    folder = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
    plain, marked = folder / f"{name}.jinja", folder / f"{name}_training.jinja"
    if not (plain.exists() and marked.exists()):
        pytest.skip("this TRL has no such template")
    control = sorted(set(re.findall(r"<\|\w+\|>|</s>|<end_of_turn>|<start_of_turn>", plain.read_text())))
    tokenizer.add_special_tokens({"additional_special_tokens": control})
    record = talk("Why?", "Because.", "Because of what?", "Of that, no more.", "Oh.", "Yes.")
    tokenizer.chat_template = marked.read_text()
    oracle = tokenizer.apply_chat_template(record["messages"], return_dict=True, return_assistant_tokens_mask=True)
    expected = tokenizer.decode([i for i, on in zip(oracle["input_ids"], oracle["assistant_masks"], strict=True) if on])
    tokenizer.chat_template = plain.read_text()
    # TRL's marks take in the line break after the end token, and the EOS token that Phi's template puts at the very end.
    expected = re.sub(r"(<\|im_end\|>|<\|end\|>|<end_of_turn>)\n(<\|eot_id\|>)?", r"\1", expected)
    assert "".join(learned(tokenizer, record)) == expected


# --- tools ---------------------------------------------------------------------------------------------------------

TOOLS = (
    "{% if tools %}{{ tools|tojson }}{% endif %}{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
    "{% if m.tool_calls %}{{ m.tool_calls|tojson }}{{ '<|reserved_special_token_28|>' }}{% else %}{{ m.content + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)  # fmt: skip


def test_tool_calls_are_learned_up_to_their_own_end_token_and_nothing_is_invented(tokenizer, cases):  # D03
    tokenizer.chat_template = TOOLS
    for row, argument in zip(
        load_rows(cases / "D03-tool-calls.jsonl", Data(path="x")).rows,
        ('{"tank": 4}', '{"name": "B", "open": true}'),
        strict=True,
    ):
        spans = render_row(row, tokenizer, Data(path="x"))
        calls, answer = [s.text for s in spans if s.learn]
        assert (
            calls.startswith('[{"type": "function"')
            and argument in calls
            and calls.endswith("<|reserved_special_token_28|>")
        )
        assert answer == row.turns[-1].content + EOT
        text = "".join(s.text for s in spans)
        assert "None" not in text and "null" not in text


@pytest.mark.parametrize(
    "tools", [[{"type": "function", "function": {"name": "f"}}], '[{"type": "function", "function": {"name": "f"}}]']
)
def test_tools_of_a_row_reach_the_template(tokenizer, tools):
    tokenizer.chat_template = TOOLS
    assert whole(tokenizer, {**talk("a", "b"), "tools": tools}).startswith('[{"type": "function"')


def test_a_template_that_leaves_tool_calls_out_is_noticed(tokenizer, cases):
    row = load_rows(cases / "D03-tool-calls.jsonl", Data(path="x")).rows[0]
    assert Renderer(tokenizer, Data(path="x")).ignored(row, "tool_calls")
    tokenizer.chat_template = TOOLS
    assert not Renderer(tokenizer, Data(path="x")).ignored(row, "tool_calls")


# --- prompts and plain text ----------------------------------------------------------------------------------------


def test_a_prompt_is_not_learned_and_the_completion_ends_with_the_stop_token(tokenizer):
    row = rows_of({"prompt": "Name one metal: ", "completion": "zinc"})[0]
    expected = [Span(BOS, False), Span("Name one metal: ", False), Span("zinc", True), Span(EOT, True)]
    assert render_row(row, tokenizer, Data(path="x")) == expected
    assert learned(tokenizer, {"prompt": "a", "completion": "b"}, learn="all") == ["a", "b", EOT]


def test_a_stop_token_that_is_there_already_is_not_doubled(tokenizer):
    assert learned(tokenizer, {"prompt": "a", "completion": "b" + EOT}) == ["b" + EOT]
    assert learned(tokenizer, {"text": "b" + EOT}) == ["b" + EOT]


def test_a_text_is_learned_whole_with_one_bos_and_the_stop_token(tokenizer):
    expected = [Span(BOS, False), Span("zinc", True), Span(EOT, True)]
    assert render_row(rows_of({"text": "zinc"})[0], tokenizer, Data(path="x")) == expected
    assert whole(tokenizer, {"text": BOS + "zinc"}) == BOS + "zinc" + EOT


def test_answer_after_learns_what_follows_its_last_occurrence(tokenizer):
    options = {"answer_after": "Answer: "}
    assert learned(tokenizer, {"text": "Question: x\nAnswer: y\nAnswer: zinc"}, **options) == ["zinc", EOT]
    assert learned(tokenizer, {"text": "Question: x"}, **options) == []
    assert learned(tokenizer, {"text": "Question: x\nAnswer: "}, **options) == [EOT]
    assert learned(tokenizer, {"text": "Answer: x"}, learn="all", **options) == ["Answer: x", EOT]


def test_plain_text_has_no_assistant_turn_to_learn(tokenizer):
    with pytest.raises(RowError, match="plain text") as caught:
        learned(tokenizer, {"text": "a"}, learn="assistant")
    assert "data.answer_after" in caught.value.fix


# --- control tokens in content -------------------------------------------------------------------------------------


def test_kept_control_tokens_are_literal_and_the_templates_own_are_not(tokenizer, cases):  # T06
    rows = load_rows(cases / "T06-special-in-content.jsonl", Data(path="x")).rows
    for row in rows:
        spans = render_row(row, tokenizer, Data(path="x", special_text="keep"))
        assert "".join(s.text for s in spans) == tokenizer.apply_chat_template(
            [{"role": t.role, "content": t.content} for t in row.turns], tokenize=False
        )
        literal = [s.text for s in spans if s.literal]
        assert literal == ([f"\n\n{row.turns[0].content}"] if row.number in (2, 4) else [])
        assert [s.text for s in spans if s.learn] == [row.turns[1].content + EOT]


def test_kept_control_tokens_in_an_answer_are_learned_as_characters(tokenizer):
    row = rows_of(talk("a", f"b {EOT} c", f"{EOT}", "d"))[0]
    spans = render_row(row, tokenizer, Data(path="x", special_text="keep"))
    assert [(s.text, s.literal) for s in spans if s.learn] == [(f"b {EOT} c", True), (EOT, False), ("d" + EOT, False)]
    text = rows_of({"text": f"{BOS}a{EOT}"})[0]
    spans = render_row(text, tokenizer, Data(path="x", special_text="keep"))
    assert spans == [Span(BOS, False), Span(f"{BOS}a{EOT}", True, literal=True), Span(EOT, True)]
