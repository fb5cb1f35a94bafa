"""A function in normal form does what it did, and each condition decides over whole statements."""

import ast
import itertools
import random
import textwrap
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.backends.torch.capture.choices.branches import blocks_of, span
from pardnn.backends.torch.capture.choices.liveness import live_after
from pardnn.backends.torch.capture.choices.normal_form import (
    END,
    ENDS,
    ITEMS,
    RETURNED,
    SKIPS,
    NoNormalFormError,
    _leaves,
    bring_to_normal_form,
)
from pardnn.backends.torch.capture.source_location import LINES
from tests.strategies import examples

PROJECTION = """
def f(c, t):
    for i in range(2):
        a = t(i)
        if c[i]:
            a = a + t(10)
            return a, i
    return a, 7
"""
NORMAL_PROJECTION = f"""
def f(c, t):
    {RETURNED} = 0
    _pardnn_ended_0 = 0
    for _pardnn_item_0 in range(2):
        if isinstance(_pardnn_ended_0, int) and _pardnn_ended_0:
            break
        if not _pardnn_ended_0:
            i = _pardnn_item_0
            _pardnn_skips_0 = 0
            a = t(i)
            if c[i]:
                a = a + t(10)
                _pardnn_value, {RETURNED}, _pardnn_ended_0, _pardnn_skips_0 = ((a, i), 1, 1, 1)
    if not {RETURNED}:
        _pardnn_value, {RETURNED} = ((a, 7), 1)
    return _pardnn_value
"""
SKIPPING = """
def f(c, t):
    for i in range(2):
        if c[i]:
            a = t(i)
            continue
        t(3)
"""
NORMAL_SKIPPING = """
def f(c, t):
    for i in range(2):
        _pardnn_skips_0 = 0
        if c[i]:
            a = t(i)
            _pardnn_skips_0 = 1
        if not _pardnn_skips_0:
            t(3)
    return None
"""
TERNARY = """
def f(c, t):
    a = 1 + (t(1) if c[0] or c[1] else t(2))
    if a > 2:
        a += 1
"""
NORMAL_TERNARY = """
def f(c, t):
    if c[0] or c[1]:
        _pardnn_chosen_0 = t(1)
    else:
        _pardnn_chosen_0 = t(2)
    a = 1 + _pardnn_chosen_0
    if a > 2:
        a += 1
    return None
"""
EITHER = """
def f(c, t):
    if c[0] or not 0 < c[1] < t(0):
        return 1
    return 2
"""


def parsed(source: str) -> tuple[ast.Module, ast.FunctionDef]:
    tree = ast.parse(textwrap.dedent(source))
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    return tree, function


def asked_of(function: ast.FunctionDef, *, ternaries: bool = True) -> list[tuple[int, int]]:
    """Return the positions of all conditions, also within others."""
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.If | ast.IfExp if ternaries else ast.If):
            parts = [n for n in ast.walk(node.test) if isinstance(n, ast.Subscript)]
            found += [span(part)[0] for part in parts] or [span(node.test)[0]]
    return sorted(found)


