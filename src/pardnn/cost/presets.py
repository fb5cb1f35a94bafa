"""Device models: the figures a roofline needs, each with its source.

Peaks are those of the data sheets, dense (no structured sparsity); `efficiency` is the share of
them that library kernels reach. Figures marked "assumed" are not from a source: they are of the
usual order of magnitude and replaced by measurement (`--costs measured`).

float32 matrix products do not use TF32, because PyTorch leaves it off unless the user asks
(`torch.backends.cuda.matmul.allow_tf32`); convolutions do on Ampere and later, because
`torch.backends.cudnn.allow_tf32` is on (PyTorch documentation, "CUDA semantics", TF32).
"""

from __future__ import annotations

from collections.abc import Mapping

from pardnn.cost.cpu_probe import this_cpu
from pardnn.cost.flops import Unit
from pardnn.cost.roofline import DeviceModel
from pardnn.errors import UsageError

_TERA = 1e12
_GB = 1e9


def _flops(
    vector: float,
    double: float,
    *,
    matrix_double: float | None = None,
    half: float | None = None,
    bfloat: float | None = None,
    tf32: float | None = None,
) -> Mapping[Unit, Mapping[str, float]]:
    matmul = {"float32": vector, "float64": matrix_double or double}
    if half is not None:
        matmul["float16"] = half
    if bfloat is not None:
        matmul["bfloat16"] = bfloat
    conv = matmul | ({"float32": tf32} if tf32 is not None else {})
    return {"matmul": matmul, "conv": conv, "vector": {"float32": vector, "float64": double}}


_ASSUMED_LAUNCH = (
    "assumed: eager PyTorch issues an op per about 5 us from the host; the kernel alone starts in "
    "2 to 4 us (NVIDIA blog 'Getting Started with CUDA Graphs', 2019: 3.8 us a kernel in a loop "
    "of asynchronous launches of a 2.9 us kernel, V100)"
)
_HOPPER_SHARE = (
    "efficiency assumed: 0.8 of the dense peak in matrix products, 0.7 in convolutions, "
    "0.9 of the memory bandwidth"
)

V100 = DeviceModel(
    name="v100",
    flops=_flops(15.7 * _TERA, 7.8 * _TERA, half=125 * _TERA),
    efficiency={"matmul": 0.8, "conv": 0.7, "vector": 0.5},
    bandwidth=750 * _GB,
    launch=5e-6,
    width=80.0 * 2048,
    fill=750e9 * 1e-6,
    sources={
        "flops": "NVIDIA V100 Tensor Core GPU data sheet (2020), V100 SXM2: 15.7 TFLOPS single, "
        "7.8 double, 125 deep learning (float16); bfloat16 has no unit: rate of float32",
        "efficiency": "assumed; Markidis et al., 'NVIDIA Tensor Core Programmability, Performance "
        "& Precision' (2018) measured 83 of 125 TFLOPS with cuBLAS",
        "bandwidth": "Jia et al., 'Dissecting the NVIDIA Volta GPU Architecture via "
        "Microbenchmarking' (2018): 750 measured; data sheet: 900 GB/s",
        "launch": _ASSUMED_LAUNCH,
        "width": "NVIDIA Tesla V100 GPU Architecture white paper: 80 SMs x 2048 threads",
        "fill": "assumed: 1 us of memory latency under load",
    },
)

K80 = DeviceModel(
    name="k80",
    flops=_flops(4.37 * _TERA, 1.455 * _TERA),
    efficiency={"matmul": 0.7, "conv": 0.6, "vector": 0.5},
    bandwidth=191 * _GB,
    launch=10e-6,
    width=13.0 * 2048,
    fill=191e9 * 1e-6,
    sources={
        "flops": "NVIDIA Tesla K80 data sheet (2014): 8.73 TFLOPS single, 2.91 double with GPU "
        "Boost for the board of two GK210; this is one of the two. No half precision unit",
        "efficiency": "assumed",
        "bandwidth": "Jia et al. (2018): 191 measured; data sheet: 480 GB/s for two",
        "launch": "assumed: twice the figure of later devices, as its hosts are slower",
        "width": "NVIDIA Kepler GK110/GK210 white paper: 13 SMX enabled x 2048 threads",
        "fill": "assumed: 1 us of memory latency under load",
    },
)

