"""The models of the two papers: they train, have the papers' sizes, and are captured whole."""

import importlib
import inspect
import resource
from pathlib import Path

import pytest
import torch

from pardnn.backends.entry_point import load_factory
from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.make_step import make_step
from testbed.zoo import char_crn, e3d, rnn, trn, word_rnn, wresnet, wrn
from tests.backends.torch.capture.test_capture_equal import assert_equal
from tests.long_cases import long_but

ZOO = Path(inspect.getfile(wrn)).parent
MODELS = sorted(path.stem for path in ZOO.glob("*.py") if path.stem != "__init__")
SMALL = [f"{name}:small{'_norm' if name == 'wresnet' else ''}" for name in MODELS]
GIB = 2**30


def factory_of(entry: str, batch_size: int | None = None):
    name, _, function = entry.partition(":")
    return load_factory(f"{ZOO / name}.py:{function}", batch_size)


def parameters(network, *sizes, **options) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in network(*sizes, **options).parameters())


@pytest.fixture(autouse=True)
def _one_thread():
    """More cost more than they bring at these sizes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("entry", SMALL)
def test_small_ones_train(entry):
    step, args = factory_of(entry)()
    losses = [float(step(*args).detach()) for _ in range(6)]
    assert losses[-1] < losses[0] - 1e-3


@pytest.mark.parametrize("entry", long_but({"trn:small", "wrn:small"}, SMALL))
def test_captured_ones_give_the_same_bits(entry):
    assert_equal(factory_of(entry))


@pytest.mark.parametrize("name", MODELS)
def test_batch_size_is_the_users(name):
    _, one = factory_of(f"{name}:small", 1)()
    _, three = factory_of(f"{name}:small", 3)()
    grown = [
        (a.shape, b.shape)
        for a, b in zip(one, three, strict=True)
        if isinstance(a, torch.Tensor) and a.numel() * 3 == b.numel()
    ]
    assert len(grown) == sum(isinstance(a, torch.Tensor) for a in one)


#: Model: (widths, {depth: GiB per width}).
TABLE_2 = {
    wresnet: (
        (4, 6, 8, 10),
        {50: (4.2, 9.6, 17.1, 26.7), 101: (7.8, 17.1, 30.6, 47.7), 152: (10.5, 23.4, 41.7, 65.1)},
    ),
    rnn: ((4, 6, 8), {6: (8.4, 18.6, 33.0), 8: (11.4, 25.5, 45.3), 10: (14.4, 32.1, 57.0)}),
}


@pytest.mark.parametrize(("model", "depth"), [(m, d) for m in TABLE_2 for d in TABLE_2[m][1]])
def test_weights_of_tofu(model, depth):
    """Weight, gradient and history; the table has three times a size rounded to 0.1 GiB."""
    widths, sizes = TABLE_2[model]
    for width, printed in zip(widths, sizes[depth], strict=True):
        found = 12 * parameters(model.network, depth, width * (1024 if model is rnn else 1)) / GIB
        rounded = 3 * round(found / 3, 1)
        assert pytest.approx(printed, rel=0.02) == found or pytest.approx(printed) == rounded
        name = f"{model.__name__.rpartition('.')[2]}_{depth}_{width}{'k' if model is rnn else ''}"
        assert callable(getattr(model, name))


def test_batch_norm_adds_two_numbers_per_channel():
    plain = parameters(wresnet.network, 50, 4)
    normed = parameters(wresnet.network, 50, 4, norm=True)
    assert 0 < normed - plain < 1e-3 * plain


THESIS = {
    "Word-RNN-2": (word_rnn.network, (4096,), 1, 1.28e9),
    "Char-CRN-2": (char_crn.network, (32,), 1, 1.09e9),
    "WRN": (wrn.network, (610, 14), 1, 1.91e9),
    "WRN-2": (wrn.network, (304, 28), 1, 3.77e9),
    "TRN": (trn.network, (24, 5120), 1, 1.97e9),
    "TRN-2": (trn.network, (48, 8192), 1, 5.1e9),
    # Weights and Adam's two moments; see the module.
    "E3D": (e3d.network, (320, 4), 3, 0.95e9),
    "E3D-2": (e3d.network, (512, 8), 3, 2.4e9),
}


@pytest.mark.parametrize("name", THESIS)
def test_parameters_of_the_thesis(name):
    network, sizes, copies, printed = THESIS[name]
    assert copies * parameters(network, *sizes) == pytest.approx(printed, rel=0.02)


def test_counts_that_cannot_be_the_thesis_s():
    """Word-RNN and Char-CRN differ from the table as their modules say."""
    seven, eight = (parameters(word_rnn.network, 2048, layers) for layers in (7, 8))
    assert (round(seven / 1e9, 2), round(eight / 1e9, 2)) == (0.34, 0.37)
    few, many = (parameters(char_crn.network, layers) for layers in (8, 32))
    assert (round(few / 1e9, 3), round((many - few) / 1e9, 3)) == (0.286, 0.806)


def peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_full_sizes_are_captured_without_their_memory():
    """2.4 billion parameters: 9.5 GB, and three times as much in a step."""
    before = peak_rss_bytes()
    step, args, recording = make_step(factory_of("wresnet:wresnet_50_10"))
    graph = capture(step, *args)
    assert recording.fallback == ""
    weights = sum(
        tensor.bytes for op in graph.ops if op.kind == "parameter" for tensor in op.outputs
    )
    assert weights == 4 * parameters(wresnet.network, 50, 10) > 9e9
    assert peak_rss_bytes() - before < 300e6


def test_every_named_size_is_an_entry_point():
    sizes = 0
    for name in MODELS:
        module = importlib.import_module(f"testbed.zoo.{name}")
        for function, made in vars(module).items():
            if function.startswith((name, "small")) and callable(made):
                assert "batch_size" in inspect.signature(made).parameters
                sizes += 1
    assert sizes >= 24 + 12 + 10 + 1 + len(MODELS)
