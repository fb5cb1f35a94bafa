"""What cannot be recorded is refused and built on the host; a share fits its memory."""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pardnn.backends.torch.deferred_init import recorder as recorder_module
from pardnn.backends.torch.deferred_init.blocks import BLOCK_BYTES
from pardnn.backends.torch.deferred_init.initialise import build, initialise, record, replay
from pardnn.backends.torch.rng import generator as rng
from pardnn.backends.torch.runtime.failures import naming_what_is_made_whole
from pardnn.errors import UnsupportedError, UserCodeError

GENERATOR = torch.default_generator


def test_a_large_value_asked_for_on_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_VALUE_ELEMENTS", 100)

    def factory() -> torch.Tensor:
        weight = torch.randperm(200)
        return weight * weight.sum().item()

    torch.manual_seed(1)
    before = rng.read_state(GENERATOR)
    with pytest.raises(UnsupportedError, match="E820") as caught:
        record(factory)
    line = factory.__code__.co_firstlineno + 2
    assert f"{Path(__file__).name}:{line}" in caught.value.message
    assert rng.read_state(GENERATOR) == before
    expected = factory()
    end = rng.read_state(GENERATOR)
    torch.manual_seed(1)
    result, built = initialise(factory)
    assert "200 elements" not in built.fallback
    assert f":{line}" in built.fallback
    assert built.fallback_bytes == expected.nbytes
    assert rng.read_state(GENERATOR) == before
    (real,) = replay(built, [result])
    assert torch.equal(real, expected)
    assert rng.read_state(GENERATOR) == end


def test_a_built_model_gives_back_what_is_not_wanted() -> None:
    torch.manual_seed(2)
    expected = nn.Linear(100, 50)
    torch.manual_seed(2)
    model, built = build(lambda: nn.Linear(100, 50), "as a test")
    assert built.fallback == "as a test"
    assert built.fallback_bytes == 4 * (100 * 50 + 50)
    (bias,) = replay(built, [model.bias])
    assert torch.equal(bias, expected.bias)
    assert model.weight.untyped_storage().nbytes() == 0
    assert model.bias.untyped_storage().nbytes() == 200


def test_torch_load_is_built_on_the_host() -> None:
    stored = io.BytesIO()
    torch.save({"weight": torch.ones(4)}, stored)

    def factory() -> torch.Tensor:
        stored.seek(0)
        return torch.load(stored, weights_only=True)["weight"] * 2

    with pytest.raises(UnsupportedError, match="E820"):
        record(factory)
    weight, built = initialise(factory)
    assert built.fallback
    assert replay(built, [weight])[0].tolist() == [2.0] * 4


def test_an_array_that_is_overwritten_later_is_noticed() -> None:
    def factory() -> torch.Tensor:
        array = np.zeros(5)
        tensor = torch.from_numpy(array)
        array[:] = 3
        return tensor

    with pytest.raises(UnsupportedError, match="overwritten"):
        record(factory)
    tensor, built = initialise(factory)
    assert replay(built, [tensor])[0].tolist() == [3.0] * 5


def test_an_array_written_through_torch_is_noticed() -> None:
    def factory() -> torch.Tensor:
        array = np.zeros(5)
        torch.from_numpy(array).add_(1)
        return torch.tensor(array.tolist())

    with pytest.raises(UnsupportedError, match="in place"):
        record(factory)
    tensor, built = initialise(factory)
    assert replay(built, [tensor])[0].tolist() == [1.0] * 5


def test_a_failed_recording_leaves_host_randomness() -> None:
    def factory() -> torch.Tensor:
        value = float(np.random.rand())  # noqa: NPY002
        return torch.full((3,), value) + torch.from_numpy(np.zeros(3)).numpy()[0]

    np.random.seed(3)  # noqa: NPY002
    expected = factory()
    np.random.seed(3)  # noqa: NPY002
    result, _ = initialise(factory)
    assert torch.equal(replay(_, [result])[0], expected)


