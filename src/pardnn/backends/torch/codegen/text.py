"""Names and literals in generated code: text from a file becomes data there, never code.

A name of the graph becomes an identifier of ASCII letters, digits and underscores that no helper,
keyword or builtin has; a text becomes a literal by `repr`; in a comment, unprintable characters
become escapes, so that it ends with its line.
"""

from __future__ import annotations

import builtins
import keyword
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from pardnn.backends.torch.ops.codec import Reference
from pardnn.errors import FileError, printable

#: Stands for the device of the rank among decoded arguments, by identity.
RANK_DEVICE = torch.device("meta")
_LINE = 100
_INDENT = "    "
_LONGEST_NAME = 60
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9]+")


class Identifiers:
    """A variable for each name of a graph.

    Args:
        reserved: Names that the code uses for other things.
    """

    def __init__(self, reserved: Iterable[str]) -> None:
        self._taken = {*reserved, *keyword.kwlist, *keyword.softkwlist, *dir(builtins)}
        self._by_name: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        """Return the variable of a name: always the same, and different for each name."""
        if name not in self._by_name:
            self._by_name[name] = self.new(name)
        return self._by_name[name]

    def new(self, name: str) -> str:
        """Return a new variable, similar to a name."""
        plain = _NOT_IN_NAMES.sub("_", name).strip("_")[:_LONGEST_NAME] or "value"
        plain = plain if plain[0].isalpha() else f"t_{plain}"
        found, count = plain, 1
        while found in self._taken:
            count += 1
            found = f"{plain}_{count}"
        self._taken.add(found)
        return found


def tokens(value: Any, names: Identifiers) -> list[str]:
    """Return a decoded argument as Python, in parts between which a line may break.

    Args:
        value: A value from `ops.codec.decode`, or a tuple of such values.
        names: The names of the variables.

    Raises:
        FileError: E402, if it has no literal.
    """
    if isinstance(value, list | tuple):
        ends = "[]" if isinstance(value, list) else "()"
        inner = [token for item in value for token in tokens(item, names)]
        if not inner:
            return [ends]
        inner[0] = ends[0] + inner[0]
        inner[-1] += ",)" if ends == "()" and len(value) == 1 else ends[1]
        return inner
    return [_literal(value, names)]


def _literal(value: Any, names: Identifiers) -> str:
    if isinstance(value, Reference):
        return names[value]
    if value is RANK_DEVICE:
        return "device"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, complex):
        return f"complex({_literal(value.real, names)}, {_literal(value.imag, names)})"
    if value is None or type(value) in (bool, int, float, str):
        return repr(value)
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, torch.device):
        return f'torch.device("{value.type}")'
    raise FileError(f"arguments hold {value!r:.80}, which no code can say")


def filled(head: str, parts: Sequence[str], tail: str = ")") -> list[str]:
    """Return `head`, the parts with commas between them, and `tail`: on one line if they fit.

    Args:
        head: The beginning, such as "x = aten.mm.default(".
        parts: The arguments; a line may break after each.
        tail: What closes it.
    """
    line = head + ", ".join(parts) + tail
    if len(_INDENT + line) <= _LINE or not parts:
        return [line]
    lines, now = [head], _INDENT
    for part in parts:
        if now != _INDENT and len(_INDENT + now + part) + 2 > _LINE:
            lines.append(now.rstrip())
            now = _INDENT
        now += f"{part}, "
    return [*lines, now.rstrip(), tail]


def comment(text: str) -> str:
    """Return a text as a comment of one line."""
    return f"# {printable(text)}".rstrip()


def box_text(variable: str, box: Sequence[Sequence[int]], shape: Sequence[int]) -> str:
    """Return the view of a box of a tensor, as `partition_ops.box_view` makes it.

    Args:
        variable: The variable of the tensor.
        box: First and last index per dim, the last exclusive.
        shape: The shape of the tensor.
    """
    cuts = [
        ":" if low == 0 and high == size else f"{int(low)}:{int(high)}"
        for (low, high), size in zip(box, shape, strict=True)
    ]
    while cuts and cuts[-1] == ":":
        cuts.pop()
    return f"{variable}[{', '.join(cuts)}]" if cuts else variable
