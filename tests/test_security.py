"""No file and no name can run code: what could is not in the package at all."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.sources import PACKAGE, SOURCES, nodes_of

MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "torch.load", "torch.save", "os.system", "os.popen", "os.execv", "os.execvp", "os.spawnv",
    "numpy.load", "np.load", "yaml.load", "marshal.loads", "pickle.loads", "pickle.load",
    "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn", "tempfile.mktemp",
    "builtins.eval", "builtins.exec",
}  # fmt: skip
ENDS = {call.rpartition(".")[2] for call in CALLS}
#: They pickle what they send: a message of another rank would be code.
SUFFIXES = {
    "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list",
    "send_object_list", "recv_object_list", "read_pickle", "eval_", "unsafe_load",
}  # fmt: skip


#: The source of a function that is running, where it gives the very code that runs; its test is
#: `test_a_file_that_was_edited_since_is_not_run`.
ALLOWED = {"backends/torch/capture/choices/normal_forms.py": {"compile"}}


def violations(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Places in code that could run what a file or a name says."""
    for node in nodes:
        where = f"line {getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            yield from (
                f"{where}: import {alias.name}"
                for alias in node.names
                if alias.name.split(".")[0] in MODULES
            )
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imported = {alias.name for alias in node.names}
            if (node.module or "").split(".")[0] in MODULES or names & CALLS or imported & SUFFIXES:
                yield f"{where}: {ast.unparse(node)}"
        elif isinstance(node, ast.Name) and node.id in BUILTINS:
            yield f"{where}: {node.id}"
        elif isinstance(node, ast.Attribute):
            if node.attr in SUFFIXES or (node.attr in ENDS and ast.unparse(node) in CALLS):
                yield f"{where}: {ast.unparse(node)}"
        elif isinstance(node, ast.keyword):
            literal = getattr(node.value, "value", None)
            if node.arg in ("shell", "allow_pickle") and literal is not False:
                yield f"{where}: {node.arg}={ast.unparse(node.value)}"
            if node.arg == "weights_only" and literal is not True:
                yield f"{where}: weights_only={ast.unparse(node.value)}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_in_the_package_runs_data(path: Path) -> None:
    found = violations(nodes_of(path))
    allowed = ALLOWED.get(path.relative_to(PACKAGE).as_posix(), set())
    assert [each for each in found if each.rpartition(" ")[2] not in allowed] == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import a, marshal as m",
        "from pickle import loads",
        "from os import system",
        "from torch import load",
        "def f():\n    import yaml",
        "eval('1')",
        "run = exec",
        "__import__('os')",
        "torch.load(path)",
        "f = os.system",
        "np.load(p)",
        "subprocess.run(c, shell=True)",
        "subprocess.run(c, shell=x)",
        "np.lib.format.read_array(f, allow_pickle=True)",
        "g(weights_only=False)",
        "dist.broadcast_object_list(x)",
        "torch.distributed.all_gather_object(a, b)",
    ],
)
def test_each_rule_fires(code: str) -> None:
    assert list(violations(ast.walk(ast.parse(code))))


@pytest.mark.parametrize(
    "code",
    [
        "model.eval()",
        "subprocess.run(c, shell=False)",
        "json.loads(x)",
        "re.compile(x)",
        "m.load()",
    ],
)
def test_no_rule_fires_on(code: str) -> None:
    assert not list(violations(ast.walk(ast.parse(code))))