def test_the_users_own_error_is_the_users() -> None:
    def factory() -> None:
        raise ValueError("no such file")

    with pytest.raises(UserCodeError, match="ValueError: no such file") as caught:
        initialise(factory)
    assert isinstance(caught.value.__cause__, ValueError)


def test_patches_are_taken_back() -> None:
    functions = nn.init._no_grad_trunc_normal_, torch.utils.swap_tensors
    record(lambda: nn.init.trunc_normal_(torch.empty(3)))
    assert (nn.init._no_grad_trunc_normal_, torch.utils.swap_tensors) == functions


# Memory.

WIDTH, DEPTH, LARGE = 2048, 12, 4096
SHARE = slice(6, 9)


def _stack() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def _data_bytes() -> int:
    fields = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in fields if line.startswith("VmData"))


def _digest(weight: torch.Tensor) -> str:
    return hashlib.sha256(weight.detach().numpy().data).hexdigest()


def _limited_rank(answers: Any) -> None:
    torch.set_num_threads(1)
    weight_bytes = 4 * WIDTH * WIDTH
    torch.manual_seed(6)
    model, recording = record(_stack)
    weights = list(model.parameters())
    replay(recording, weights[:1])
    limit = _data_bytes() + 3 * weight_bytes + (8 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    share = replay(recording, weights[SHARE])
    digests = [_digest(weight) for weight in share]
    del share
    try:
        replay(recording, weights)
        answers.put((digests, "no limit was met"))
    except RuntimeError as error:
        answers.put((digests, str(error)))


def _limited_shards(answers: Any) -> None:
    """A quarter of a weight of 64 MiB where a half would not fit, and of one that is made whole."""
    torch.set_num_threads(1)
    torch.manual_seed(6)
    model, recording = record(lambda: nn.Linear(LARGE, LARGE, bias=False))
    whole, converted = record(lambda: torch.empty(LARGE, LARGE).exponential_())
    box = ((LARGE // 4, LARGE // 2), (0, LARGE))
    replay(recording, [model.weight], [(((0, 1), (0, 1)), None)])  # loads what is loaded late
    limit = _data_bytes() + LARGE * LARGE + 2 * BLOCK_BYTES + (4 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    (share,) = replay(recording, [model.weight], [(box, None)])
    digest = _digest(share)
    del share
    try:
        with naming_what_is_made_whole(converted, ["model.w"], [whole], [(box, None)]):
            replay(converted, [whole], [(box, None)])
        answers.put((digest, "no limit was met"))
    except MemoryError as error:
        answers.put((digest, str(error)))


def _forked(answers: Any) -> None:
    """Run both: each in a process of its own, of one that has imported torch and nothing more."""
    for body in (_limited_shards, _limited_rank):
        pid = os.fork()
        if not pid:
            try:
                body(answers)
            except BaseException as error:
                answers.put((None, repr(error)))
            finally:
                os._exit(0)
        os.waitpid(pid, 0)


@pytest.fixture(scope="module")
def answers() -> list[Any]:
    """What ranks within limits found."""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs Linux's /proc")
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=_forked, args=(queue,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    return [queue.get() for _ in range(2)]


def test_a_tensor_larger_than_the_limit_is_drawn_in_blocks_and_one_made_whole_is_named(
    answers: list[Any],
) -> None:
    digest, refusal = answers[0]
    torch.manual_seed(6)
    expected = nn.Linear(LARGE, LARGE, bias=False).weight[LARGE // 4 : LARGE // 2]
    assert digest == _digest(expected)
    assert refusal.startswith(f"'model.w' takes {4 * LARGE * LARGE} bytes, and is made whole")


def test_a_quarter_of_a_model_fits_a_quarter_of_its_memory(answers: list[Any]) -> None:
    digests, refusal = answers[1]
    torch.manual_seed(6)
    expected = list(_stack().parameters())[SHARE]
    assert digests == [_digest(weight) for weight in expected]
    # The same limit stops a rank that wants the whole.
    assert "alloc" in refusal
