"""The code of a rank: its list of actions, one after another, as a Python function.

    step(state, batch, device, at_draw) -> loss, kept

`state` holds what outlives the step, by name, and is changed in place. Values are variables, frees
are `del`, messages are calls of torch.distributed. So it is the program that `runtime.executor`
runs, line by line instead of closure by closure, with the same bits, and a debugger can stop in it.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FunctionType

from pardnn.backends.torch.codegen import helpers
from pardnn.backends.torch.codegen.calls import CallWriter
from pardnn.backends.torch.codegen.text import Identifiers, comment, filled
from pardnn.backends.torch.comm.wire_format import (
    HOST_TYPES,
    MessageSpec,
    byte_view,
    has_strides,
    laid_out,
    misaligned_buffer,
    sendable,
    span_elements,
)
from pardnn.backends.torch.devices import elements_of, strides_of
from pardnn.backends.torch.ops.codec import flatten_result
from pardnn.backends.torch.ops.kernel_memory import compact
from pardnn.backends.torch.ops.memory_formats import in_format, in_format_of
from pardnn.backends.torch.ops.partition_ops import box_copy, box_view, copy_with_strides
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.runtime.random_ops import drawn_once, is_random, random_ops
from pardnn.graph.ir import Graph, Op, contiguous_strides
from pardnn.plan.actions import Action, Allocate, Compute, Free, Receive, Send
from pardnn.plan.plan import Plan
from pardnn.plan.state_layout import shard_of

_HELPERS: dict[str, FunctionType] = {
    function.__name__: function
    for function in (
        contiguous_strides, elements_of, byte_view, has_strides, laid_out, span_elements,
        misaligned_buffer, sendable, box_view, box_copy, copy_with_strides, compact,
        in_format, in_format_of, flatten_result, helpers.send, helpers.receive, helpers.wait,
        helpers.copy_unless_there,
    )
}  # fmt: skip
_IMPORTED = (
    "Any", "Callable", "Sequence", "annotations", "aten", "dist", "math", "operator", "torch",
)  # fmt: skip
_OWN = ("at_draw", "batch", "device", "kept", "loss", "pending", "state", "step", "_")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Prefix of the line that tells edited code from another plan's.
CODE_ORIGIN = "# SHA-256 of the step as it was written: "
_PENDING = """\
#: Messages on their way, each with what must live until it has arrived or left.
pending: dict[int, tuple[Any, torch.Tensor]] = {}
"""
#: Larger files are not a user's step.
_SOURCE_BYTES = 4 << 20

_HEAD = '''\
"""What one rank runs in a training step, call by call: written by `pardnn code`.

