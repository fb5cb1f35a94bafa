"""Jobs of continuous integration: each test belongs to one, by its place or its mark.

`--job shapes`: kernels as plain Python (NUMBA_DISABLE_JIT=1), array shapes checked at calls.
`--job jit`:    the packages that have kernels, compiled; tests marked `jit`, too large for Python.
`--job torch`:  the tests below a directory named `torch`, and no others.
`--job ranks`:  the half of `torch` that mostly waits for processes; `--job rest`: the other half.
`--job long`:   tests that take minutes or are marked `long`: run before an issue is closed.
Without `--job` everything that is named runs, as it is.
"""

import gc
import os
import sys
import types
from pathlib import Path

import hypothesis
import numpy as np
import pytest

#: Of equal time as all others below `torch`. Only one of them may look at all of `run`'s processes.
RANKS = {
    "test_choices.py", "test_chosen_tensors.py", "test_cut_pieces_ranks.py", "test_cut_recipes.py",
    "test_deferred.py", "test_effects.py", "test_entry_point_once.py", "test_evaluation.py",
    "test_executor.py", "test_executor_faults.py", "test_executor_sharded.py",
    "test_filled_containers.py",
    "test_first_steps.py", "test_flight_record.py", "test_generator.py", "test_handshake.py",
    "test_initialise_limits.py", "test_key_orders.py", "test_kill_matrix.py", "test_launcher.py",
    "test_limits.py", "test_max_batch.py", "test_numpy_numbers.py", "test_offloaded_ranks.py",
    "test_left_behind.py", "test_microbatched_ranks.py", "test_mixed_ranks.py",
    "test_mixed_session.py", "test_new_tensors.py", "test_of_file.py",
    "test_offloaded_session.py", "test_rank_links.py", "test_rebound.py",
    "test_recomputed_ranks.py", "test_results.py",
    "test_resume.py", "test_returned.py", "test_settled.py", "test_state_in_place.py",
    "test_stop_signal.py", "test_stream.py", "test_sums_in_place.py", "test_tables.py",
    "test_unread.py", "test_variants.py",
    "test_ways_out.py", "test_whole_model.py",
}  # fmt: skip
#: Whole tools and libraries, kills, all layouts by all operators.
LONG = {
    "test_lengths.py",
    "test_counting_optimizers.py", "test_elastic.py", "test_layouts.py", "test_limited_gpt2.py",
    "test_page_in_browser.py", "test_recipes.py", "test_run_faults.py", "test_save_faults.py",
    "test_saved_runs.py", "test_soak.py", "test_training_kills.py", "test_two_nodes.py",
    "test_whole_process.py",
}  # fmt: skip
#: They look at all that is alive, collect it or fork most: all three take longer with what other
#: tests left. 10 of 42 processor seconds of these in `rest`, 20 of 48 in `ranks`.
FIRST = (
    "test_local_ops.py", "test_caches.py", "test_references.py", "test_limits.py",
    "test_rebound.py", "test_variants.py",
)  # fmt: skip
TORCH_JOBS = ("torch", "ranks", "rest", "long")
KERNEL_PACKAGES = {"cost", "kernels", "place", "shard", "sim"}
#: Where arrays travel. Not what users call with anything: it answers wrong types itself.
CHECKED = ["graph/csr.py", "kernels", "cost", "sim", "place", "shard"]

# The same examples on every machine; `thorough` has more of them, `explore` looks for new ones.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.register_profile("thorough", deadline=None, derandomize=True, max_examples=300)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--job", choices=["shapes", "jit", *TORCH_JOBS], default=None)


