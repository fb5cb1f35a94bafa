"""A plan as a trace of events, the JSON that Chrome's tracing page and Perfetto open.

A device is a process: what it computes, sends and receives are its threads, what it holds a
counter, and an arrow leads from each send to its receive. A run is a second process per device on
the same axis: 0 is the start of the step on each rank. Times are whole nanoseconds, written as
microseconds, so that close neighbours on one thread never overlap.
Reference: "Trace Event Format" (Chromium).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from pardnn import files
from pardnn.errors import printable
from pardnn.plan.plan import order_rows
from pardnn.plan.run_record import RankTimes, RunRecord
from pardnn.report.page.contents import PHASES
from pardnn.report.page.simulated import Simulated
from pardnn.sim.peak import memory_over_time
from pardnn.units import bytes_text

Event = dict[str, Any]
_NS = 1e9
#: Colours of the format, by phase.
_COLOURS = ("thread_state_running", "thread_state_iowait", "rail_animation", "good", "grey")


class Slice(NamedTuple):
    """A bar: whole nanoseconds from the start of the step, and what is told of it."""

    start: int
    finish: int
    name: str
    category: str
    told: Event
    colour: str | None = None
    flow: int = -1  # number of a message
    is_arrival: bool = False


def trace_json(found: Simulated, record: RunRecord | None = None) -> bytes:
    """Return a plan as a trace, one event a line.

    Args:
        found: The plan, timed.
        record: Of a run of this plan.
    """
    told = {
        "graph": printable(found.graph.name),
        "algorithm": found.plan.algorithm,
        "makespan_s": found.timeline.makespan,
        "costs": found.costs,
    }
    events = list(_events(found, record))
    return files.dump_json({"displayTimeUnit": "ms", "otherData": told, "traceEvents": events})


def _events(found: Simulated, record: RunRecord | None) -> Iterator[Event]:
    assert found.plan.cluster is not None
    threads = itertools.count(1)
    sends, receives = _messages(found)
    for device, row in enumerate(order_rows(found.arrays)):
        # Number 0 is the idle process of an operating system to both viewers.
        pid, name = 2 * device + 1, printable(found.names[device])
        limit = f"limit {bytes_text(found.plan.cluster.devices[device].memory)}"
        yield from _process(pid, f"{name}: predicted", limit)
        yield from _thread(pid, threads, "compute", _computed(found, row))
        yield from _thread(pid, threads, "send", sends[device])
        yield from _thread(pid, threads, "receive", receives[device])
        yield from _memory(found, pid, device)
        if record is not None:
            rank = record.ranks[device]
            peak = f"peak {bytes_text(rank.peak_bytes)}"
            yield from _process(pid + 1, f"{name}: measured", peak)
            yield from _thread(pid + 1, threads, "compute", _ran(found, rank))
            yield from _thread(pid + 1, threads, "wait", _waited(rank))


def _process(pid: int, name: str, label: str) -> Iterator[Event]:
    told = {"process_name": {"name": name}, "process_labels": {"labels": label},
            "process_sort_index": {"sort_index": pid}}  # fmt: skip
    for what, values in told.items():
        yield {"ph": "M", "pid": pid, "tid": 0, "name": what, "args": values}


def _thread(
    pid: int, threads: Iterator[int], name: str, slices: Iterable[Slice]
) -> Iterator[Event]:
    """Yield a thread, and further ones where slices are under way at once.

    Args:
        pid: Of the process.
        threads: Numbers that no thread has yet.
        name: Of the thread.
        slices: In order of their starts.
    """
    for number, lane in enumerate(_lanes(slices)):
        tid = next(threads)
        title = f"{name} {number + 1}" if number else name
        for what, values in (("thread_name", {"name": title}),
                             ("thread_sort_index", {"sort_index": tid})):  # fmt: skip
            yield {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": values}
        for each in lane:
            yield from _slice(each, pid, tid)


def _slice(each: Slice, pid: int, tid: int) -> Iterator[Event]:
    where = {"pid": pid, "tid": tid, "ts": each.start / 1000}
    shown: Event = {"name": printable(each.name), "cat": each.category}
    event = {"ph": "X", **where, "dur": (each.finish - each.start) / 1000, **shown}
    if each.colour is not None:
        event["cname"] = each.colour
    yield {**event, "args": each.told}
    if each.flow >= 0:
        end = {"ph": "f", "bp": "e"} if each.is_arrival else {"ph": "s"}
        yield {**end, **where, **shown, "cat": "message", "id": each.flow}


def _lanes(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Return slices in as few rows as possible without overlap; at least one."""
    rows: list[list[Slice]] = [[]]
    for each in slices:
        free = (row for row in rows if not row or row[-1].finish <= each.start)
        row = next(free, None)
        if row is None:
            row = []
            rows.append(row)
        row.append(each)
    return rows


