"""Views of one storage: what they have in common, and how one is cut out of another."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pardnn import parallelize
from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.capture.trace_ir import geometry_of
from pardnn.backends.torch.capture.view_overlap import are_disjoint, slices
from pardnn.errors import UnsupportedError
from tests.backends.torch.capture.test_capture_equal import assert_equal


@st.composite
def views(draw, base):
    view = base
    for _ in range(draw(st.integers(0, 3))):
        dim = draw(st.integers(0, view.ndim - 1))
        kind = draw(st.sampled_from(["cut", "step", "turn", "merge"]))
        if kind == "turn":
            view = view.transpose(dim, view.ndim - 1)
        elif kind == "merge" and view.is_contiguous():
            view = view.view(-1)
        elif view.shape[dim]:
            begin = draw(st.integers(0, view.shape[dim] - 1))
            end = draw(st.integers(begin, view.shape[dim]))
            step = draw(st.integers(1, 3)) if kind == "step" else 1
            view = view[(slice(None),) * dim + (slice(begin, end, step),)]
    return view


def addresses(base, view):
    return set(torch.arange(base.numel()).as_strided(view.shape, view.stride(),
               view.storage_offset()).reshape(-1).tolist())  # fmt: skip


@pytest.mark.long
@given(data=st.data())
def test_views_that_are_called_disjoint_are(data):
    base = torch.zeros(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    one, other = data.draw(views(base)), data.draw(views(base))
    if are_disjoint(geometry_of(one), geometry_of(other)):
        assert not addresses(base, one) & addresses(base, other)


@given(data=st.data())
def test_runs_of_dims_are_told_apart_exactly(data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    base, found = torch.zeros(shape), []
    for _ in range(2):
        view = base
        for dim, size in enumerate(shape):
            begin = data.draw(st.integers(0, size - 1))
            view = view.narrow(dim, begin, data.draw(st.integers(1, size - begin)))
        found.append(view)
    common = addresses(base, found[0]) & addresses(base, found[1])
    assert are_disjoint(*map(geometry_of, found)) == (not common)


@given(data=st.data())
def test_slices_make_the_part(data):
    base = torch.zeros(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    view, part = data.draw(views(base)), data.draw(views(base))
    cuts = slices(geometry_of(view), geometry_of(part))
    if cuts is not None:
        for dim, begin, end in cuts:
            view = view.narrow(dim, begin, end - begin)
        assert geometry_of(view) == geometry_of(part)


def test_even_and_odd_elements_are_apart():
    base = torch.zeros(4, 6)
    even, odd = geometry_of(base[:, ::2]), geometry_of(base[:, 1::2])
    assert are_disjoint(even, odd)
    assert not are_disjoint(even, geometry_of(base[:, 2:4]))


def gates():
    """Gates cut from one tensor, each changed in place, as LSTM cells leave them."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 12), torch.randn(6, 4)

    def step(model, optimizer, x):
        optimizer.zero_grad()
        one, two, three = torch.unsafe_split(model(x), 4, 1)
        loss = (one.sigmoid_() * two.tanh_() + three.sigmoid_()).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), x)


def test_gates_written_in_place_stay_what_they_are():
    for order in (None, 1, 2):
        graph = assert_equal(gates, order=order)
        kinds = {op.kind for op in graph.ops}
        assert "aten.tanh_.default" in kinds
        assert "aten.as_strided.default" not in kinds


def windows():
    """A whole is changed after a run of it was cut out, and a run after the whole was read."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 12), torch.randn(6, 4)

    def step(model, optimizer, x):
        optimizer.zero_grad()
        with torch.no_grad():
            seen = x * 2
            row, corner = seen[1:4], seen[2:4, 1:3]
            seen.add_(1)
            scale = row.sum()
            row.mul_(3)
            scale = scale + corner.sum() + seen.sum()
        loss = model(x).square().mean() * scale
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, torch.optim.SGD(model.parameters(), lr=0.001), x)


def test_a_run_of_what_was_changed_is_a_slice():
    for order in (None, 1, 2):
        graph = assert_equal(windows, order=order)
        made = {t.name: op for op in graph.ops for t in op.outputs}
        summed = [made[op.inputs[0]] for op in graph.ops if op.kind == "aten.sum.default"]
        # The whole is larger than what was written last, so that no slice makes it.
        kinds = ["aten.slice.Tensor", "aten.slice.Tensor", "aten.as_strided.default"]
        assert [op.kind for op in summed] == kinds


def _conjugates(h):
    """A gradient takes the conjugate of a conjugate, which has the place of neither in memory."""
    found, other = torch.fft.rfft(h), torch.fft.rfft(h.flip(1))
    return torch.fft.irfft(found * other.conj(), n=h.shape[1]).square().sum()


def _product(h):
    return ((h * 1j).mH @ (h * 1j)).real.sum()


def _eigenvectors(h):
    found = torch.linalg.eig(h[:, :6])[1].abs()
    return (found * torch.linspace(-1, 1, 36).view(6, 6)).sum()


def _written_through(h):
    """What is written through a conjugate, and what a conjugate reads after a write."""
    found = torch.fft.rfft(h) * 1
    conjugate, negative = found.conj(), found.conj().imag
    doubled = conjugate * 2
    conjugate.mul_(1 + 1j)
    conjugate[0] = 1j
    negative.mul_(0.5)
    return (found * (2 + 1j) + doubled * conjugate).imag.sum() + (negative + 1).square().sum()


@pytest.mark.parametrize("loss_of", [_conjugates, _product, _eigenvectors, _written_through])
def test_lazy_conjugates_and_negatives(loss_of):
    def make():
        torch.manual_seed(0)
        model = nn.Linear(4, 12)

        def step(model, optimizer, x):
            optimizer.zero_grad()
            loss = loss_of(model(x))
            loss.backward()
            optimizer.step()
            return loss

        return step, (model, torch.optim.SGD(model.parameters(), lr=1e-4), torch.randn(6, 4))

    assert_equal(make)


def test_a_source_whose_memory_holds_its_conjugate_is_refused():
    model, z = nn.Linear(4, 4), torch.randn(6, 4, dtype=torch.complex64)

    def step(model, optimizer, z):
        optimizer.zero_grad()
        loss = (model(z.real) * z).imag.square().sum()
        loss.backward()
        optimizer.step()
        return loss

    args = model, torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match="lazy conjugate"):
        capture(step, *args, z.conj())
    fast = parallelize(step, *args, z)
    fast(z)
    with pytest.raises(UnsupportedError, match="lazy conjugate"):
        fast(z.conj())
    fast(z.conj().resolve_conj())
