"""Generated code in a file, loaded as a Python module.

Only code that `rank_code` has just written, or that a user asks to run, is loaded.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from pardnn.backends.torch.runtime.executor import CodeStep
from pardnn.errors import UserCodeError, told


def load_step(path: Path) -> CodeStep:
    """Return the function `step` of a rank's file.

    Raises:
        UserCodeError: E110, if it raises when it is loaded or has no such function.
    """
    name = f"pardnn_code_{path.stem}"
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # debuggers look modules up by name
    try:
        specification.loader.exec_module(module)
        return module.step
    except Exception as error:
        raise UserCodeError(f"while loading {path}: {told(error)}") from error