`step` computes what the plan gives this rank, in its order; comments are the lines of the captured
step. Other ranks run programs of their own at the same time.
"""

from __future__ import annotations

'''
_STEP = '''\
@torch.no_grad()
def step(
    state: dict[str, Any],
    batch: dict[str, Any],
    device: torch.device,
    at_draw: Callable[[str], None] = lambda op: None,
) -> tuple[Any, dict[str, Any]]:
    """Run one step.

    Args:
        state: Parameters, buffers, optimizer states and constants of this rank; changed in place.
        batch: The batch and the numbers that the step is given.
        device: Of this rank.
        at_draw: Called before an op that draws random numbers, with its name: puts the generator
            to where one device would have it.

    Returns:
        The loss, where this rank has it, and what else of this rank's the step returns.
    """
'''


class _Writer:
    """The code of one rank of a program."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program = program
        self.rank = rank
        self.names = Identifiers([*_HELPERS, *_IMPORTED, *_OWN])
        self.calls = CallWriter(self.names, program.tensors)
        self.whole = {op.name: op for op in random_ops(program.whole)}
        self._sources: dict[str, list[str]] = {}
        self._arriving: dict[int, str] = {}
        self._place = ""

    def body(self) -> Iterator[str]:
        """Yield the lines of the step."""
        yield "loss = None"
        for action in self.program.lowered.ranks[self.rank]:
            if isinstance(action, Compute):
                op = self.program.ops[action.op]
                yield from self._user_lines(op)
                yield from self._computed(op)
            elif isinstance(action, Free):
                names = [self.names[name] for name in action.tensors]
                yield from [f"del {names[0]}"] if len(names) == 1 else filled("del (", names)
            else:
                yield from self._message(action)
        yield from filled("kept = {", self._kept(), "}")
        yield "return loss, kept"

    def _kept(self) -> list[str]:
        shards = [each for found in self.program.kept.values() for each in found]
        here = sorted({each.tensor for each in shards if each.device == self.rank})
        return [f"{name!r}: {self.names[name]}" for name in here]

    def _user_lines(self, op: Op) -> Iterator[str]:
        """Yield a comment wherever the ops of another of the user's lines begin."""
        if op.source is None or op.is_source:
            return
        of = f"backward of {op.module}" if op.backward_of is not None else op.module
        place = f"{of}, {op.source}" if of else op.source
        if place != self._place:
            self._place = place
            yield ""
            yield comment(place)
            line = self._source_line(op.source)
            if line:
                yield comment(f"    {line}")

    def _source_line(self, source: str) -> str:
        """Return the user's line; empty unless it is in an existing Python file."""
        path, _, number = source.rpartition(":")
        if path not in self._sources:
            self._sources[path] = _lines_of(path)
        lines = self._sources[path]
        is_there = re.fullmatch(r"[1-9][0-9]{0,6}", number) and int(number) <= len(lines)
        return lines[int(number) - 1].strip() if is_there else ""

    def _computed(self, op: Op) -> Iterator[str]:
        if op.kind == "input":
            yield f"{self.names[op.outputs[0].name]} = {self._read(op)}"
        elif op.is_source:
            name = op.outputs[0].name
            yield f"{self.names[name]} = state[{name!r}]"
        elif op is self.program.loss:
            yield from self._loss(op)
        else:
            if is_random(op):
                yield f"at_draw({drawn_once(op, self.whole)!r})"
            yield from self.calls.lines(op)

    def _loss(self, op: Op) -> Iterator[str]:
        for name in op.inputs[:1]:
            is_number = (self.program.tensors[name].dtype or "") in HOST_TYPES
            # Its storage may be freed or changed before the step ends.
            yield f"loss = {self.names[name]}{'' if is_number else '.clone()'}"

    def _read(self, op: Op) -> str:
        """Return how an input is read, as `Executor._reading` does."""
        (output,) = op.outputs
        of, box = shard_of(op, self.program.sources)
        value = f"batch[{of!r}]"
        if (output.dtype or "").startswith("host."):
            return value
        if box is not None:
            strides = None if output.strides is None else tuple(output.strides)
            box = tuple((int(low), int(high)) for low, high in box)
            return f"box_copy({value}, {box}, {strides}).to(device)"
        if op.name in self.program.written:
            return f"{value}.to(device)"
        return f"laid_out({value}.to(device), {tuple(strides_of(output))})"

    # Messages.

    def _message(self, action: Action) -> Iterator[str]:
        assert not isinstance(action, Compute | Free)
        spec = self.program.specs[action.message]
        if isinstance(action, Allocate):
            yield from self._buffer(spec)
        elif spec.bytes == 0:
            return  # an empty tensor is not sent: both ends know it
        elif isinstance(action, Send):
            value = self.names[spec.tensor]
            if spec.is_scalar:
                value = f"torch.tensor({value}, dtype={spec.torch_dtype}, device=device)"
            elif not self.program.plan.keeps_bits:
                value = f"laid_out({value}, {spec.strides})"
            parts = [str(spec.number), value, f"to={spec.target}", f"strides={spec.strides}"]
            yield from filled("send(", [*parts, *_ahead(spec)])
        elif isinstance(action, Receive):
            place = self._place_of(spec)
            parts = [str(spec.number), place, f"source={spec.source}", *_ahead(spec)]
            yield from filled("receive(", parts)
        else:
            yield f"wait({spec.number})"
            if spec.is_scalar and spec.target == self.rank:
                kind = HOST_TYPES[spec.dtype][1].__name__
                place, name = self._place_of(spec), self.names[spec.tensor]
                yield f"{name} = {kind}({place}.item())"
                yield f"del {place}"

    def _place_of(self, spec: MessageSpec) -> str:
        """Return the variable in which a message arrives: for a number, a tensor's."""
        if not spec.is_scalar:
            return self.names[spec.tensor]
        if spec.number not in self._arriving:
            self._arriving[spec.number] = self.names.new(f"{spec.tensor}_arriving")
        return self._arriving[spec.number]

    def _buffer(self, spec: MessageSpec) -> Iterator[str]:
        into = self.program.lowered.messages[spec.number].into
        place = self._place_of(spec)
        if into is not None:
            _, shards = (self.program.ops[spec.consumer].arguments or {})["args"]
            box = next(box for each, box in shards if each["tensor"] == spec.tensor)
            yield f"{place} = {self.calls.box(into, box)}"
            return
        if spec.misaligned_bytes:
            layout = [str(spec.shape), str(spec.strides), str(spec.torch_dtype), "device"]
            yield from filled(f"{place} = misaligned_buffer(", [*layout, *_ahead(spec)])
            return
        yield from self.calls.empty(place, spec.shape, spec.strides, spec.torch_dtype)


