"""Write docs/findings.md from the catalogue of faults: `python docs/write_findings_page.py`."""

from pathlib import Path

from crosstune.data.lint.catalogue import SECTIONS
from crosstune.data.lint.fault import Fault

PAGE = Path(__file__).parent / "findings.md"
MOST_LINES = 6  # of an example; some faults show only in many rows
MOST_WIDTH = 160
HEAD = """# Findings

`crosstune lint RECIPE|DATA [--model MODEL]` looks at every row once and lists what is wrong. `crosstune run` does the
same first, and refuses errors: nothing is trained until they are mended, or allowed by name (`lint.allow: [code, …]`;
the journal then says so). Warnings and notes stop nothing. Rows are counted from 1. With `--json`, each finding is one
JSON object a line. The exit code is 2 if there is an error that isn't allowed, else 0.

In Python: `report = crosstune.lint("rows.jsonl", model="…")`; `report.findings`, `report.errors`, `report.show()`.

With `data.skip_bad_rows: true` errors that name rows become warnings, and these rows are left out.

This page is written by `python docs/write_findings_page.py`. A test checks that each bad example has its fault, and
that each good one has no other.
"""


def findings_page() -> str:
    """The whole page: a table of all codes, then one part a code."""
    parts = [HEAD]
    for section, faults in SECTIONS.items():
        parts.append(f"\n## {section}\n\n| code | severity | |\n|---|---|---|\n")
        parts += [f"| [`{fault.code}`](#{fault.code}) | {fault.severity} | {fault.title} |\n" for fault in faults]
        parts += [fault_part(fault) for fault in faults]
    return "".join(parts)


def fault_part(fault: Fault) -> str:
    """What it is, why it hurts, a bad and a good example, the fix, where it was met."""
    parts = [f"\n### {fault.code}\n\n*{fault.severity}* · {fault.title}.\n\n{fault.why}\n\n**Fix:** {fault.fix}\n"]
    if fault.under:
        parts.append(f"\nRead with {', '.join(f'`{option}`' for option in fault.under)}.\n")
    kind = {"yaml": "yaml", "jinja": "jinja"}.get(fault.file.rpartition(".")[2], "text")
    for name, example, given in (("Bad", fault.bad, fault.given[0]), ("Good", fault.good, fault.given[1])):
        heading = f"{name} ({given})" if given else name
        if name == "Good" and example == fault.bad:  # the rows aren't at fault: what they are read with is
            parts.append(f"\n{heading}: the same rows{'' if given else ' without the option'}.\n")
        elif not fault.file:
            parts.append(f"\n{heading}: {example!s}.\n")
        else:
            parts.append(f"\n{heading}:\n\n```{kind}\n{shown(example)}```\n")
    if fault.source:
        parts.append(f"\nSource: {fault.source}\n")
    return "".join(parts)


def shown(example: str | bytes) -> str:
    """An example as text: bytes that are no text as escapes, long ones cut."""
    text = example if isinstance(example, str) else example.decode("utf-8", "backslashreplace")
    text = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    lines = [
        line if len(line) <= MOST_WIDTH else f"{line[: MOST_WIDTH // 2]} … {line[-MOST_WIDTH // 2 :]}"
        for line in text.splitlines()
    ]
    if len(lines) > MOST_LINES:
        lines = [*lines[:2], f"… ({len(lines) - 4} more)", *lines[-2:]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(findings_page(), encoding="utf-8")