A100 = DeviceModel(
    name="a100",
    flops=_flops(
        19.5 * _TERA,
        9.7 * _TERA,
        matrix_double=19.5 * _TERA,
        half=312 * _TERA,
        bfloat=312 * _TERA,
        tf32=156 * _TERA,
    ),
    efficiency={"matmul": 0.8, "conv": 0.6, "vector": 0.5},
    bandwidth=0.9 * 2039 * _GB,
    launch=5e-6,
    width=108.0 * 2048,
    fill=0.9 * 2039e9 * 1e-6,
    sources={
        "flops": "NVIDIA A100 Tensor Core GPU data sheet (2021), 80GB SXM: FP32 19.5 TFLOPS, "
        "FP64 9.7, FP64 tensor 19.5, TF32 156, FP16 and BF16 312, all dense",
        "efficiency": "assumed",
        "bandwidth": "data sheet: 2,039 GB/s; 0.9 of it assumed",
        "launch": _ASSUMED_LAUNCH,
        "width": "NVIDIA A100 Tensor Core GPU Architecture white paper: 108 SMs x 2048 threads",
        "fill": "assumed: 1 us of memory latency under load",
    },
)


def _hopper(name: str, bandwidth: float, sheet: str) -> DeviceModel:
    """Return an H100 or H200: one GH100 chip with different memories."""
    return DeviceModel(
        name=name,
        flops=_flops(
            67 * _TERA,
            34 * _TERA,
            matrix_double=67 * _TERA,
            half=989 * _TERA,
            bfloat=989 * _TERA,
            tf32=494 * _TERA,
        ),
        efficiency={"matmul": 0.8, "conv": 0.7, "vector": 0.5},
        bandwidth=0.9 * bandwidth,
        launch=5e-6,
        width=132.0 * 2048,
        fill=0.9 * bandwidth * 1e-6,
        sources={
            "flops": f"{sheet}: FP32 67 TFLOPS, FP64 34, FP64 tensor 67, TF32 989, FP16 and BF16 "
            "1,979 with sparsity; half of the last three is dense",
            "efficiency": _HOPPER_SHARE,
            "bandwidth": f"{sheet}: {bandwidth / 1e12:g} TB/s; 0.9 of it assumed",
            "launch": _ASSUMED_LAUNCH,
            "width": "NVIDIA H100 Tensor Core GPU Architecture white paper: 132 SMs x 2048 threads",
            "fill": "assumed: 1 us of memory latency under load",
        },
    )


H100 = _hopper("h100", 3.35e12, "NVIDIA H100 Tensor Core GPU data sheet, SXM")
H200 = _hopper("h200", 4.8e12, "NVIDIA H200 Tensor Core GPU data sheet, SXM")

#: Presets that need no measurement. "cpu" is measured on this machine: see `cost.cpu_probe`.
DEVICE_MODELS: Mapping[str, DeviceModel] = {
    model.name: model for model in (V100, K80, A100, H100, H200)
}

#: Every name that `--costs` takes for a roofline.
PRESET_NAMES = (*DEVICE_MODELS, "cpu")


def device_model(name: str, *, threads: int = 1) -> DeviceModel:
    """Return the model of that name; "cpu" is this machine's, measured once and cached.

    Args:
        name: One of `PRESET_NAMES`.
        threads: For "cpu" only: how many threads an op may use.

    Raises:
        UsageError: E231, naming the presets there are.
    """
    if name == "cpu":
        return this_cpu(threads)
    if name not in DEVICE_MODELS:
        raise UsageError(
            f"no cost preset is called {name!r:.80}. There are {', '.join(PRESET_NAMES)};\n"
            "--costs measured times the ops on this machine instead.",
            code="E231",
            details={"presets": list(PRESET_NAMES)},
        )
    return DEVICE_MODELS[name]
