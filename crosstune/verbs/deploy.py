"""merge, average, gguf, generate: the verbs for what has been trained."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from crosstune.interrupt import Interrupts
from crosstune.verbs.train import trial_number
from crosstune.verbs.words import json_flag, only_results_on_stdout, say

if TYPE_CHECKING:
    from crosstune.export.answer import Answer

trial_option = click.option("--trial", default="best", show_default=True, help="A run's trial: its number, or best.")
base_option = click.option("--base", metavar="NAME", help="Base of the adapters: hub id, folder or .gguf.")


@click.command()
@click.argument("source", metavar="RUN|ADAPTER")
@click.option("--out", required=True, metavar="DIR", help="The folder to write.")
@trial_option
@click.option(
    "--data", metavar="FILE", help="Rows to compare on (default: rows of the run that the adapter hasn't seen)."
)
@click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="Default: each tensor keeps its own.")
@click.option("--quantize", type=click.Choice(["none", "nf4", "int8"]), default="none", show_default=True)
@base_option
@click.option("--into-quantized", is_flag=True, help="Merge into a base that is stored in 4 or 8 bit.")
@click.option("--device", default="cpu", show_default=True, help="Where the comparison runs; merging needs no GPU.")
@json_flag
def merge(source: str, out: str, trial: str, as_json: bool, **how: Any) -> None:
    """Merge an adapter into its base.

    The result is compared with base + adapter before it is kept.
    """
    from crosstune.deploy import merge
    from crosstune.progress import choose_progress

    with only_results_on_stdout(), Interrupts().caught():
        report = merge(source, out, trial=trial_number(trial), progress=choose_progress(), **how)
    say(report.words(), report.to_dict(), as_json)


@click.command()
@click.argument("run")
@click.option("--out", required=True, metavar="DIR", help="The folder to write.")
@trial_option
@click.option("--rank", type=click.IntRange(min=1), help="Default: the sum of the folds' ranks, which is exact.")
@base_option
@click.option("--data", metavar="FILE", help="Rows to score it on; those that a fold has seen are left out.")
@click.option("--device", default="auto", show_default=True, help="Where it is scored.")
@json_flag
def average(run: str, out: str, trial: str, as_json: bool, **how: Any) -> None:
    """Average a run's fold adapters into one.

    Every row of the run was trained on by all of them but one, so it is scored on other rows only: those of --data, or
    of the outer fold of a nested cross-validation.
    """
    from crosstune.deploy import average

    with only_results_on_stdout(), Interrupts().caught():
        made = average(run, out, trial=trial_number(trial), **how)
    say(made.words(), made.to_json(), as_json)


@click.command()
@click.argument("source", metavar="RUN|ADAPTER|MERGED")
@click.option("--out", metavar="FILE", help="Default: model.gguf or adapter.gguf in the folder.")
@click.option(
    "--type", "kind", type=click.Choice(["f32", "f16", "bf16", "q8_0"]), help="Default: f16 (an adapter: f32)."
)
@trial_option
@base_option
@json_flag
def gguf(source: str, out: str | None, kind: str | None, trial: str, base: str | None, as_json: bool) -> None:
    """Write a merged model or an adapter as one GGUF file.

    For llama.cpp and Ollama; Llama's architecture only.
    """
    from crosstune.deploy import chosen_fit

    with only_results_on_stdout(), Interrupts().caught():
        from crosstune.export.gguf import write_gguf

        file = write_gguf(chosen_fit(source, trial_number(trial)), out, kind=kind or "", base=base)
    say(file, {"file": str(file)}, as_json)


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="RUN|DIR|base...")
@click.option("--prompt", "prompts", multiple=True, help="A question (repeat for more).")
@click.option("--rows", metavar="FILE", help="Rows as in training; their last answer is what is asked for.")
@base_option
@click.option("--quantization", type=click.Choice(["none", "int8", "nf4"]), help="Default: as the adapter was trained.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0: the likeliest token."
)
@click.option("--top-p", type=click.FloatRange(min=0, min_open=True, max=1), default=1.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object an answer and line.")
def generate(
    sources: tuple[str, ...],
    prompts: tuple[str, ...],
    rows: str | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    as_json: bool,
    **how: Any,
) -> None:
    """Ask adapters, merged models and their base.

    The same questions, with the answers side by side.
    """
    if bool(prompts) == (rows is not None):
        raise click.UsageError("Give questions either with --prompt or with --rows.")
    with only_results_on_stdout():
        from crosstune.data.load import load_rows
        from crosstune.export.answer import generate
        from crosstune.recipe.sections import Data
        from crosstune.train.generate import Sampling

        asked = list(prompts) if rows is None else load_rows(rows, Data(path=rows))
        sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    streams = sys.stdout.isatty() and not as_json
    shown = show_json if as_json else show_end if streams else show_answer
    for answer in generate(sources, asked, sampling=sampling, on_text=Stream() if streams else None, **how):
        shown(answer)


class Stream:
    """Shows answers while they are made: a heading, then piece after piece."""

    def __init__(self) -> None:
        self.under = ("", -1)

    def __call__(self, source: str, question: int, piece: str) -> None:
        if (source, question) != self.under:
            self.under = source, question
            click.echo(f"[{question + 1}] {source}: ", nl=False)
        click.echo(piece, nl=False)


def show_end(answer: Answer) -> None:
    """The end of an answer that was streamed."""
    click.echo("" if answer.stopped else " …(cut off)")


def show_answer(answer: Answer) -> None:
    """A whole answer under its heading."""
    click.echo(f"[{answer.question + 1}] {answer.source}: {answer.text}" + ("" if answer.stopped else " …(cut off)"))


def show_json(answer: Answer) -> None:
    """An answer as one line."""
    facts = {"source": answer.source, "question": answer.question, "text": answer.text, "stopped": answer.stopped}
    click.echo(json.dumps({**facts, "seconds": answer.seconds}))
