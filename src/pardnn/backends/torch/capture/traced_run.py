"""One run of the user's step under the tracer, its effects, and the meaning of its exceptions.

An error of this package is passed on; an error that torch raises because a fake tensor or a symbol
has no data becomes an `UnsupportedError`; any other is the user's.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import random
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses import fake_tensor

from pardnn.backends.torch.capture.assigned.assignments import trainable_flags
from pardnn.backends.torch.capture.assigned.differences import assigned_values
from pardnn.backends.torch.capture.assigned.key_orders import key_orders
from pardnn.backends.torch.capture.assigned.replaced_states import follow_replaced
from pardnn.backends.torch.capture.assigned.stores import Stores
from pardnn.backends.torch.capture.choices.choices import Choices
from pardnn.backends.torch.capture.choices.normal_forms import NormalForms
from pardnn.backends.torch.capture.first_step.cached_tensors import check_counts
from pardnn.backends.torch.capture.first_step.gradients import gradients_noted
from pardnn.backends.torch.capture.numbers.class_attributes import (
    ClassAttributes,
    check_class_attributes,
    class_attributes,
)
from pardnn.backends.torch.capture.numbers.containers import recorders_inserted
from pardnn.backends.torch.capture.numbers.effects import effects_noted
from pardnn.backends.torch.capture.numbers.failing_way import Before
from pardnn.backends.torch.capture.numbers.namespaces import check_namespaces, namespaces
from pardnn.backends.torch.capture.numbers.outside_reads import clock_set, looks_noted
from pardnn.backends.torch.capture.numbers.python_calls import numbers_told, python_calls
from pardnn.backends.torch.capture.numbers.recorders import Recorders
from pardnn.backends.torch.capture.numbers.schedules import schedules_noted
from pardnn.backends.torch.capture.numbers.selection import NO_SYMBOLS, Selection
from pardnn.backends.torch.capture.numbers.told_sinks import stand_ins_inserted
from pardnn.backends.torch.capture.numbers.unseen_state import (
    check_context,
    check_unseen,
    kept_aside,
    unseen_states,
)
from pardnn.backends.torch.capture.numbers.user_code import conversions_followed
from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.capture.refusals.changed_state import (
    changed_setting,
    changed_state,
    hashed_number,
    outside_look,
)
from pardnn.backends.torch.capture.refusals.collectives import objects_refused
from pardnn.backends.torch.capture.refusals.default_dtype import other_dtypes_refused
from pardnn.backends.torch.capture.refusals.dropped_objects import Dropped
from pardnn.backends.torch.capture.refusals.kernel_settings import flushing_refused
from pardnn.backends.torch.capture.refusals.library_globals import (
    LibraryGlobals,
    check_library_globals,
    library_globals,
)
from pardnn.backends.torch.capture.refusals.library_tells import library_tells_noted
from pardnn.backends.torch.capture.refusals.other_threads import threads_refused
from pardnn.backends.torch.capture.refusals.tensor_questions import questions_refused
from pardnn.backends.torch.capture.restore import changes
from pardnn.backends.torch.capture.result import roots_noted
from pardnn.backends.torch.capture.rewrites.patches import rewritten
from pardnn.backends.torch.capture.rewrites.positions import Positions
from pardnn.backends.torch.capture.step_trace import StepTrace
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.backends.torch.user_step.held_numbers import objects_by_name, with_tensor_names
from pardnn.backends.torch.user_step.object_graph import ObjectGraph, walk_objects
from pardnn.backends.torch.user_step.used_names import used_names
from pardnn.errors import PardnnError, UnsupportedError, UserCodeError, told, without_addresses
from pardnn.graph.ir import is_in_group


def run_traced(
    step: Callable[..., Any],
    args: list[Any],
    tracer: Tracer,
    mode: fake_tensor.FakeTensorMode,
    context: contextvars.Context,
) -> Any:
    """Call `step(*args)` under the tracer and return its result.

    Args:
        step: The user's step.
        args: Its arguments, with placeholders in them.
        tracer: Records the calls.
        mode: The mode of the fake tensors.
        context: The context to run it in, a copy of this one.

    Raises:
        UnsupportedError: E801 to E804, if the step cannot be captured.
        UserCodeError: E110, if the step itself raises.
    """
    states_before = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with _tracing(tracer, mode):
            result = context.run(step, *args)
        tracer.rng_replays.finish()
        tracer.kernel_settings.check()
    except PardnnError:
        raise
    except (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedOperatorException,
    ) as error:
        raise _as_unsupported(error, tracer.locator.line_of(error)) from error
    except (Exception, SystemExit) as error:
        where = tracer.locator.line_of(error)
        unsupported_error = _unsupported_by_message(told(error), where, tracer)
        if unsupported_error is None and _is_of_zero_tangents(error):
            unsupported_error = unsupported.zero_tangent(where)
        if unsupported_error is not None:
            raise unsupported_error from error
        if _is_ours(error):
            raise
        raise UserCodeError(
            f"while running your step for capture{f' ({where})' if where else ''}: "
            f"{without_addresses(told(error))}"
        ) from error
    check_context(context, contextvars.copy_context())
    if random.getstate() != states_before[0]:
        raise unsupported.host_randomness("Python's random module")
    numpy_state = np.random.get_state()  # noqa: NPY002
    if any(not np.array_equal(a, b) for a, b in zip(states_before[1], numpy_state, strict=True)):
        raise unsupported.host_randomness("numpy.random")
    return result


@contextlib.contextmanager
def _tracing(tracer: Tracer, mode: fake_tensor.FakeTensorMode) -> Iterator[None]:
    traced = tracer.locator.tracking_modules(), rewritten(tracer)
    where = tracer.locator.line
    refused = threads_refused(where), objects_refused(where), other_dtypes_refused(where)
    with (
        refused[0], refused[1], refused[2], flushing_refused(where), _uncompiled(), _quiet_fakes(),
        mode, tracer, traced[0], traced[1], python_calls(),
    ):  # fmt: skip
        yield


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Run functions of `torch.compile` as written, since compiled ones raise under a trace."""
    is_there = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if is_there else contextlib.nullcontext()


