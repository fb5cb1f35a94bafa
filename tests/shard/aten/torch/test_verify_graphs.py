"""Descriptions against the calls of real training steps, with the values that flow there."""

from typing import Any

import pytest
import torch

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.ops.verify_description import in_double
from pardnn.graph.ir import LOSS_KIND, Op
from pardnn.planner.check_descriptions import verify_call
from pardnn.shard.aten.lookup import description_of
from pardnn.shard.aten.without import reason_without
from pardnn.shard.partition.call import call_of
from pardnn.shard.partition.strategy import strategies
from tests.backends.torch.models import MODELS
from tests.long_cases import long_but
from tests.reference.interpreter import Interpreter


def vit() -> Any:
    import transformers

    torch.manual_seed(5)
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        image_size=16, patch_size=8, num_labels=4,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config).train()

    def step(model: Any, optimizer: Any, images: torch.Tensor, labels: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(pixel_values=images, labels=labels).loss
        loss.backward()
        optimizer.step()
        return loss

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return step, (model, optimizer, torch.randn(4, 3, 16, 16), torch.randint(4, (4,)))


STEPS = {name: MODELS[name] for name in ("gpt2", "llama", "bert", "t5", "resnet", "lstm")}
STEPS["vit"] = vit


def is_described_call(op: Op) -> bool:
    is_call = not op.is_source and op.kind != LOSS_KIND and not op.kind.startswith("scalar.")
    return is_call and description_of(op.kind) is not None


def problems_of(graph: Any, step: Any, args: Any) -> tuple[list[Any], int]:
    """Verify each call once per shape, with the values that it sees when the step runs."""
    interpreter = Interpreter(graph, step, args)
    shapes = {t.name: (t.shape, t.dtype) for op in graph.ops for t in op.outputs}
    seen: set[str] = set()
    problems: list[Any] = []
    count = 0

    def checked(op: Op, call: Any) -> Any:
        def run(env: dict[str, Any]) -> None:
            nonlocal count
            data = op.arguments or {}
            literals = [value for value in data.get("args", []) if not isinstance(value, dict)]
            key = repr((op.kind, [shapes[name] for name in op.inputs], literals))
            if is_described_call(op) and key not in seen:
                seen.add(key)
                values = in_double({name: env[name] for name in op.inputs})
                args, kwargs = data.get("args", []), data.get("kwargs", {})
                done = verify_call(op.kind, args, kwargs, values, (2, 3))
                problems.extend((op.kind, p) for p in done.problems)
                count += len(done.verified)
            call(env)

        return run

    interpreter.calls = [(op, checked(op, call)) for op, call in interpreter.calls]
    interpreter.run(*[a for a in args if isinstance(a, torch.Tensor | dict)])
    return problems, count


@pytest.mark.parametrize("model", long_but({"gpt2", "resnet"}, sorted(STEPS)))
def test_every_call_of_a_step_is_cut_right(model: str) -> None:
    step, args = STEPS[model]()
    graph = capture(step, *args)
    tensors = {t.name: t for op in graph.ops for t in op.outputs}
    calls = [op for op in graph.ops if not op.is_source and op.kind.startswith("aten.")]
    unknown = {op.kind for op in calls if description_of(op.kind) is None}
    assert {kind for kind in unknown if reason_without(kind) is None} == set()
    calls = [op for op in calls if op.kind not in unknown]
    cut = sum(bool(strategies(call_of(op, tensors))) for op in calls)
    assert cut > 0.5 * len(calls)
    problems, count = problems_of(graph, step, args)
    assert problems == []
    assert count > 100
