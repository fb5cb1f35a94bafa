"""Arguments by the names of the graph's own tensors, for the checkers of rewritten graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast


def with_original_names(data: Any, names: Mapping[str, str]) -> Any:
    """Return arguments with other names in them, tuples as lists.

    Args:
        data: Of an op of the rewritten graph.
        names: The graph's tensors by those that stand for them.
    """
    if isinstance(data, str):
        return names.get(data, data)
    if isinstance(data, list | tuple):
        return [with_original_names(item, names) for item in cast("Sequence[Any]", data)]
    if isinstance(data, dict):
        items = cast("dict[str, Any]", data).items()
        return {key: with_original_names(value, names) for key, value in items}
    return data
