"""The kept graphs are those of the models as they are."""

import pytest

from pardnn.graph.file import fingerprint
from testbed import kept_graphs


@pytest.mark.parametrize("name", ["wresnet_50_4"])
def test_a_kept_graph_is_what_capture_gives(name):
    """If it is not: `python -m bench capture-zoo`."""
    assert fingerprint(kept_graphs.capture(name)) == fingerprint(kept_graphs.load(name))
