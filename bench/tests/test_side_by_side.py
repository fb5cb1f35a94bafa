"""Rows measured side by side."""

import os

from bench.common.side_by_side import measured


def row(text: str, other: str) -> dict[str, object]:
    return {"text": text + other, "process": os.getpid()}


def test_rows_come_in_the_order_of_their_tasks_from_other_processes():
    tasks = [(str(i), "x") for i in range(7)]
    for jobs in (1, 2):
        rows = list(measured(row, tasks, jobs))
        assert [each["text"] for each in rows] == [f"{i}x" for i in range(7)]
        assert ({each["process"] for each in rows} == {os.getpid()}) == (jobs == 1)
        assert all(each["cpu_s"] >= 0 <= each["wall_s"] for each in rows)