def pytest_configure(config: pytest.Config) -> None:
    # To look at all objects for cycles takes a second where torch is, and finds next to nothing.
    gc.set_threshold(*gc.get_threshold()[:2], 100)
    if config.getoption("--job") != "shapes":
        return
    if os.environ.get("NUMBA_DISABLE_JIT") != "1":
        raise pytest.UsageError("--job shapes needs NUMBA_DISABLE_JIT=1: the hook breaks the JIT")
    from beartype import BeartypeConf, FrozenDict, beartype
    from jaxtyping import install_import_hook

    # Where a float is asked for, an int will do. The hook finds its checker by a name to import.
    checker = types.ModuleType("shape_checker")
    # Kernels as plain Python hand on elements of arrays: those are numpy's integers.
    overrides = FrozenDict(
        {bool: bool | np.bool_, int: int | np.integer, float: float | int | np.number}
    )
    vars(checker)["check"] = beartype(conf=BeartypeConf(hint_overrides=overrides))
    sys.modules[checker.__name__] = checker
    # beartype looks at one element of a list, chosen at random.
    config.addinivalue_line("filterwarnings", "ignore:Do not use the `random` module inside")
    install_import_hook(_modules_with_arrays(), "shape_checker.check")


def pytest_sessionfinish() -> None:
    gc.collect()
    gc.freeze()  # pytest looks for cycles five times more, and Python once: seconds each


def _modules_with_arrays() -> list[str]:
    """Return the modules in `CHECKED` that state shapes; types of all others are pyright's task."""
    source = Path(__file__).parent / "src"
    paths = [source / "pardnn" / name for name in CHECKED]
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    return [
        ".".join(file.relative_to(source).with_suffix("").parts)
        for file in files
        if "from jaxtyping import" in file.read_text(encoding="utf-8")
    ]


@pytest.fixture(autouse=True, scope="session")
def _one_thread(request: pytest.FixtureRequest) -> None:
    """Two jobs share two cores: two threads each take 15 times as long for small tensors."""
    if request.config.getoption("--job") in TORCH_JOBS:
        import torch

        torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _short_plans() -> None:
    """`auto` polishes for up to 2 s, then asks solvers for 0.7 s: too long for each of its tests.

    The solvers' own test asks them again.
    """
    from pardnn.place.ordering import least_peak
    from pardnn.place.polish import polish
    from pardnn.planner import algorithms, warm_up

    algorithms.AUTO_SOLVERS.clear()
    polish.WORK = 2_000_000
    if os.environ.get("NUMBA_DISABLE_JIT") == "1":
        least_peak.WORK_OF_PAIR = 250.0  # an eighth
        for name in ("_load", "_load_steps"):  # kernels that nothing compiles: 0.1 s a plan
            setattr(warm_up, name, lambda *_, **__: None)


def _parts_below(path: Path, config: pytest.Config) -> tuple[str, ...]:
    return path.relative_to(config.rootpath).parts[1:]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    job = config.getoption("--job")
    if job in (None, "long") or collection_path.is_dir():
        return None
    # Here and not below: the module is not even imported in another job.
    is_torch = "torch" in _parts_below(collection_path, config)
    if collection_path.name in LONG:
        return True
    if job in ("ranks", "rest") and (collection_path.name in RANKS) != (job == "ranks"):
        return True
    return True if is_torch != (job in TORCH_JOBS) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    job = config.getoption("--job")
    if job is None:
        return

    def belongs(item: pytest.Item) -> bool:
        is_long = item.path.name in LONG or item.get_closest_marker("long") is not None
        if job in TORCH_JOBS or is_long:
            return is_long == (job == "long")
        is_large = item.get_closest_marker("jit") is not None
        if job == "shapes":
            return not is_large
        return is_large or bool(KERNEL_PACKAGES & set(_parts_below(item.path, config)))

    config.hook.pytest_deselected(items=[item for item in items if not belongs(item)])
    items[:] = [item for item in items if belongs(item)]
    items.sort(key=lambda item: (*FIRST, item.path.name).index(item.path.name))


@pytest.fixture
def tiny() -> Path:
    """The worked example: graph.json, cluster.json, plan.json, expected.json."""
    return Path(__file__).parent / "tests" / "data" / "tiny"
