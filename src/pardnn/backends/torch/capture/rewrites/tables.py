"""Tables: lists and tuples of plain numbers that are indexed by a count, `schedule[it]`.

Problem: indexing is done in C, which needs the number itself. Without tables the count is guarded,
and a step that takes its rate from a list is captured again at every call.

Idea: if a count is used as an index, the step is traced once more with a table in place of each
list and tuple of numbers. Indexing it by a symbol gives a host scalar, a lookup among its numbers,
which are part of the graph. Tables that no symbol has indexed are replaced by the original lists.
The content of a list is guarded as usual; a condition says that the index is within it, so that a
call beyond its end runs the user's own code, which raises. A list that the step itself changes
contains symbols and is not a table.

Complexity: up to two more traces if a count is used as an index and there are such lists; in the
graph, their numbers for each lookup.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pardnn.backends.torch.capture.numbers.containers import OtherUse
from pardnn.backends.torch.ops.host_scalars import HostNode, node_of, symbol
from pardnn.backends.torch.user_step.held_numbers import NUMBERS, named_places, slots_of
from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.errors import UnsupportedError

#: A longer one would take more than a megabyte in a graph file.
_MAX_LENGTH = 1 << 16


class _Table:
    """What a table adds to the members of its list or tuple."""

    was_read = False

    def __getitem__(self, index: Any) -> Any:
        """Return an item; a symbol if the index is one."""
        node, get = node_of(index), super().__getitem__  # type: ignore[misc]
        if node is None or node.hint is None or node.kind is not int:
            return get(index)
        size = len(self)  # type: ignore[arg-type]
        if index >= size or index < -size:  # guards both
            return get(node.hint)
        self.was_read = True
        numbers = [get(i) for i in range(size)]
        kind = type(numbers[0])
        value = node.recorder.scalar_call("lookup", [numbers, node.operand], kind)
        hint = numbers[node.hint]
        return symbol(
            HostNode(node.recorder, value, kind, hint, function="lookup", parents=(node,))
        )


class _ListTable(_Table, list[Any]):
    """Stands for a list."""


class _TupleTable(_Table, tuple[Any, ...]):
    """Stands for a tuple."""


_TABLES: dict[type, Callable[[Any], Any]] = {list: _ListTable, tuple: _TupleTable}


def tables_of(objects: ObjectGraph) -> list[Any]:
    """Return the lists and tuples that a table can replace.

    Args:
        objects: The object graph of the step.
    """
    found = {id(value): value for _, _, value in named_places(objects) if _is_table(value)}
    return list(found.values())


def _is_table(value: Any) -> bool:
    """Whether it is a list or tuple of two or more numbers of one type."""
    if type(value) not in _TABLES or not 1 < len(value) <= _MAX_LENGTH:
        return False
    kind = type(value[0])
    return kind in NUMBERS and all(type(each) is kind for each in value)


@contextlib.contextmanager
def tables_inserted(objects: ObjectGraph, chosen: Sequence[Any]) -> Iterator[list[Any]]:
    """Put tables in place of lists and tuples while the context is open.

    Args:
        objects: The object graph of the step.
        chosen: The lists and tuples.

    Yields:
        A list that in the end has those that a symbol has indexed.

    Raises:
        UnsupportedError: A table is stored where no walk would find it.
    """
    read: list[Any] = []
    places = ((x, slots_of(objects.contents, x)) for x in chosen)
    made = [
        (value, _TABLES[type(value)](value), slots)
        for value, slots in places
        if _is_table(value) and not any(slot.path for slot in slots)
    ]
    behind = {id(table): value for value, table, _ in made}
    for _, table, slots in made:
        for slot in slots:
            slot.set(table)
    try:
        yield read
        read += [value for value, table, _ in made if table.was_read]
    except OtherUse as error:
        if not made:
            raise
        raise UnsupportedError("the step puts a table into what it fills") from error
    finally:
        for slot in (slot for _, _, slots in made for slot in slots):
            with contextlib.suppress(LookupError, AttributeError, ValueError):
                if id(now := slot.get()) in behind:  # not always the object that was put there
                    slot.set(behind[id(now)])
