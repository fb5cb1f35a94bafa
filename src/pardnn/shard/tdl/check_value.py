"""Rules for the description of one output, independent of sizes.

Problem: two mistakes look right but cut wrongly. An index that shadows another one takes over its
loop; and an addend that only the first worker adds is lost, or counted twice, if partial results
are combined by anything but a sum: `max(a, b) + c` is not `max(a + c, b)`.
Complexity: O(size of the description).
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from pardnn.errors import shown
from pardnn.shard.tdl.interval import DescriptionError
from pardnn.shard.tdl.language import Apply, At, Node, Once, Reduction


def check_value(value: object, bound: Set[str]) -> None:
    """Check the value of an output.

    Args:
        value: Of a lambda, or of a part of one.
        bound: Variables that it may use.

    Raises:
        DescriptionError: E220, if an index shadows another, or a `Once` is not beside a sum.
    """
    if isinstance(value, Reduction):
        taken = sorted(bound & set(value.names))
        if taken:
            raise DescriptionError(
                f"the index {shown(taken[0])} of a reduction is one of the result already; give it "
                "another name"
            )
        check_value(value.body, bound | set(value.names))
    elif isinstance(value, At | Once):
        check_value(value.value, bound)
    elif isinstance(value, Apply):
        _check_addends(value)
        for operand in value.operands:
            check_value(operand, bound)


def _check_addends(value: Apply) -> None:
    """Check that what is added once stands beside a sum: others are combined otherwise."""
    if not any(isinstance(operand, Once) for operand in value.operands):
        return
    reducers = sorted({name for operand in value.operands for name in _reducers(operand)})
    wrong = [name for name in reducers if name != "sum"]
    if reducers and (wrong or value.name not in ("add", "sub")):
        beside = wrong[0] if wrong else f"'{value.name}'"
        raise DescriptionError(
            f"Once is used with {beside}, but only to a sum something can be added once: leave it "
            "out (the loop is then not cut)"
        )


def _reducers(node: Node) -> Iterator[str]:
    """Yield the names of the outermost reductions."""
    if isinstance(node, Reduction):
        yield node.reducer.name
    elif isinstance(node, Apply):
        for operand in node.operands:
            yield from _reducers(operand)
    elif isinstance(node, At) and isinstance(node.value, Node):
        yield from _reducers(node.value)
