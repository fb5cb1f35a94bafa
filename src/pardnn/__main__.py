"""The door of the command line: `pardnn` and `python -m pardnn`.

Two things go wrong outside the commands: an interrupt while they load, and threads of the user's
code that outlive them.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import threading
import time
from typing import NoReturn

#: How long threads of the user's code may go on once a command is done, seconds.
THREADS_S = 1.0
_OUT_OF_MEMORY = b"E413 the system has too little room: out of memory (`ulimit -a` shows limits)\n"


def main() -> NoReturn:
    """Run the command line and exit with its status."""
    try:
        from pardnn.cli import main as command_line

        command_line.main()
    except KeyboardInterrupt:  # while it was loading: later ones are told there
        if "--json" in sys.argv:
            error = {"code": "E130", "exit": 130, "message": "interrupted", "details": {}}
            print(json.dumps({"error": error}))
        _leave(130)
    except (MemoryError, SystemError):  # while an error was told: there is no room for that
        os.write(2, _OUT_OF_MEMORY)
        _leave(4)
    except SystemExit as end:
        _leave(end.code if isinstance(end.code, int) else 0)
    _leave(0)


def _leave(status: int) -> NoReturn:
    """Exit, also where a thread that is no daemon would keep the process.

    `python -m` ends itself by SIGINT, whatever the status, once an interrupt has come in `exec` of
    a text, as dataclasses call it while modules load.
    """
    end = time.monotonic() + THREADS_S
    others = [each for each in threading.enumerate() if each is not threading.current_thread()]
    threads = [each for each in others if not each.daemon]
    for each in threads:
        each.join(max(0.0, end - time.monotonic()))
    gc.freeze()  # to look for cycles in torch's objects takes 0.4 to 0.7 CPU s
    if status == 130 or any(each.is_alive() for each in threads):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
