"""Entry points whose own code ends the program: an error as any other, with a status of its own."""

from pathlib import Path

import pytest

import pardnn
from pardnn.backends.entry_point import load_factory
from pardnn.backends.torch.make_step import capture_factory
from pardnn.cli.output import fail
from pardnn.errors import UsageError, UserCodeError

EXITS = {
    "file": ("import sys\nsys.exit(3)\ndef training(): ...\n", r"__main__"),
    "function": ("import sys\ndef training():\n    sys.exit(3)\n", r"sys.exit\(3\)"),
    "step": (
        "import sys, torch\ndef training(): return lambda model: sys.exit(3), (torch.nn.ReLU(),)\n",
        "SystemExit: 3",
    ),
}


@pytest.mark.parametrize("where", EXITS)
def test_a_program_that_ends_itself_is_the_users_error(tmp_path: Path, where: str) -> None:
    text, said = EXITS[where]
    path = tmp_path / f"ends_in_{where}.py"
    path.write_text(text)
    with pytest.raises(UserCodeError, match=said) as caught:
        capture_factory(load_factory(f"{path}:training"))
    assert caught.value.exit_status == 1


def test_a_step_of_other_arguments_is_the_users_error(tmp_path: Path) -> None:
    path = tmp_path / "arity.py"
    path.write_text("import torch\ndef training(): return lambda x, y: x, (torch.nn.ReLU(),)\n")
    with pytest.raises(UserCodeError, match="missing 1 required"):
        capture_factory(load_factory(f"{path}:training"))


def test_a_function_that_needs_arguments_is_no_entry_point(tmp_path: Path) -> None:
    path = tmp_path / "needy.py"
    path.write_text("def training(size, batch_size=2, *rest, **more): ...\n")
    with pytest.raises(UsageError, match="needs size"):
        load_factory(f"{path}:training", batch_size=4)


def test_what_a_program_prints_is_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prints.py"
    path.write_text(
        "import torch\nprint('file')\ndef step(model, x):\n    print('step')\n"
        "    loss = model(x).sum()\n    loss.backward()\n"
        "    torch.optim.SGD(model.parameters(), 1.0).step()\n    return loss\n"
        "def training():\n    print('function')\n"
        "    return step, (torch.nn.Linear(2, 1), torch.ones(2, 2))\n"
    )
    capture_factory(load_factory(f"{path}:training"))
    out, err = capsys.readouterr()
    assert out == ""
    assert {"file", "function"} <= set(err.split())
    assert "step" not in err.split()  # what a step prints, ranks print after each step


def test_a_file_that_does_not_load_says_why(tmp_path: Path) -> None:
    path = tmp_path / "broken_file.py"
    path.write_text("def training(:\n")
    with pytest.raises(UserCodeError, match="SyntaxError"):
        load_factory(f"{path}:training")


RAISES = {
    "a KeyError": 'return {}["none"]',
    "an error without a text": "raise Silent",
    "no Exception": "raise Odd",
}


@pytest.mark.parametrize("what", RAISES)
def test_the_traceback_is_the_users_alone(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not that of two attempts to build the model, nor the frames that lead there."""
    path = tmp_path / "raises.py"
    path.write_text(
        "class Silent(Exception):\n    def __str__(self): raise ValueError\n"
        f"class Odd(BaseException): pass\ndef training():\n    {RAISES[what]}\n"
    )
    with pytest.raises(UserCodeError) as caught:
        capture_factory(load_factory(f"{path}:training"))
    assert fail(caught.value, as_json=False) == 1
    lines = capsys.readouterr().err.splitlines()
    begin = lines.index("Traceback (most recent call last):")
    assert lines[begin + 1] == f'  File "{path}", line 5, in training'
    assert "Traceback (most recent call last):" not in lines[begin + 1 :]


def test_a_wrong_shape_shows_no_frame_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "wrong_shape.py"
    path.write_text(
        "import torch\ndef step(model):\n    return model(torch.ones(2, 3)).sum()\n"
        "def training(): return step, (torch.nn.Sequential(torch.nn.Linear(4, 4)),)\n"
    )
    with pytest.raises(UserCodeError) as caught:
        capture_factory(load_factory(f"{path}:training"))
    fail(caught.value, as_json=False)
    text = capsys.readouterr().err
    assert f'"{path}", line 3, in step' in text
    assert "nn/modules/linear.py" in text
    # Of the package: the repository, which may hold the interpreter, can have the same name.
    assert str(Path(pardnn.__file__).parent) not in text
    assert not caplog.records


def test_the_traceback_of_a_step_begins_in_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "raises_in_step.py"
    path.write_text("import torch\ndef training(): return lambda m: 1 / 0, (torch.nn.ReLU(),)\n")
    with pytest.raises(UserCodeError) as caught:
        capture_factory(load_factory(f"{path}:training"))
    fail(caught.value, as_json=False)
    text = capsys.readouterr().err
    assert text.partition("last):\n")[2].startswith(f'  File "{path}", line 2, in <lambda>')
