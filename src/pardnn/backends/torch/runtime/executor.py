"""The executor: one rank's action list, run by a plain loop.

Everything that can be resolved ahead of time is: an op becomes a closure over its call, a message
over its buffer and peer. A step is then `for call in calls: call(env)`, where `env` holds each live
value by name. Values are freed where the plan frees them, in-place calls change what they alias,
and nothing is copied that is not sent. At a message's `post_before` its buffer is allocated and its
irecv posted; at its `hold_until` the rank waits for its isend.

Overhead beside the ops: about 2 us per action.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from pardnn.backends.torch.arena import Layout
from pardnn.backends.torch.comm.wire_format import laid_out, spec_text
from pardnn.backends.torch.comm.world import World
from pardnn.backends.torch.devices import plain, strides_of
from pardnn.backends.torch.ops.codec import bind, constant_value
from pardnn.backends.torch.ops.partition_ops import box_copy, receive_view
from pardnn.backends.torch.profile.recorder import Recorder
from pardnn.backends.torch.rng.generator import Draws
from pardnn.backends.torch.runtime.agreement import Agreement
from pardnn.backends.torch.runtime.failures import action_text, out_of_memory, recent_actions
from pardnn.backends.torch.runtime.input_checks import check_resident, other_batch, shape_and_dtype
from pardnn.backends.torch.runtime.memory.fixed_places import placed, placed_arrival
from pardnn.backends.torch.runtime.memory.limits import HeapGuard, KernelCode, is_out_of_memory
from pardnn.backends.torch.runtime.memory.meter import MemoryMeter, freeing, live_bytes
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.runtime.random_ops import is_random, random_stream
from pardnn.backends.torch.runtime.results import check_written, share_results
from pardnn.backends.torch.user_step.code_names import users_line
from pardnn.errors import MismatchError, PardnnError, RankError, shown
from pardnn.graph.ir import Op
from pardnn.plan.actions import Action, Allocate, Compute, Free, Receive, Send, Wait
from pardnn.plan.state_layout import shard_of

#: If an op takes this long in the first step, seconds, a thread moves messages during it. The
#: thread takes 0.1 ms to start.
LONG_OP_S = 3e-3
Environment = dict[str, Any]
Call = Callable[[Environment], None]
#: A rank's step as generated code: see `codegen.rank_code`.
CodeStep = Callable[..., tuple[Any, dict[str, Any]]]


class History(NamedTuple):
    """The steps of a rank so far, by any executor; `what` names them in messages.

    `step_s`: Seconds of each step. `waits_s`: Seconds that it waited for each other rank, per step.
    """

    step_s: list[float]
    waits_s: list[list[float]]
    what: str = "step"


class Executor:
    """One rank, ready to run steps.

    Args:
        program: What to run.
        world: This rank's connections.
        resident: The value of each op of `program.residents(rank)`, by name; updated in place.
            None: `attach` gives them.
        draws: How each random op advances the generator; needed with more than one rank.
        history: The steps that other executors of these ranks have run.

    Attributes:
        limit_bytes: Largest allowed number of live tensor bytes; None without limit.
        layout: Which tensors have fixed places; None: none.
        peak_bytes: Peak of live tensor bytes in the first step, measured.
        step_s: Seconds of each step so far, those of `history` included.
        waits_s: Seconds that this rank waited for each other rank, per step.
        result: What the last step returned, the same on every rank.
        effects: What it prints, logs and checks (`runtime.effects`), the same on every rank.
        recorder: Takes the times of steps after the first, if `record` was called.
        agreement: Compares with the other ranks which graph runs; None: all are known to be the
            same.

    Raises:
        MismatchError: E514, if a resident value is missing or not the one that was captured.
    """

    def __init__(
        self,
        program: Program,
        world: World,
        resident: Mapping[str, Any] | None,
        draws: Mapping[str, Draws] | None = None,
        history: History | None = None,
    ) -> None:
        self.program = program
        self.world = world
        self.rank = world.rank
        self.limit_bytes: int | None = None
        self.layout: Layout | None = None
        self.peak_bytes = 0
        self.step_s, self.waits_s, self._what = history or History([], [])
        self.agreement: Agreement | None = None
        self.recorder: Recorder | None = None
        self._is_measured = False
        self._at, self._is_running, self._is_code = 0, False, False
        self._loss: Any = None
        self.result: Any = None
        self.effects: list[Any] = []
        self._inputs: Mapping[str, Any] = {}
        self._actions = program.lowered.ranks[world.rank]
        self._stream, self._drawn = None, {}
        if world.size > 1 or draws:
            self._stream, self._drawn = random_stream(program, world, draws or {})
        self._env: Environment = {}
        self._names: frozenset[str] = frozenset()
        if resident is not None:
            self.attach(resident)
        self._heap = HeapGuard()
        self._calls = [self._compiled(action) for action in self._actions]
        self._expected = [(op, *shape_and_dtype(op)) for op in program.inputs()]

    def attach(self, resident: Mapping[str, Any]) -> None:
        """Take the residents, see the class; between `detach` and this, no step can run."""
        values = dict(self._resident_values(resident))
        self._env.clear()  # others hold it, see `live_values`, and would keep old data alive
        self._env.update(values)
        self._names = frozenset(self._env)

    def detach(self) -> None:
        """Drop all values: another executor has taken over."""
        self._env = {}

    def _resident_values(self, resident: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for op in self.program.residents(self.rank):
            value = resident.get(op.name)
            check_resident(op, value)
            yield op.outputs[0].name, plain(value)
        for name in self.program.plan.order[self.rank]:
            op = self.program.ops[name]
            if op.kind == "constant":
                yield op.outputs[0].name, constant_value(op, self.world.device)

    # One closure per action.

    def _compiled(self, action: Action) -> Call:
        if isinstance(action, Compute):
            op = self.program.ops[action.op]
            return self._heap.watched(self._computing(op), self.program.largest_bytes(op))
        if isinstance(action, Free):
            return freeing(action.tensors)
        channel = self.world.channel
        assert channel is not None
        spec = self.program.specs[action.message]
        name = spec.tensor
        if isinstance(action, Send) and not self.program.plan.keeps_bits:
            return lambda env: channel.send(spec, laid_out(env[name], spec.strides))
        if isinstance(action, Send):
            return lambda env: channel.send(spec, env[name])
        if isinstance(action, Receive):
            return lambda env: channel.receive(spec)
        if isinstance(action, Wait) and spec.source == self.rank:
            return lambda env: channel.wait(spec)
        if isinstance(action, Wait):
            return lambda env: env.__setitem__(name, channel.wait(spec))
        into = self.program.lowered.messages[action.message].into
        if into is None:
            return placed_arrival(spec, channel.allocate, self.world.arena)
        place = receive_view(self.program.ops[spec.consumer], name)
        return lambda env: env.__setitem__(name, channel.allocate(spec, place(env[into])))

    def _computing(self, op: Op) -> Call:
        if op.kind == "input":
            return self._reading(op)
        if op.is_source:
            return _nothing
        if op is self.program.loss:
            return self._noting_loss(op.inputs[0]) if op.inputs else _nothing
        call = placed(op, bind(op, self.world.device), self.world.device, self.world.arena)
        stream = self._stream
        if stream is None or not is_random(op):
            return call

        name = self._drawn[op.name]

        def draw(env: Environment) -> None:
            stream.before(name)
            call(env)

        return draw

    def _reading(self, op: Op) -> Call:
        (output,) = op.outputs
        device = self.world.device
        of, box = shard_of(op, self.program.sources)
        strides, is_written = strides_of(output), op.name in self.program.written

        def read(env: Environment) -> None:
            value = plain(self._inputs[of], device)
            env[output.name] = value if is_written else laid_out(value, strides)

        def read_part(env: Environment) -> None:
            assert box is not None
            env[output.name] = plain(box_copy(self._inputs[of], box, output.strides), device)

        return read if box is None else read_part

    def _noting_loss(self, name: str) -> Call:
        def note(env: Environment) -> None:
            value = env[name]
            # Its storage may be freed or changed before the step ends.
            self._loss = value.clone() if isinstance(value, torch.Tensor) else value

        return note

    # Running.

    @property
    def live_values(self) -> Mapping[str, Any]:
        """This rank's live values between steps, by name."""
        return self._env

    def step(self, inputs: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> Any:
        """Run one step.

        Args:
            inputs: The value of every input op of the whole graph, by name; or a function that
                returns them, so that its failure is reported to all ranks.

        Returns:
            The loss, in a separate tensor, which waits when it is read (`comm.pending_loss`).

        Raises:
            MismatchError: E512, if an input is not of the captured shape or type.
            RankError: E601 to E604, if this rank or another one failed; names the first.
            StuckError: E701, if a wait timed out.
        """
        start = time.perf_counter()
        self._at, self._is_running = 0, True
        try:
            self._inputs = inputs() if callable(inputs) else inputs
            self._check_inputs(self._inputs)
            check_written(self.program, self._inputs, self.world.device)
            self._begin_memory()
            with torch.no_grad(), self.world.lock:
                if self.agreement is not None:
                    self.agreement.post(len(self.step_s))
                self._run() if self._is_measured else self._run_measured()
                if self.agreement is not None:
                    self.agreement.check()
                self._loss, self.result, self.effects = share_results(
                    self.program, self.world, self._loss, self._inputs, self._env
                )
            if self._stream is not None:
                self._stream.finish()
        except PardnnError as error:
            raise self._reported(error) from error.__cause__
        except Exception as error:
            raise self._reported(self._failure(error)) from error
        self._end_step()
        self.step_s.append(time.perf_counter() - start)
        self._is_running = False
        return self._loss

    def _begin_memory(self) -> None:
        if self.layout is not None:
            self.world.arena.open(self.layout)
        made = self.layout.made_bytes if self.layout else self.program.made_peaks[self.rank]
        self._heap.begin(None if self._is_code else made)

    def record(self) -> None:
        """Record the times of actions from the second step on."""
        self.recorder = Recorder(self._actions, self.program.specs)

    def run_code(self, step: CodeStep) -> None:
        """Run generated code instead of the actions; its memory is not measured."""
        before = getattr(self._stream, "before", lambda _op: None)

        def call(env: Environment) -> None:
            batch = {name: plain(value) for name, value in self._inputs.items()}
            self._loss, kept = step(env, batch, self.world.device, before)
            env.update(kept)

        self._calls, self._is_code, self._is_measured = [call], True, True

    def _run(self) -> None:
        env = self._env
        if self.recorder is not None:
            stamps = self.recorder.begin()
            for self._at, call in enumerate(self._calls):  # noqa: B020
                call(env)
                stamps.append(time.perf_counter())
            self.recorder.end(stamps)
            return
        # `_at` is the position of the running action, which reports of failures name.
        for self._at, call in enumerate(self._calls):  # noqa: B020  (only the attribute)
            call(env)

    def _run_measured(self) -> None:
        env, meter = self._env, MemoryMeter()
        meter.add(env, list(env))
        channel, code = self.world.channel, KernelCode()
        for self._at, action in enumerate(self._actions):  # noqa: B020
            call, began = self._calls[self._at], time.perf_counter()
            call(env)
            if isinstance(action, Free):
                meter.remove(action.tensors)
                self.world.arena.check_freed(action.tensors)
            elif isinstance(action, Compute):
                if channel is not None and time.perf_counter() - began > LONG_OP_S:
                    self._calls[self._at] = channel.moving_beside(call)
                code.count()
                op = self.program.ops[action.op]
                meter.add(env, [t.name for t in op.outputs], of_caller=op.kind == "input")
            elif isinstance(action, Allocate):
                meter.add(env, [self.program.specs[action.message].tensor])
            if self.limit_bytes is not None and meter.live > self.limit_bytes:
                # Unlike the system's limit, this one has no allowance for other memory.
                raise MemoryError(f"{meter.live} bytes of tensors, limit {self.limit_bytes}")
        self.peak_bytes, self._is_measured = meter.peak, True

    def _end_step(self) -> None:
        env = self._env
        # The plan frees storages, so views of resident ones are left over.
        for name in [name for name in env if name not in self._names]:
            del env[name]
        self._inputs = {}
        self.world.arena.close()
        channel = self.world.channel
        if channel is not None:
            self.waits_s.append(channel.waited_s)
            channel.waited_s = [0.0] * self.world.size
            channel.step += 1

    def _check_inputs(self, inputs: Mapping[str, Any]) -> None:
        for op, shape, dtype in self._expected:
            if op.name not in inputs:
                raise MismatchError(f"input {shown(op.name)} was not given", code="E512")
            value = inputs[op.name]
            is_checked = isinstance(value, torch.Tensor) and dtype is not None
            if is_checked and (value.shape != shape or value.dtype != dtype):
                raise other_batch(op, value, self.rank)

    # Failing.

    def _reported(self, error: PardnnError) -> PardnnError:
        if self.agreement is not None:
            error = self.agreement.explained(error)
        reported = self.world.report_failure(error)
        self._calls = []
        return reported

    def _failure(self, error: Exception) -> PardnnError:
        """Return the error that says where `error` arose and, if out of memory, what was held."""
        where, op = self._place()
        step = len(self.step_s)
        details: dict[str, Any] = {"rank": self.rank, "step": step, "op": op and op.name}
        if is_out_of_memory(error):
            held = live_bytes(self._env)
            return out_of_memory(self.program, self.world, where, held, details)
        return RankError(
            f"rank {self.rank} failed at {where}, step {step}: "
            f"{type(error).__name__}: {str(error)[:500]}",
            details=details,
        )

    def describe(self) -> dict[str, Any]:
        """Return what this rank is doing now, as JSON; the failure detector's thread calls it."""
        channel = self.world.channel
        now, waits_for, waited_s = f"{self._what} {len(self.step_s)}", None, 0.0
        text = f"at {self._place()[0]} in {now}"
        if not self._is_running:
            text = f"in your script{users_line()}, {self._between()}"
        wait = channel.waits() if channel is not None else None
        if wait is not None:
            waits_for, waited_s, text = wait.peer, wait.seconds, f"{wait.text} in {now}"
        notes = list(channel.notes) if channel is not None else []
        messages = [f"step {note.step}: {note.event}: {spec_text(note.spec)}" for note in notes]
        return {
            "rank": self.rank, "text": text, "waits_for": waits_for, "waited_s": waited_s,
            "messages": messages, "actions": recent_actions(self.program, self._actions, self._at),
        }  # fmt: skip

    def _place(self) -> tuple[str, Op | None]:
        """Return the step's position in words, and the op that runs there."""
        if self._is_code:
            return "a line of its generated code", None
        return action_text(self.program, self._actions, self._at)

    def _between(self) -> str:
        done, what = len(self.step_s), self._what
        return f"between {what}s {done - 1} and {done}" if done else f"before its first {what}"


def _nothing(env: Environment) -> None:
    """Do nothing: the value of a resident already exists."""
