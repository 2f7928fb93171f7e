"""`crosstune`: the verbs of `crosstune.verbs` under one name, and how errors are shown. No logic.

`crosstune --help` answers at once and never loads torch: the verbs import what they need when they are called.
stdout is for results (with --json: one object, as its last line); progress and errors go to stderr.
Exit codes: 0 done, 2 refused, 3 at least one lane failed, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import click

from crosstune import __version__
from crosstune.errors import EXIT_REFUSED, CrosstuneError, Refused
from crosstune.interrupt import Interrupted
from crosstune.store.secrets import redact
from crosstune.verbs import deploy, look, train

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count


class InOrder(click.Group):
    """Verbs in the order in which one meets them, not by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=InOrder, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="crosstune")
def crosstune() -> None:
    """Cross-validated LoRA fine-tuning: the base loaded once, every fold an adapter, all folds trained together."""


for verb in (
    train.demo, look.init, look.lint, look.plan, train.run, look.compare, look.report,
    train.fit, deploy.merge, deploy.average, deploy.gguf, deploy.generate, look.doctor,
):  # fmt: skip
    crosstune.add_command(verb)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A user's mistake is shown as problem and fix, never as a traceback."""
    # bitsandbytes 0.50 advises a kernel for its own 4-bit products whenever PEFT imports it, whatever the base is.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        code = crosstune.main(args=arguments, prog_name="crosstune", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return EXIT_REFUSED
    except CrosstuneError as error:
        begins = "" if isinstance(error, Refused) else "error: "  # findings say themselves what they are
        click.echo(redact(f"{begins}{error}"), err=True)
        return error.exit_code
    except click.Abort as error:  # click's word for KeyboardInterrupt
        click.echo("interrupted; the same command goes on from here", err=True)
        return error.__cause__.exit_code if isinstance(error.__cause__, Interrupted) else EXIT_INTERRUPTED
    return int(code or 0)
