"""The error for Python state that a step changes and that cannot be followed: E804."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pardnn.backends.torch.capture.numbers.texts import marks_in
from pardnn.backends.torch.capture.refusals.unsupported import at, error_at, text_of_a_number
from pardnn.backends.torch.capture.source_location import Locator
from pardnn.errors import PardnnError, UnsupportedError, UserCodeError, printable, shown
from pardnn.graph.ir import is_in_group

#: A key of this many digits is the address of an object.
_ADDRESS = re.compile(r"\.\d{12,}")
#: What to do instead of putting a new object in the place of one, by the type of that one.
_ADVICE = {
    list: "Set the items instead: self.hidden[0], self.hidden[1] = h.detach(), c.detach().\n"
    "Or keep a tuple, also before the first step: self.hidden = h.detach(), c.detach().",
    dict: 'Set the items instead: self.hidden["h"] = h.detach().',
}
_OTHER = (
    "Change the object instead of replacing it: self.stats.loss = loss.item() with a float\n"
    "there before the first step, self.stage += 1, self.hidden = h.detach()."
)


def changed_state(names: Sequence[str], where: str | None = None) -> UnsupportedError:
    """Return E804: Python state that differs after the step."""
    names, given = [_ADDRESS.sub("[an id]", name) for name in names], names
    first = names[0]
    more = f" (and {len(names) - 1} more: {', '.join(names[1:4])})" if len(names) > 1 else ""
    advice = "Move it out of the step: collect and compare what it returns, after it has returned."
    if names != given:  # as in Magma
        advice = (
            "A key that is the id of a tensor is another one in each run. What an optimizer keeps\n"
            "for a parameter is followed in its own state: self.state[p][name] = tensor."
        )
    elif is_in_group(first):  # as in D-Adaptation
        advice = "What an optimizer makes at its first step is there after one step of your own."
        if first.endswith(".params"):
            advice = (
                "Take parameters out of a group between two calls, and freeze them:\n"
                'p.requires_grad_(False), and group["params"] = group["params"][:2].'
            )
    elif ".state." in first:
        advice = (
            "What an optimizer makes at its first step is followed once it is there: run one step\n"
            "of your own before capturing. Otherwise, move it out of the step: collect and\n"
            "compare what it returns, after it has returned."
        )
    return error_at(
        where,
        f"the step changes Python state{at(where)}: {first}{more}. The change would happen once,\n"
        "at capture, and never again. pardnn follows numbers that the step changes by arithmetic,\n"
        "lists and dictionaries that it fills but does not read, and what it assigns: numbers,\n"
        "strings, tensors, containers, objects of classes that it names.\n" + advice,
        "E804",
        changed=list(names),
    )


def bound_name(names: Sequence[str], where: str | None) -> UnsupportedError:
    """Return E804: a step binds names in modules that its objects do not reach.

    Args:
        names: The names with their modules.
        where: "file.py:line" of the user's code; None if unknown.
    """
    more = f" (and {len(names) - 1} more: {', '.join(names[1:4])})" if len(names) > 1 else ""
    key = names[0].rpartition(".")[2]
    return error_at(
        where,
        f"the step changes Python state{at(where)}: {names[0]}{more}, which would happen\n"
        "once, at capture, and never again. Of names in modules, pardnn follows the globals of\n"
        "the step's own module that are there before the first step.\n"
        f"Put {key} = None there (a counter: 0), and `global {key}` into the step; or keep it\n"
        f"in an attribute of an object that was made before the step: state.{key} = ...",
        "E804",
        changed=list(names),
    )


def changed_class(kind: str, key: str, where: str | None) -> UnsupportedError:
    """Return E804: a step that changes an attribute of a class at each call."""
    return error_at(
        where,
        f"the step changes {key!r} of the class {kind!r}{at(where)}, which all its objects share.\n"
        "Of a class, numbers, flags and texts are followed that it has before the first step, and\n"
        "lists and dictionaries that the step only fills: append, extend, history[name] = x. Keep\n"
        "anything else in an object that was made before the step, meter = Meter(), as\n"
        f"meter.{key}.",
        "E804",
        changed=[f"{kind}.{key}"],
    )


def changed_module(module: str, key: str, where: str | None) -> UnsupportedError:
    """Return E804: a step that changes a container of a module that its own code only names."""
    return error_at(
        where,
        f"the step changes what {key!r} of the module {module!r} holds{at(where)},\n"
        "and does more with it than fill it (append, extend, log[name] = x).\n"
        f"Import it by name, from {module} import {key}: then it is followed like one of your own.",
        "E804",
        changed=[f"{module}.{key}"],
    )


def counting_hook(name: str) -> UnsupportedError:
    """Return E804: a hook that records in which backward pass it ran.

    Args:
        name: The name of a tensor that has it.
    """
    return UnsupportedError(
        f'{shown(name)} has a hook of register_multi_grad_hook(mode="any"), which records the\n'
        "backward pass it ran in: set before the step, it would record the one of capture.\n"
        "Register it within the step, where it is followed, or use tensor.register_hook.",
        code="E804",
        details={"tensor": name},
    )


def changed_setting(name: str, where: str | None) -> UnsupportedError:
    """Return E804: a step that sets several numbers of an optimizer's group at once.

    Args:
        name: The name of the setting, a tuple.
        where: "file.py:line" of the user's code that may do it; None if unknown.
    """
    return error_at(
        where,
        f"the step sets {shown(name)}{at(where)}, several numbers in one tuple.\n"
        'In an optimizer group, a step may set only single numbers: group["lr"] = rate.\n'
        "Set a tuple between two calls of the step; each call reads it:\n"
        'group["betas"] = (0.5, 0.9), and then step(...).',
        "E804",
        changed=[name],
    )


def removed_state(name: str) -> UnsupportedError:
    """Return E804: a step that leaves an optimizer without state that was there before.

    Args:
        name: The name of the state.
    """
    return UnsupportedError(
        f"the step removes {shown(name)} and makes no new one: each rank keeps the state that the\n"
        "captured steps use, and the next call would find it.\n"
        "Remove it between two calls (optimizer.state.clear() after the step has returned), or\n"
        "before optimizer.step() of the same step, which makes it again.",
        code="E804",
        details={"changed": [name]},
    )


def outside_look(deed: str, path: str | None, where: str | None) -> UnsupportedError:
    """Return E804: a step that reads, writes or looks for a file, or asks another process.

    Args:
        deed: What it does, if not with a file or folder: "opens a connection".
        path: The path of the file or folder; None for anything else.
        where: "file.py:line" of the user's code; None if unknown.
    """
    if path is None:
        return error_at(
            where,
            f"the step {deed}{at(where)}: this would happen at\n"
            "capture only, and its result would be frozen in the graph.\n"
            "Do it between two calls, and pass the result as an argument.",
            "E804",
        )
    return error_at(
        where,
        f"the step accesses the file or folder {shown(path)}{at(where)}: what it finds would be\n"
        "frozen in the graph, and what it writes would be written at capture only.\n"
        "Read it before the step, and pass the content as an argument; write between two calls.",
        "E804",
        path=path,
    )


def number_without_name(name: str, key: object) -> UnsupportedError:
    """Return E804: a number that the first step creates under a key that is not text.

    Args:
        name: The name of its place.
        key: The key under which it lies.
    """
    return error_at(
        None,
        f"the first step puts a number in {name!r}, under the key {shown(str(key))}, which is\n"
        "not a string. What the first step creates is found by its name on every rank.\n"
        "Put the number there before the first step (counts[4] = 0), or use str(key).",
        "E804",
        changed=[name],
    )


def read_again(name: str, where: str | None, then: object) -> UnsupportedError:
    """Return E804: a step leaves a fresh object that the next one reads.

    Args:
        name: The name of the place.
        where: "file.py:line" that leaves it; None if unknown.
        then: What was there before.
    """
    if isinstance(then, bool):
        return error_at(
            where,
            f"the step sets the flag {name!r}{at(where)} where data decides, or keeps what the\n"
            "step before left there. Numbers are followed so, flags are not.\n"
            "Make it a number: self.stopped = 0 before the first step, self.stopped = 1 there.",
            "E804",
            changed=[name],
        )
    return error_at(
        where,
        f"the step puts a new object in {name!r}{at(where)} and depends on the one that the\n"
        "previous step left there. From step to step, only numbers and tensors in attributes,\n"
        f"items and variables of their own are followed.\n{_ADVICE.get(type(then), _OTHER)}",
        "E804",
        changed=[name],
    )


def unreached_write(shape: Sequence[int], where: str | None) -> UnsupportedError:
    """Return E804: a step that writes to a tensor where no placeholder can be put.

    Args:
        shape: The shape of the tensor.
        where: "file.py:line" of the user's code; None if unknown.
    """
    return error_at(
        where,
        f"the step writes to a tensor of shape {list(shape)}{at(where)} that it\n"
        "reaches in a place where capture cannot replace it (an attribute of a class, a set,\n"
        "a bound method such as f = t.mul): the write would be lost.\n"
        "Keep it in an attribute of an object, a list or a dictionary: state.total.add_(loss).",
        "E804",
    )


def context_variable(name: str) -> UnsupportedError:
    """Return E804: a step that leaves another value in a context variable.

    Args:
        name: The name of the variable.
    """
    return UnsupportedError(
        f"the step sets the context variable {shown(name)} and does not reset it. Its value is\n"
        "in the thread that captures, and no other rank would get it.\n"
        "Keep the value in an attribute of an object that the step reaches (state.scale = 2.0 for\n"
        "scale.set(2.0)): there it is followed. If only the step needs the value, reset it in "
        "the step:\n"
        "token = scale.set(2.0), and scale.reset(token) in a `finally`.",
        code="E804",
        details={"changed": [name]},
    )


def hashed_number(where: str | None) -> UnsupportedError:
    """Return E804: a number that steps change becomes a key.

    Args:
        where: "file.py:line" of the user's code; None if unknown.
    """
    return error_at(
        where,
        f"a number that changes from step to step becomes a key{at(where)}: of a dictionary,\n"
        "of a set, or of the cache of a function (functools.cache).\n"
        "Lookups are followed: key in d, d[key], d.get(key). Otherwise compute what depends on it\n"
        "before the step, and pass it as an argument.",
        "E804",
    )


def raises_again(error: UserCodeError, locator: Locator | None) -> PardnnError:
    """Return E804: a step that raises when it is run again from the same state.

    Args:
        error: The error of a trace after the first, with the user's exception as its cause.
        locator: The locator of the first trace; None if that trace failed.

    Returns:
        The error itself if it is not about a second run.
    """
    raised = error.__cause__
    if locator is None or raised is None:
        return error
    where = locator.line_of(raised)
    if any(marks_in(str(each)) for each in (raised, *raised.args)):  # a missing key
        return text_of_a_number(where)
    said = printable(str(raised)).replace("FakeTensor", "Tensor")
    said = said.replace("SymFloat", "float").replace("SymInt", "int")
    return error_at(
        where,
        "the step runs once, but raises when capture runs it again from the same state.\n"
        f"{type(raised).__name__}{at(where)}: {said:.300}\n"
        "Either later calls read what only the first one makes from its data: run one step of\n"
        "your own first. Or the step changes what cannot be undone, such as the groups of an\n"
        "optimizer: do that between two calls, for instance optimizer.add_param_group(...).",
        "E804",
    )