class Unknown(ast.NodeTransformer):
    """Lets flags be what only a run knows: true, and no ints by which a loop could end."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        pair = node.targets[0], node.value
        names, values = (x.elts if isinstance(x, ast.Tuple) else [x] for x in pair)
        for i, (name, value) in enumerate(zip(names, values, strict=False)):
            is_flag = getattr(name, "id", "").startswith((RETURNED, ENDS, SKIPS))
            if is_flag and getattr(value, "value", 0) == 1:
                values[i] = ast.copy_location(ast.Name("UNKNOWN", ast.Load()), value)
        if not isinstance(pair[1], ast.Tuple):
            node.value = values[0]
        return node


def assert_is_decided(function: ast.FunctionDef) -> None:
    """Nothing leaves code that a flag decides over, but at its end."""
    for node in ast.walk(function):
        if isinstance(node, ast.If) and ast.unparse(node.test).startswith("not _pardnn_"):
            assert not any(map(_leaves, node.body)), ast.unparse(function)
    for block, i, _ in blocks_of(function):
        (begin, end), before = span(block[i]), span(block[i - 1])[1] if i else (0, 0)
        inside = [span(x) for x in ast.walk(block[i]) if isinstance(x, ast.stmt | ast.expr)]
        assert all(before < begin <= one and other[0] <= end[0] for one, other in inside)


def told_by(tree: ast.Module, conditions: tuple[bool, ...]) -> tuple[Any, list[Any]]:
    """Return what `f` returns, and its calls of `t` in order."""
    told: list[Any] = []
    names: dict[str, Any] = {"nullcontext": nullcontext, "UNKNOWN": object(), ITEMS: tuple}
    exec(compile(tree, "source", "exec"), names)
    return names["f"](conditions, lambda value: told.append(value) or value), told


def assert_same(source: str, size: int, asked: list[int], *, ternaries: bool = True) -> None:
    tree, function = parsed(source)
    changed, other = parsed(source)
    tests = asked_of(function, ternaries=ternaries)
    bring_to_normal_form(other, [END, *(tests[i % len(tests)] for i in asked if tests)])
    assert_is_decided(other)
    ast.fix_missing_locations(Unknown().visit(changed))
    for conditions in itertools.product((False, True), repeat=size):
        assert told_by(changed, conditions) == told_by(tree, conditions), ast.unparse(other)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [(PROJECTION, NORMAL_PROJECTION), (SKIPPING, NORMAL_SKIPPING), (TERNARY, NORMAL_TERNARY)],
)
def test_forms_written_by_hand(source: str, wanted: str) -> None:
    _, function = parsed(source)
    bring_to_normal_form(function, asked_of(function)[:1])
    assert ast.unparse(function).split() == ast.unparse(ast.parse(wanted)).split()


def test_each_statement_has_a_line_of_its_own_and_remembers_where_it_was() -> None:
    for source in (PROJECTION, TERNARY, EITHER):
        _, function = parsed(source)
        was = {ast.unparse(each): each.lineno for each in ast.walk(function) if _is_kept(each)}
        bring_to_normal_form(function, asked_of(function))
        statements = [block[i] for block, i, _ in blocks_of(function)]
        lines = [each.lineno for each in statements]
        assert len({*lines}) == len(lines)
        for each in statements:
            assert was.get(ast.unparse(each), each.lineno % LINES) == each.lineno % LINES
            inside = [x.lineno for x in ast.walk(each) if isinstance(x, ast.stmt)]
            assert all(each.lineno <= x <= (each.end_lineno or 0) for x in inside)


def _is_kept(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign | ast.AugAssign)


def test_a_condition_that_comes_out_alike_in_several_ways_is_decided_part_by_part() -> None:
    _, function = parsed(EITHER.replace("t(0)", "3").replace("c[1]", "a"))
    bring_to_normal_form(function, asked_of(function))
    conditions = [each.test for each in ast.walk(function) if isinstance(each, ast.If)]
    assert not any(isinstance(part, ast.BoolOp) for each in conditions for part in ast.walk(each))
    assert_same(EITHER.replace("t(0)", "3").replace("0 <", "-1 <"), 2, [0, 1])


@pytest.mark.parametrize("part", [1, 2])
def test_a_part_is_decided_where_no_other_part_was_asked(part: int) -> None:
    """Of `best is None or value < best`, data decides over the second alone."""
    for test in ("c[0] or c[1] or c[2]", "c[0] or c[1] and c[2]", "c[0] and (c[1] or c[2])"):
        assert_same(f"def f(c, t):\n    if {test}:\n        t(1)\n    t(2)", 3, [part])


REFUSED = [
    "while c[0]:\n        if c[1]:\n            return 1",
    "while c[0]:\n        if c[1]:\n            break\n        t(1)",
    "try:\n        if c[0]:\n            return 1\n    finally:\n        pass",
    "a = t(1) + (t(2) if c[0] else t(3))",
    "yield 1 if c[0] else 2",
    "for i in c:\n        if c[0]:\n            return 1\n    else:\n        return 2",
]


@pytest.mark.parametrize("body", REFUSED)
def test_what_has_no_normal_form(body: str) -> None:
    _, function = parsed(f"def f(c, t):\n    {body}\n    return 3\n")
    with pytest.raises(NoNormalFormError):
        bring_to_normal_form(function, asked_of(function))


NAMES = ("a", "b", "d")


def expression(draw: random.Random) -> str:
    name, i = draw.choice(NAMES), draw.randrange(3)
    kinds = [name, f"({name} + {i})", f"({i} if c[{i}] else {name})", f"t({name})"]
    return draw.choice([*kinds, f"({i} if c[{i}] else ({name} if c[0] else t(5)))"])


def statement(draw: random.Random, depth: int, *, in_loop: bool) -> list[str]:
    """Return the lines of a statement drawn by chance."""
    name, i, value = draw.choice(NAMES), draw.randrange(3), expression(draw)
    test = draw.choice([f"c[{i}]", f"not c[{i}]", f"c[{i}] or c[0]", f"{name} > 3"])
    leaving = ["continue", "break"] if in_loop else []
    simple = [f"{name} = {value}", f"{name} += {value}", f"t({name})"]
    kind = draw.choice(["simple", "if", "either", "with", "for", "leave"][: 1 if depth > 3 else 6])
    if kind in ("simple", "leave"):
        return [draw.choice(simple if kind == "simple" else [f"return {name}, {value}", *leaving])]
    items = draw.choice([f"range({i + 1})", "c"])
    first = {"with": "with nullcontext():", "for": f"for {name} in {items}:"}
    inner = inside(draw, depth + 1, in_loop=in_loop or kind == "for")
    found = [first.get(kind, f"if {test}:"), *inner]
    return (
        [*found, "else:", *inside(draw, depth + 1, in_loop=in_loop)] if kind == "either" else found
    )


def inside(draw: random.Random, depth: int = 0, *, in_loop: bool = False) -> list[str]:
    """Return the lines of a block drawn by chance."""
    drawn = (statement(draw, depth, in_loop=in_loop) for _ in range(draw.randint(1, 3)))
    return ["    " + line for lines in drawn for line in lines]


def program(lines: list[str]) -> str:
    return "\n".join(["def f(c, t):", "    a, b, d = 1, 2, 3", *lines])


@examples(100)
@given(st.integers(0, 2**32))
def test_random_functions_do_what_they_did(seed: int) -> None:
    draw = random.Random(seed)
    source = program(inside(draw))
    asked = [draw.randrange(20) for _ in range(draw.randint(1, 4))]
    try:
        assert_same(source, 3, asked, ternaries=draw.random() < 0.4)
    except NoNormalFormError:
        assert "t(" in source  # what comes before a ternary is told


@given(st.integers(0, 2**32))
def test_names_that_are_not_live_may_be_forgotten(seed: int) -> None:
    """Poison behind a statement, in every name that nobody reads, changes nothing."""
    source = program(inside(random.Random(seed)))
    tree, _ = parsed(source)
    other, function = parsed(source)
    found = [(block, i) for block, i, _ in blocks_of(function) if isinstance(block[i], ast.If)]
    for block, i in reversed(found):
        dead = sorted({*NAMES} - live_after(function, block[i]))
        block[i + 1 : i + 1] = [ast.parse(f"{name} = 'poison'").body[0] for name in dead]
    ast.fix_missing_locations(other)
    for conditions in itertools.product((False, True), repeat=3):
        assert told_by(other, conditions) == told_by(tree, conditions), ast.unparse(other)


LIVE = [
    ("if c: a = 1\n    a = 2\n    return a", set()),
    ("if c: a = 1\n    a += 2\n    return 0", {"a"}),
    ("if c: a = 1\n    return [a for a in t]", {"a", "t"}),
    ("for b in c:\n        b = a\n        if c: a = 1", {"a", "c"}),
    ("for b in c:\n        a = b\n        if c: a = 1", {"c"}),
    ("while t(b):\n        if c: a = 1\n        break", set()),
    ("while t(b):\n        if c: a = 1\n        continue", {"b", "t", "c"}),
    (
        """for b in c:
        t(a)
        if c: a = 1
        match b:
            case 1: continue
        a = 2""",
        {"a", "b", "c", "t"},
    ),
    ("g = lambda: a\n    if c: a = 1\n    a = 2", {"a"}),
    ("if c: a = 1\n    return locals()", {"a", "c", "locals"}),
    ("try:\n        if c: a = 1\n        a = 2\n    except ValueError: t(a)", {"a", "t", "c"}),
    ("with t(c):\n        if c: a = 1\n        a = 2\n    return a", {"a"}),
    ("if c: a = 1\n    with t(b) as a: return a", {"b", "t"}),
]


@pytest.mark.parametrize(("body", "wanted"), LIVE)
def test_live_names_by_hand(body: str, wanted: set[str]) -> None:
    source = f"def f(a, b, c, t):\n    {body}\n"
    _, function = parsed(source)
    statement = next(b[i] for b, i, _ in blocks_of(function) if isinstance(b[i], ast.If))
    found = live_after(function, statement)
    assert found - {"ValueError"} == wanted
