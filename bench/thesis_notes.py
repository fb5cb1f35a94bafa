"""The prose of the page: what the figures are, and why some differ from the thesis's."""

HEAD = """**Simulated**, all but the planning times: no V100 was used. Steps are captured from
PyTorch at full size (`bench/zoo/`, `bench/graphs/`), sizes at other batches are affine between two
captures
(`bench/thesis_batch.py`), op times are the `v100` preset's roofline, links are NVSwitch's 300 GB/s
and 25 us, 10 % of each device's memory stays in reserve. Numbers of the thesis are Qararyah's,
chapter 6. Planning times are CPU seconds after the kernels are compiled.
"""

DISAGREEMENTS = ""
