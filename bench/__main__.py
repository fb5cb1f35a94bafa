"""The quick benchmarks, a few minutes on one core."""

from bench.placement import main

if __name__ == "__main__":
    main(["--ops", "1000", "--devices", "4,16", "--scale", "1000,10000"])
