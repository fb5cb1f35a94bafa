"""The quick benchmarks, a few minutes on one core; `capture-zoo` captures the zoo's graphs."""

import sys

from bench import placement, zoo_graphs

if __name__ == "__main__":
    if sys.argv[1:2] == ["capture-zoo"]:
        zoo_graphs.main(sys.argv[2:])
    else:
        placement.main(["--ops", "1000", "--devices", "4,16", "--scale", "1000,10000"])