@contextlib.contextmanager
def _quiet_fakes() -> Iterator[None]:
    """Keep torch from logging errors that it also raises, and that are reported with their line."""
    log = logging.getLogger(fake_tensor.__name__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def run_noted(
    trace: StepTrace,
    step: Callable[..., Any],
    args: list[Any],
    mode: fake_tensor.FakeTensorMode,
    recorders: Recorders,
    names: Mapping[int, str],
    chosen: Selection,
    forms: NormalForms,
    number: int = 0,
) -> None:
    """Call `step(*args)` and complete its trace: the result, effects, and what has changed.

    Args:
        trace: The trace of the step, with its sources.
        step: The user's step.
        args: Its arguments, with placeholders and symbols in them.
        mode: The mode of the fake tensors.
        recorders: Replace the objects that the step only fills or writes to.
        names: The names of the placeholders by id.
        chosen: Which numbers are symbols.
        forms: Functions that run in normal form.
        number: The number of the trace, by which its clock is set; 0 for one that may be kept.

    Raises:
        PardnnError: As `run_traced` does.
        OtherUse: The step does more with one of the containers.
    """
    tracer, objects = trace.tracer, walk_objects(step, args)
    contents = [*objects.contents, *recorders.shared]
    trace.held = {id(held): name for name, held in objects_by_name(contents).items()}
    before = _Before(objects, lambda: walk_objects(step, args, is_weak=False), recorders)
    is_first, flags, functions = chosen.is_first, trainable_flags(trace), before.functions(step)
    with contextlib.ExitStack() as stack:
        trace.effects = effects = stack.enter_context(effects_noted(tracer, is_long=chosen.ints))
        noted = schedules_noted(objects, tracer.locator, effects.stepped)
        trace.schedules = stack.enter_context(noted)
        inserted = recorders_inserted(contents, recorders.filled, effects.filled)
        trace.unfilled = stack.enter_context(inserted)
        stack.enter_context(stand_ins_inserted(objects, recorders.sinks, effects.told))
        choices = Choices(
            tracer, lambda: walk_objects(step, args), effects, trace.schedules, forms,
            is_first=chosen is NO_SYMBOLS,
        )  # fmt: skip
        trace.choices = stack.enter_context(choices)
        stack.enter_context(numbers_told(functions))
        stack.enter_context(forms.inserted(functions))
        stack.enter_context(conversions_followed(functions, effects.texts))
        stack.enter_context(clock_set(number, functions))
        stack.enter_context(questions_refused(tracer, functions))
        stack.enter_context(library_tells_noted(tracer, functions, objects, effects.told))
        looks = stack.enter_context(looks_noted(tracer.locator.line))
        trace.roots = stack.enter_context(roots_noted())
        trace.asked = stack.enter_context(gradients_noted(names))
        trace.result = _run_asked(step, args, tracer, mode, is_first=chosen is NO_SYMBOLS)
    if looks and not is_first:
        raise outside_look(*looks[0])
    before.check(trace.stood_for if chosen is NO_SYMBOLS else None, is_first=is_first)
    effects.finish(objects, is_first=is_first)
    changed = changes(follow_replaced(trace, objects, walk_objects(step, args))).items()
    trace.changed = {with_tensor_names(name, names): each for name, each in changed}
    for name, each in trace.changed.items():
        if isinstance(each.now, tuple) and is_in_group(name):
            raise changed_setting(name, Stores(functions).line(name))
    trace.orders = key_orders(objects, names, is_first=is_first)
    trace.assigned = assigned_values(objects, trace, lambda: Stores(functions), is_first=is_first)
    trace.trainable = {n: x for n, x in trainable_flags(trace).items() if flags.get(n, x) != x}
    trace.length = len(tracer.calls)


class _Before:
    """What is noted about a step's objects before it runs, apart from their content."""

    def __init__(
        self, objects: ObjectGraph, walk: Callable[[], ObjectGraph],
        recorders: Recorders,
    ) -> None:  # fmt: skip
        self._unseen, self._dropped = unseen_states(objects), Dropped(objects, walk)
        self._spaces, self._classes = namespaces(objects), ClassAttributes()
        self._objects, self._aside = objects, kept_aside(objects)
        self._of_libraries: Sequence[LibraryGlobals] = ()
        self._functions: list[types.FunctionType] = []
        self._recorders = recorders

    def functions(self, step: Callable[..., Any]) -> list[types.FunctionType]:
        """Return the user's functions that may run, after checking their use of cache counts."""
        found = used_names(step, self._objects.seen.values())
        check_counts(found.functions, self._objects.seen.values())
        self._of_libraries = library_globals(found, self._objects.seen.values())
        self._classes = class_attributes(self._objects, found)
        self._functions = found.functions
        return found.functions

    def check(self, stood_for: Mapping[int, torch.Tensor] | None, *, is_first: bool) -> None:
        """Reject what the step has changed in it.

        Args:
            stood_for: See `filled_containers`; None if recorders have been in place.
            is_first: Whether it was the first step.
        """
        filled = {} if stood_for is None else self._recorders.find_filled(stood_for)
        check_unseen(self._unseen)
        self._dropped.check()
        check_namespaces(self._spaces, self._line)
        ids = {id(each.holder) for each in filled.values()}
        known = self._line, self._recorders.of_classes, ids
        check_class_attributes(self._classes, *known, is_first=is_first)
        check_library_globals(self._of_libraries, is_first=is_first)
        aside = kept_aside(self._objects)
        changed = dict(aside.items() ^ self._aside.items())
        if changed and not is_first:  # later steps find what a first step sets
            raise changed_state(sorted(changed))

    def _line(self, name: str) -> str | None:
        return Stores(self._functions).line(name)


def _run_asked(
    step: Callable[..., Any], args: list[Any], tracer: Tracer, mode: fake_tensor.FakeTensorMode,
    *, is_first: bool,
) -> Any:  # fmt: skip
    """Call `run_traced`, and note what a raising branch leaves in the step's objects."""
    questions, begun = tracer.scalars.questions, []
    context = contextvars.copy_context()
    note = questions.on_trial

    def begin() -> None:
        note()
        begun.append(Before(walk_objects(step, args), is_first=is_first))

    questions.on_trial = begin
    try:
        return run_traced(step, args, tracer, mode, context)
    except UserCodeError:
        questions.left = begun[-1].left(context) if begun else None
        raise


#: They call `float`, `open` or `x[i]` for the user's code, whose errors come through them.
_PASSING_ON = frozenset(
    each.__module__
    for each in (
        conversions_followed, python_calls, looks_noted, stand_ins_inserted, rewritten, Positions,
    )
)  # fmt: skip


def _is_ours(error: BaseException) -> bool:
    """Whether this package raised, and not the user's code or torch below it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    # A step that takes other arguments raises here, at its call.
    return name.partition(".")[0] == "pardnn" and name not in {__name__, *_PASSING_ON}


def _as_unsupported(error: Exception, where: str | None) -> UnsupportedError:
    op = str(getattr(error, "func", None) or error.args[0])
    if isinstance(error, fake_tensor.DataDependentOutputException):
        # For example, the op asks whether tensors are equal.
        return unsupported.data_dependent_branch(where)
    if isinstance(error, fake_tensor.DynamicOutputShapeException):
        return unsupported.data_dependent_shape(op, where)
    if "nested" in op:
        return unsupported.nested(where)
    return unsupported.untraceable(op, where)


#: Parts of messages that mean that data is needed; "__format__": a symbol is printed.
_NEEDS_DATA = (
    "tensor subclasses", "__format__", "must be real number", "data is not allocated",
    "only supported seed types",
)  # fmt: skip
#: From torch's own assertion where a jagged tensor meets fake ones.
_NESTED = ("shape_env must not be None", "NestedTensor")


#: Where a flag has to be a bool and a symbol is not accepted; the last is raised by `with
#: torch.inference_mode(flag)`.
_NEEDS_FLAG = (
    "requires_grad must be a bool", "training mode is expected to be boolean",
    "'function' object does not support the context manager protocol",
)  # fmt: skip


def _is_of_zero_tangents(error: BaseException) -> bool:
    """Whether torch's derivatives of functions failed on tangents without memory."""
    if "meta" not in str(error):
        return False
    trace = error.__traceback__
    while trace is not None and "_functorch" not in trace.tb_frame.f_code.co_filename:
        trace = trace.tb_next
    return trace is not None


def _unsupported_by_message(
    text: str, where: str | None, tracer: Tracer
) -> UnsupportedError | None:
    """Return the error that torch's message stands for; None if it is an unrelated one."""
    is_flag = any(part in text for part in _NEEDS_FLAG) and any(
        value.kind is bool for call in tracer.calls for value in call.outputs
    )
    if is_flag or "SymBool" in text:
        return unsupported.flag_of_a_number(where)
    if any(part in text for part in _NEEDS_DATA):
        return unsupported.data_dependent_branch(where, "data")
    if "loop of ufunc" in text:
        return unsupported.data_dependent_branch(where, "ufunc")
    if any(part in text for part in _NESTED):
        return unsupported.nested(where)
    on_functions = re.search(r"no rule registered for HigherOrderOperator (\w+)", text)
    if on_functions:
        return unsupported.higher_order(on_functions[1], where)
    if "unhashable" in text and "SymInt" in text:
        return hashed_number(where)
    if ("SymInt" in text or "SymFloat" in text) and "NoneType" not in text:
        return unsupported.data_dependent_size(where)
    if "Sparse" in text:
        return unsupported.sparse(where)
    missing = re.search(r"no fake impl registered for <CustomOpDef\((.+?)\)>", text)
    return unsupported.untraceable(missing[1], where) if missing else None
