"""Names of modules with line breaks in what commands print."""

import torch
from torch import nn

import pardnn
from pardnn.backends.torch.capture.capture import capture
from pardnn.cost.costs import preset_costs
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.report.layout import layout_result, layout_text
from pardnn.report.text import console, plan_text
from tests.backends.torch.models import classify_step


def test_a_line_break_in_a_name_is_written_out() -> None:
    model = nn.Sequential()
    model.add_module("a\nb", nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture(classify_step, model, optimizer, torch.randn(2, 4), torch.zeros(2).long())
    costs = preset_costs(graph, "v100")  # of so small ops: whole on every device
    options = PlanOptions(algorithm="tofu", costs="v100")
    plan, result = make_plan(Problem(graph, pardnn.Cluster.uniform(2), costs, options))
    for text in (plan_text(graph, plan, result), layout_text(layout_result(graph, plan))):
        with (terminal := console()).capture() as shown:
            terminal.print(text)
        assert r"a\nb" in shown.get()
        assert "a\nb" not in shown.get()