def _ahead(spec: MessageSpec) -> list[str]:
    return [f"ahead={spec.misaligned_bytes}"] if spec.misaligned_bytes else []


def _lines_of(path: str) -> list[str]:
    """Return the lines of a Python file, including a library's; none if it cannot be read."""
    if not path.endswith(".py"):
        return []
    for base in ("", *sys.path):
        try:
            found = Path(base, path)
            if found.is_file() and found.stat().st_size <= _SOURCE_BYTES:
                return found.read_text(encoding="utf-8", errors="replace").splitlines()
        except (OSError, ValueError):
            return []
    return []


def plan_code(graph: Graph, plan: Plan, ranks: Sequence[int] | None = None) -> dict[int, str]:
    """Return the code of ranks: for each, a module with the function `step`.

    Args:
        graph: The graph that the plan is for.
        plan: A plan that is valid for it.
        ranks: The ranks; None for all.

    Raises:
        FileError: E402 or E407, if an op's arguments are invalid.
        UnsupportedError: E801, if an op is not registered in this process.
    """
    program = Program(graph, plan)
    return {rank: rank_code(program, rank) for rank in ranks or range(plan.num_devices)}


def rank_code(program: Program, rank: int) -> str:
    """Return the code of one rank, as `plan_code` does.

    Args:
        program: A proven plan, lowered.
        rank: The rank of the device.
    """
    lines = [f"    {line}".rstrip() for line in _Writer(program, rank).body()]
    body = "\n".join(lines) + "\n"
    # Comments quote the user's lines from files that exist here.
    own = "\n".join(line for line in lines if line.strip()[:1] != "#")
    words = set(_WORD.findall(own))
    used = _with_what_they_call(words)
    told = comment(f"Rank {rank} of {program.plan.num_devices}, {program.graph.name!r}")
    origin = f"{CODE_ORIGIN}{hashlib.sha256(own.encode()).hexdigest()}"
    parts = [_HEAD, _imports(words, used), f"{told}\n{origin}\n", "aten = torch.ops.aten\n"]
    if "wait" in used:
        parts.append(_PENDING)
    parts += [f"\n\n{inspect.getsource(_HELPERS[name])}" for name in used]
    return "".join(parts) + "\n\n" + _STEP + body


def _with_what_they_call(words: set[str]) -> list[str]:
    """Return the helpers among some words, and all that these call, in order."""
    found = words & _HELPERS.keys()
    while True:
        called = {name for each in found for name in _HELPERS[each].__code__.co_names}
        more = found | (called & _HELPERS.keys())
        if more == found:
            return [name for name in _HELPERS if name in found]
        found = more


def _imports(words: set[str], used: list[str]) -> str:
    modules = [f"import {name}\n" for name in ("math", "operator", "numpy") if name in words]
    abstract = "Callable, Sequence" if used else "Callable"
    lines = [*modules, f"from collections.abc import {abstract}\n", "from typing import Any\n\n"]
    lines.append("import torch\n")
    if "wait" in used:
        lines.append("import torch.distributed as dist\n")
    return "".join(lines) + "\n"