def _computed(found: Simulated, row: Sequence[int]) -> Iterator[Slice]:
    start, finish = found.timeline.start.tolist(), found.timeline.finish.tolist()
    for i in row:
        op, phase = found.graph.ops[i], int(found.phase[i])
        if op.is_source:
            continue
        told: Event = {"kind": op.kind, "module": op.module, "source": op.source}
        if found.piece[i] >= 0:
            told["piece"] = int(found.piece[i])
        yield Slice(
            round(start[i] * _NS), round(finish[i] * _NS), op.name, PHASES[phase],
            {key: _text(value) for key, value in told.items() if value is not None},
            _COLOURS[phase],
        )  # fmt: skip


def _text(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value


def _messages(found: Simulated) -> tuple[list[list[Slice]], list[list[Slice]]]:
    """Return what each device sends, and what each receives, in order of starts."""
    line, arrays, names = found.timeline, found.arrays, found.names
    sends: list[list[Slice]] = [[] for _ in names]
    receives: list[list[Slice]] = [[] for _ in names]
    tensor = [each.name for op in found.graph.ops for each in op.outputs]
    sizes = found.message_bytes.tolist()
    for i in line.message_start.argsort(kind="stable").tolist():
        source, target = int(arrays.message_source[i]), int(arrays.message_target[i])
        begin = round(float(line.message_start[i]) * _NS)
        # An arrow needs something to point at.
        end = max(round(float(line.message_finish[i]) * _NS), begin + 1)
        told: Event = {"bytes": sizes[i], "from": printable(names[source])}
        told["to"] = printable(names[target])
        sent = Slice(begin, end, tensor[arrays.message_tensor[i]], "send", told, None, i)
        sends[source].append(sent)
        receives[target].append(sent._replace(category="receive", is_arrival=True))
    return sends, receives


def _memory(found: Simulated, pid: int, device: int) -> Iterator[Event]:
    times, held = memory_over_time(found.graph.arrays, found.arrays, found.timeline, device)
    changes = zip(times.tolist(), held.tolist(), strict=True)
    # Of ops that start at once, such as views, the largest counts: else the peak could be lost.
    for ns, group in itertools.groupby(changes, key=lambda at: round(at[0] * _NS)):
        yield {
            "ph": "C", "pid": pid, "tid": 0, "ts": ns / 1000, "name": "memory",
            "args": {"bytes": max(size for _, size in group)},
        }  # fmt: skip
    end = round(found.timeline.makespan * _NS)
    if len(held):
        yield {
            "ph": "C", "pid": pid, "tid": 0, "ts": end / 1000, "name": "memory",
            "args": {"bytes": int(held[-1])},
        }  # fmt: skip


def _ran(found: Simulated, rank: RankTimes) -> Iterator[Slice]:
    """Yield a rank's ops; medians may overlap by a little, so a bar ends where the next begins."""
    number = {op.name: i for i, op in enumerate(found.graph.ops)}
    starts = [round(each * _NS) for each in rank.start_s]
    for k, (name, seconds) in enumerate(zip(rank.op, rank.seconds, strict=True)):
        i = number[name]
        if found.graph.ops[i].is_source:
            continue
        phase = int(found.phase[i])
        predicted = float(found.timeline.finish[i] - found.timeline.start[i])
        told: Event = {"kind": printable(found.graph.ops[i].kind)}
        told |= {"measured_s": seconds, "predicted_s": predicted}
        finish = _until(starts, k, seconds)
        yield Slice(starts[k], finish, name, PHASES[phase], told, _COLOURS[phase])


def _waited(rank: RankTimes) -> Iterator[Slice]:
    starts = [round(each * _NS) for each in rank.wait_start_s]
    for k, (tensor, seconds) in enumerate(zip(rank.tensor, rank.wait_s, strict=True)):
        told: Event = {"measured_s": seconds}
        yield Slice(starts[k], _until(starts, k, seconds), tensor, "wait", told)


def _until(starts: Sequence[int], k: int, seconds: float) -> int:
    finish = starts[k] + round(seconds * _NS)
    return max(min(finish, starts[k + 1]), starts[k]) if k + 1 < len(starts) else finish
