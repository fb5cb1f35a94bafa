"""Operators that have no description, each with its reason. They run whole, never wrong."""

_DYNAMIC = "the shape of the result depends on the data"
_NUMBER = "its result is a number of the host, no tensor"
_STORAGE = "it addresses storage, whose order a shard does not keep"

#: Operator to reason. What is in neither list is unknown, and runs whole too.
WITHOUT: dict[str, str] = {
    "aten._amp_foreach_non_finite_check_and_unscale_": "it writes its flag in place: a reduction",
    "aten._embedding_bag_backward": "bags are told by offsets, which differ for each shard",
    "aten._local_scalar_dense": _NUMBER,
    "aten._pdist_forward": "pairs of rows are enumerated in a triangle; not affine",
    "aten.as_strided": _STORAGE,
    "aten.as_strided_scatter": _STORAGE,
    "aten.masked_scatter": "where a value comes from depends on the mask before it",
    "aten.masked_select": _DYNAMIC,
    "aten.mkldnn_rnn_layer": "its time steps depend on each other, and its workspace is opaque",
    "aten.mkldnn_rnn_layer_backward": "it reads a workspace that is opaque",
    "aten.nonzero": _DYNAMIC,
    "aten.set_": _STORAGE,
    "aten.sym_numel": _NUMBER,
    "aten.sym_size": _NUMBER,
    "aten.sym_storage_offset": _NUMBER,
    "aten.sym_stride": _NUMBER,
    "aten.unique": _DYNAMIC,
}


def reason_without(kind: str) -> str | None:
    """Return why an operator has no description, None if nothing is known about it.

    Args:
        kind: Such as "aten.nonzero.default".
    """
    name = ".".join(kind.replace("::", ".").split(".")[:2])
    return WITHOUT.get(name)
