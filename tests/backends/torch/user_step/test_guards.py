"""What a step takes for granted is noticed when it changes, and nothing else is."""

import dataclasses
import enum
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.runtime.notices import changed_values
from pardnn.backends.torch.user_step.guards.guards import Guards
from pardnn.backends.torch.user_step.guards.item import Change
from pardnn.backends.torch.user_step.sources import batch_indices
from tests.backends.torch.user_step import settings as watched  # under a name of no step's


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


@dataclasses.dataclass
class Config:
    tau: float = 1.0
    depth: int = 2
    label: str = "a"


class Slotted:
    __slots__ = ("scale", "unused")

    def __init__(self) -> None:
        self.scale, self.unused = 2, 3


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: 2 * function(*args)


class Tripled:
    """A decorator that is an object."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return 3 * self.function(*args)


class Described:
    """A descriptor."""

    def __get__(self, model: Any, kind: type) -> float:
        return model.fourth


class Absent:
    """Has no attribute but one, and says so by a KeyError."""

    def __getattr__(self, name: str) -> float:
        return {"one": 1.0}[name]


@Tripled
def thrice(model: Any) -> Any:
    return model.third


class Net(nn.Module):
    gain, described = 3, Described()

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout, self.norm = nn.Linear(4, 4), nn.Dropout(0.1), nn.BatchNorm1d(4)
        self.tau, self.mode, self.act = 2, Mode.FAST, torch.tanh
        self.config, self.sizes, self.calls = Config(), [1, 2], 0
        self.table = torch.zeros(4)
        self.decay, self.rate, self.third, self.fourth = 0.9, 0.5, 0.1, 1.0
        self.absent = Absent()

    @torch.no_grad()
    def average(self) -> None:
        self.table.mul_(self.decay)

    @doubled
    def rated(self) -> float:
        return self.rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.norm(self.linear(x))) * self.tau * self.gain
        self.average()
        x = x * self.rated() * thrice(self) * self.described * self.absent.one
        if self.mode is Mode.FAST and self.config.depth > 1:
            x = self.act(x) * self.config.tau
        return x * self.scaled * len(self.sizes) + self.table

    @property
    def scaled(self) -> float:
        return self.inner

    inner = 1.5


FLAG, FACTORS, OPTIONS, helper = 2, {"a": 1.0}, types.SimpleNamespace(beta=0.5, other=1), None


def half(x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    return x * HALF * factor


HALF = 0.5


def made() -> tuple[Callable[..., Any], dict[str, Any]]:
    """A step that reads values of every kind, and the objects that hold them."""
    torch.manual_seed(0)
    model, slotted, cell, cell_tensor = Net(), Slotted(), 1.0, torch.ones(())
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    trainer = types.SimpleNamespace(clip=1.0, global_step=0)

    def step(model, optimizer, criterion, x, y, extra, index):
        optimizer.zero_grad()
        out = (
            half(model(x)) * FLAG * FACTORS["a"] * OPTIONS.beta * cell * slotted.scale * cell_tensor
        )
        loss = criterion(out, y) * (2 if extra["flag"] else 1) * trainer.clip
        loss.backward()
        optimizer.step()
        return loss

    def set_cell(value: float) -> None:
        nonlocal cell
        cell = value

    def set_cell_tensor(value: torch.Tensor) -> None:
        nonlocal cell_tensor
        cell_tensor = value

    holders = {
        "model": model, "criterion": criterion, "optimizer": optimizer, "slotted": slotted,
        "trainer": trainer, "set_cell": set_cell,
        "set_cell_tensor": set_cell_tensor,
    }  # fmt: skip
    return step, holders


def batch(flag: Any = True, index: int = 0) -> tuple[Any, ...]:
    return torch.ones(2, 4), torch.zeros(2, dtype=torch.long), {"flag": flag, "lr": 0.1}, index


def guarded() -> tuple[Guards, dict[str, Any], Callable[..., list[str]]]:
    step, holders = made()
    args = (holders["model"], holders["optimizer"], holders["criterion"], *batch())
    indices = batch_indices(args)
    guards = Guards(step, args, indices)

    def changed(*values: Any) -> list[str]:
        given = dict(zip(indices, (values or batch())[-len(indices) :], strict=True))
        return [change.name for change in guards.changes(given)]

    return guards, holders, changed


def hold(o: Any) -> Any:
    return types.SimpleNamespace(**o)


#: Name of the change, and what makes it.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "model.training": lambda o: o.model.eval(),
    "model.tau": lambda o: setattr(o.model, "tau", 3),
    "model.decay": lambda o: setattr(o.model, "decay", 0.5),
    "model.rate": lambda o: setattr(o.model, "rate", 0.1),
    "model.third": lambda o: setattr(o.model, "third", 0.2),
    "model.fourth": lambda o: setattr(o.model, "fourth", 0.2),
    "model.mode": lambda o: setattr(o.model, "mode", Mode.SLOW),
    "model.act": lambda o: setattr(o.model, "act", torch.relu),
    "model.config.depth": lambda o: setattr(o.model.config, "depth", 1),
    "model.config.tau": lambda o: setattr(o.model.config, "tau", 0.5),
    "len(model.sizes)": lambda o: o.model.sizes.append(3),
    "model.dropout.p": lambda o: setattr(o.model.dropout, "p", 0.5),
    "model.norm.momentum": lambda o: setattr(o.model.norm, "momentum", 0.2),
    "model.norm.training": lambda o: o.model.norm.eval(),
    "model.linear.weight.requires_grad": lambda o: o.model.linear.weight.requires_grad_(False),
    "model.linear.bias.grad": lambda o: o.model.linear(torch.ones(2, 4)).sum().backward(),
    "criterion.label_smoothing": lambda o: setattr(o.criterion, "label_smoothing", 0.0),
    "len(optimizer.param_groups)": lambda o: o.optimizer.add_param_group(
        {"params": [nn.Parameter(torch.ones(1))]}
    ),
    "model.table": lambda o: setattr(o.model, "table", torch.ones(4)),
    "model.linear.bias": lambda o: setattr(o.model.linear, "bias", nn.Parameter(torch.ones(4))),
    "model.forward": lambda o: setattr(o.model, "forward", lambda x: x),
    "optimizer.state of a parameter": lambda o: o.optimizer.state.clear(),
    "optimizer.step": lambda o: setattr(o.optimizer, "step", lambda: None),
    "optimizer.param_groups": lambda o: o.optimizer.load_state_dict(o.optimizer.state_dict()),
    "cell_tensor": lambda o: o.set_cell_tensor(torch.zeros(())),
    "half.__defaults__": lambda o: setattr(half, "__defaults__", (3.0,)),
    "slotted.scale": lambda o: setattr(o.slotted, "scale", 5),
    "trainer.clip": lambda o: setattr(o.trainer, "clip", 0.5),
    "cell": lambda o: o.set_cell(2.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named(name: str) -> None:
    _, holders, changed = guarded()
    assert changed() == []
    CHANGES[name](hold(holders))
    found = changed()
    half.__defaults__ = (1.0,)
    assert name in found


@pytest.mark.parametrize(
    ("holder", "key", "value", "name"),
    [
        (globals(), "FLAG", 3, "FLAG"),
        (globals(), "HALF", 0.25, "HALF"),
        (FACTORS, "a", 2.0, "FACTORS.a"),
        (globals(), "OPTIONS", types.SimpleNamespace(beta=0.5, other=2), "OPTIONS"),
        (OPTIONS.__dict__, "beta", 0.1, "OPTIONS.beta"),
        (globals(), "half", lambda x: x, "half"),
    ],
)
def test_globals_are_watched(
    holder: Any, key: str, value: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, changed = guarded()
    monkeypatch.setitem(holder, key, value)
    assert name in changed()
    monkeypatch.undo()
    assert changed() == []


@pytest.mark.parametrize(("name", "value"), [("gain", 4), ("inner", 2.5)])
def test_class_attributes_are_watched(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, changed = guarded()
    monkeypatch.setattr(Net, name, value)
    assert changed() == [f"Net.{name}"]


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (batch(flag=False), ["extra.flag"]),
        (batch(flag=1), ["extra.flag"]),  # another type is another graph
        (batch(index=7), []),  # nothing reads it
        ((*batch()[:2], {"flag": True, "lr": 0.2}, 0), []),  # a float stays live
        ((*batch()[:2], {"flag": True, "lr": 0.1, "more": 1}, 0), ["extra.more"]),
        ((*batch()[:2], {"lr": 0.1}, 0), ["extra.flag"]),
    ],
)
def test_a_batch_is_compared_by_its_plain_values(values: Any, names: list[str]) -> None:
    assert guarded()[2](*values) == names


#: What the step does not read, or reads at every call.
HARMLESS: dict[str, Callable[[Any], Any]] = {
    "learning rate": lambda o: o.optimizer.param_groups[0].update(lr=0.5),
    "a counter beside the step": lambda o: setattr(o.trainer, "global_step", 9),
    "an attribute that nothing names": lambda o: setattr(o.model, "note", "x"),
    "a count that no method names": lambda o: setattr(o.model, "calls", 9),
    "a slot that nothing names": lambda o: setattr(o.slotted, "unused", 9),
    "an equal value": lambda o: setattr(o.model, "config", Config()) or setattr(
        o.model, "config", o.model.config
    ),
    "equal text": lambda o: setattr(o.trainer, "clip", float("1.0")),
    "values of a parameter": lambda o: o.model.linear.weight.data.zero_(),
    "a schedule, which wraps the optimizer's step": lambda o: (
        torch.optim.lr_scheduler.StepLR(o.optimizer, 5)
    ),
    "a hook elsewhere": lambda o: nn.Linear(2, 2).register_forward_hook(print),
    "another global": lambda o: globals().update(SOMETHING_NEW=1),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_what_the_step_does_not_read_may_change(name: str) -> None:
    _, holders, changed = guarded()
    HARMLESS[name](hold(holders))
    found = changed()
    assert found == ([] if name != "an equal value" else ["model.config"])


def test_computed_names_make_every_attribute_count() -> None:
    model = Net()

    ends = "lls"  # a sum of literals would be a literal in the code

    def step(model: Any, x: torch.Tensor) -> Any:
        return model(x).sum() * getattr(model, "ca" + ends)

    args = (model, torch.ones(2, 4))
    guards = Guards(step, args, (1,))
    model.calls = 3
    assert [change.name for change in guards.changes({1: args[1]})] == ["model.calls"]


@pytest.mark.parametrize("value", [True, torch.ones(4)])
def test_a_new_attribute_counts_where_it_is_named(value: Any) -> None:
    model: Any = Net()

    def step(model: Any, x: torch.Tensor) -> Any:
        return model(x).sum() * (2 if hasattr(model, "doubled") else 1)

    args = (model, torch.ones(2, 4))
    guards = Guards(step, args, (1,))
    model.doubled = value
    assert [change.name for change in guards.changes({1: args[1]})] == ["model.doubled"]
    del model.doubled
    assert guards.changes({1: args[1]}) == []


def hook_on_node(model: Any) -> None:
    """As a reducer of gradients does; the node lives on where it is held."""
    weight = model.linear.weight
    model.note = weight.view_as(weight).grad_fn.next_functions[0][0]
    model.note.register_prehook(lambda gradients: gradients)


#: What is called at a step without being named by it.
HOOKS: dict[str, Callable[[Any], Any]] = {
    "model.linear._forward_hooks": lambda o: o.model.linear.register_forward_hook(lambda *a: None),
    "model._backward_hooks": lambda o: o.model.register_full_backward_hook(lambda *a: None),
    "model.linear.weight._post_accumulate_grad_hooks": lambda o: (
        o.model.linear.weight.register_post_accumulate_grad_hook(lambda p: None)
    ),
    "model.linear.weight._backward_hooks": lambda o: o.model.linear.weight.register_hook(abs),
    "hooks on the gradient of model.linear.weight": lambda o: hook_on_node(o.model),
    "optimizer._optimizer_step_pre_hooks": lambda o: o.optimizer.register_step_pre_hook(
        lambda *a: None
    ),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_named(name: str) -> None:
    _, holders, changed = guarded()
    HOOKS[name](hold(holders))
    assert any(found.startswith(name) for found in changed())


def test_a_plain_object_of_the_batch_is_compared_by_all_its_numbers() -> None:
    def step(model: Any, x: torch.Tensor, options: Any) -> Any:
        return model(x).sum() * options.factor * options.weights[0]

    args = (Net(), torch.ones(2, 4), types.SimpleNamespace(factor=1.0, weights=[1.0], note="a"))
    guards = Guards(step, args, (1, 2))
    changed = types.SimpleNamespace(factor=2.0, weights=[3.0], note="b")
    found = [change.name for change in guards.changes({1: args[1], 2: changed})]
    assert sorted(found) == ["options.factor", "options.weights.0"]


def test_a_method_replaced_on_its_class_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, changed = guarded()
    monkeypatch.setattr(Net, "forward", lambda self, x: x)
    assert changed() == ["Net.forward"]


def test_a_replaced_function_is_named_without_its_address():
    change = Change("model.weigh", now=torch.sqrt, then=sorted)
    told = str(changed_values([change]))
    assert "model.weigh" in told
    assert "method sqrt of type object" in told
    assert "0x" not in told


def whole_name(model: Any, x: torch.Tensor) -> Any:
    import tests.backends.torch.user_step.settings

    return model(x).sum() * tests.backends.torch.user_step.settings.FACTOR


def from_package(model: Any, x: torch.Tensor) -> Any:
    from tests.backends.torch.user_step import settings

    return model(x).sum() * settings.FACTOR


def relative(model: Any, x: torch.Tensor) -> Any:
    from . import settings  # noqa: TID252

    return model(x).sum() * settings.FACTOR


def by_value(model: Any, x: torch.Tensor) -> Any:
    def factor() -> float:
        from .settings import FACTOR  # noqa: TID252

        return FACTOR

    return model(x).sum() * factor()


def by_a_function(model: Any, x: torch.Tensor) -> Any:
    from tests.backends.torch.user_step.settings import weighed

    return weighed(model(x).sum())


@pytest.mark.parametrize("step", [whole_name, from_package, relative, by_value])
def test_a_module_that_the_step_imports_in_its_body_is_watched(
    step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = (Net(), torch.ones(2, 4))
    step(*args)
    guards = Guards(step, args, (1,))
    monkeypatch.setattr(watched, "FACTOR", 2.0)
    assert [change.name.rpartition(".")[2] for change in guards.changes({1: args[1]})] == ["FACTOR"]


def test_what_an_imported_function_alone_reads_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    args = (Net(), torch.ones(2, 4))
    guards = Guards(by_a_function, args, (1,))
    monkeypatch.setattr(watched.OPTIONS, "special", 2.0)
    name = "tests.backends.torch.user_step.settings.OPTIONS.special"
    assert [change.name for change in guards.changes({1: args[1]})] == [name]


SCALE = 1.0


def in_a_generator(model: Any, x: torch.Tensor) -> Any:
    return sum(each * SCALE for each in [model(x).sum()])


def in_a_lambda(model: Any, x: torch.Tensor) -> Any:
    return max([model(x).sum()], key=lambda each: each * SCALE)


def in_a_function(model: Any, x: torch.Tensor) -> Any:
    def weigh(total: Any) -> Any:
        return [each * SCALE for each in [total]]

    return weigh(model(x).sum())[0]


@pytest.mark.parametrize("step", [in_a_generator, in_a_lambda, in_a_function])
def test_globals_that_inner_code_reads_are_watched(
    step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = (Net(), torch.ones(2, 4))
    guards = Guards(step, args, (1,))
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert [change.name for change in guards.changes({1: args[1]})] == ["SCALE"]
