"""The command line, run within the test."""

import json
import signal
from typing import Any

import pytest
from pydantic import TypeAdapter

from pardnn.api.schemas import _VALUES
from pardnn.cli import main

Run = Any


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line and returns (status, stdout, stderr)."""

    def go(*arguments: object) -> tuple[int, str, str]:
        handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
        # A job in the background of a shell ignores the interrupt.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(SystemExit) as end:
                main.main([str(argument) for argument in arguments])
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        out, err = capsys.readouterr()
        return int(str(end.value.code)), out, err

    return go


@pytest.fixture
def run_json(run: Run) -> Run:
    """Runs with --json and returns (status, the object), checked against its schema."""

    def go(command: str, *arguments: object) -> tuple[int, dict[str, Any]]:
        status, out, _ = run(*command.split(), *arguments, "--json")
        found = json.loads(out)
        kind = _VALUES["error" if "error" in found else command]
        TypeAdapter(kind).validate_json(out)
        return status, found

    return go
