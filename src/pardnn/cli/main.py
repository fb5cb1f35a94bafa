"""The command line: the app, and how it ends. Every command is a thin shell over `pardnn.api`.

With `--json`, stdout is exactly one JSON object, also on failure; the first digit of an error's
code is the exit status.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
import warnings
from types import FrameType
from typing import Any, NoReturn

import typer

from pardnn.cli import (
    checkpoint_commands,
    file_commands,
    plan_commands,
    question_commands,
    run_commands,
)
from pardnn.cli.option_groups import with_groups
from pardnn.cli.options import no_command
from pardnn.cli.output import echo, fail
from pardnn.cli.overwriting import Command
from pardnn.errors import INTERRUPTED, PardnnError, Terminated, UsageError, printable, told
from pardnn.shortage import shortage

app = typer.Typer(
    name="pardnn",
    help="Train a network that does not fit one device, without rewriting it.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    callback=no_command,
)


#: When an interrupt that was lost comes again, seconds.
_AGAIN_S = 0.05
_PLACED_WARNING = warnings.formatwarning

# In the order in which `pardnn --help` lists them.
for command in (
    plan_commands.capture,
    plan_commands.plan,
    plan_commands.check,
    plan_commands.simulate,
    plan_commands.compare,
    plan_commands.estimate,
    run_commands.run,
    plan_commands.max_batch,
    file_commands.layout,
    file_commands.draw,
    file_commands.report,
    file_commands.export,
    run_commands.code,
    run_commands.profile,
    question_commands.diff,
    file_commands.convert,
    run_commands.doctor,
    file_commands.schema,
):
    app.command(name=command.__name__.replace("_", "-"), cls=Command)(with_groups(command))
# A name may begin with a minus: `--memory -2GiB`.
app.command(name="explain", cls=Command, context_settings={"ignore_unknown_options": True})(
    question_commands.explain
)
app.add_typer(checkpoint_commands.app, name="checkpoint")


def _heed_interrupts() -> threading.Event:
    """Raise a kind of KeyboardInterrupt at SIGTERM too; the event tells of both.

    An import that is interrupted may raise something else. What is raised in a finalizer Python
    prints and forgets: the signal comes once more, a moment later.
    """
    seen = threading.Event()

    def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
        seen.set()
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    def lost(what: sys.UnraisableHookArgs) -> None:
        if not issubclass(what.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(what)
        else:
            again = signal.SIGTERM if issubclass(what.exc_type, Terminated) else signal.SIGINT
            threading.Timer(_AGAIN_S, os.kill, (os.getpid(), again)).start()

    sys.unraisablehook = lost
    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    return seen


def _warning_text(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> str:
    """Return a warning of ours as its text alone, without a file and a line of source."""
    if category.__module__.partition(".")[0] != "pardnn":
        return _PLACED_WARNING(message, category, *place, **more)
    return f"{printable(str(message), lines=True)}\n"


def _interrupted(as_json: bool) -> int:
    """Tell who reads JSON; return the exit status."""
    return fail(PardnnError("interrupted", code="E130"), as_json) if as_json else INTERRUPTED


def _broken(error: Exception, as_json: bool) -> int:
    """Tell of what the system lacks, or of an error that is ours; return the exit status."""
    if (short := shortage(error)) is not None:
        return fail(short, as_json)
    echo("".join(traceback.format_exception(error)), err=True, nl=False)
    message = f"internal error, a bug in pardnn: {told(error)}"
    return fail(PardnnError(message, code="E199"), as_json)


def _end_by_sigpipe() -> None:
    """End as other tools do whose reader has seen enough (`| head -1`): typer would give 1."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in arguments
    interrupts = _heed_interrupts()
    warnings.formatwarning = _warning_text
    try:
        status = app(args=arguments, standalone_mode=False)
        if status == INTERRUPTED:  # typer makes it of an interrupt
            status = _interrupted(as_json)
    except typer.Exit as error:
        status = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        status = _interrupted(as_json)
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):
            _end_by_sigpipe()
        raise
    except PardnnError as error:
        status = fail(error, as_json)
    except typer.TyperException as error:  # of the parser
        status = fail(UsageError(error.format_message(), code="E200"), as_json)
    except Exception as error:
        status = _interrupted(as_json) if interrupts.is_set() else _broken(error, as_json)
    sys.exit(status if isinstance(status, int) else 0)
