"""Operators without a description, each with its reason. All devices run them whole."""

_BEGINS = "no argument of the call says where a shard begins"
_RESERVE = "its kernel keeps a result for the backward pass in a layout of its own"
_DRAWS = "not described yet"
_DYNAMIC = "the shape of the result depends on the data"
_LENGTHS = "targets have lengths of their own, and the longest of a shard shapes its results"
_MASK = "where a value comes from depends on the mask before it"
_MIDDLE = "the middle of all elements: partial results of the call do not suffice"
_NUMBER = "its result is a host number, not a tensor"
_SCALES = "its scales are in a layout of its kernel's own"
_SPARSE = "sparse tensors: which elements a shard holds depends on the data"
_STORAGE = "it addresses storage, whose order a shard does not keep"

#: Operator, or one overload of it, to reason. What is not here is unknown, and runs whole too.
WITHOUT: dict[str, str] = {
    "aten._amp_foreach_non_finite_check_and_unscale_": "it writes its flag in place: a reduction",
    "aten._batch_norm_with_update": _RESERVE,
    "aten._chunk_cat": "it pads and flattens: one dim of its result holds many of its inputs'",
    "aten._ctc_loss": _LENGTHS,
    "aten._ctc_loss_backward": _LENGTHS,
    "aten._efficientzerotensor": "it has no storage that could be cut",
    "aten._euclidean_dist": "not yet: distances by one product, as `_cdist_forward` has them",
    "aten._histogramdd_bin_edges": "edges lie between the minimum and maximum of all points",
    "aten._linalg_check_errors": "it only raises",
    "aten._local_scalar_dense": _NUMBER,
    "aten._pdist_forward": "pairs of rows are enumerated in a triangle; not affine",
    "aten._scaled_mm": _SCALES,
    "aten._scaled_mm_v2": _SCALES,
    "aten._sparse_mm_reduce_impl": _SPARSE,
    "aten._sparse_mm_reduce_impl_backward": _SPARSE,
    "aten._to_sparse": _SPARSE,
    "aten._unique": _DYNAMIC,
    "aten._unique2": _DYNAMIC,
    "aten.allclose": _NUMBER,
    "aten.as_strided": _STORAGE,
    "aten.as_strided_copy": _STORAGE,
    "aten.as_strided_scatter": _STORAGE,
    "aten.batch_norm_backward": _RESERVE,
    "aten.bincount": _DYNAMIC,
    "aten.block_diag": "the place of a matrix depends on the sizes of those before it, in two dims",
    "aten.dist": "a root is taken of the sum: partial results of the call do not suffice",
    "aten.equal": _NUMBER,
    "aten.eye": _BEGINS,
    "aten.hash_tensor": "torch does no arithmetic on its dtype, uint64, so no check could be made",
    "aten.linalg_lstsq": "which results it fills depends on the driver, some on the data",
    "aten.linspace": "steps are rounded from both ends: shards of it would have other bits",
    "aten.logspace": "steps are rounded from both ends: shards of it would have other bits",
    "aten.masked_scatter": _MASK,
    "aten.masked_scatter_backward": _MASK,
    "aten.masked_select": _DYNAMIC,
    "aten.mkldnn_rnn_layer": "its time steps depend on each other, and its workspace is opaque",
    "aten.mkldnn_rnn_layer_backward": "it reads a workspace that is opaque",
    "aten.median.default": _MIDDLE,
    "aten.multinomial": "it draws row by row from one stream, as many numbers as the data require",
    "aten.nanmedian.default": _MIDDLE,
    "aten.nonzero": _DYNAMIC,
    "aten.nonzero_static": "the position of an element in the result depends on all before it",
    "aten.normal.Tensor_Tensor": _DRAWS,
    "aten.normal.Tensor_float": _DRAWS,
    "aten.normal.float_Tensor": _DRAWS,
    "aten.normal.float_float": _DRAWS,
    "aten.put": "places are counted through the whole tensor",
    "aten.repeat_interleave": _DYNAMIC,
    "aten.resize": _STORAGE,
    "aten.resize_as": _STORAGE,
    "aten.rrelu_with_noise": "it draws only for negative elements: how many depends on the data",
    "aten.set_": _STORAGE,
    "aten.sparse_mask": _SPARSE,
    "aten.sparse_sampled_addmm": _SPARSE,
    "aten.sym_numel": _NUMBER,
    "aten.sym_size": _NUMBER,
    "aten.sym_storage_offset": _NUMBER,
    "aten.sym_stride": _NUMBER,
    "aten.tril_indices": _BEGINS,
    "aten.triu_indices": _BEGINS,
    "aten.unique": _DYNAMIC,
    "aten.unique_consecutive": _DYNAMIC,
    "aten.unique_dim": _DYNAMIC,
}

#: Described, and yet each of these calls runs whole: operator to reason.
WHOLE: dict[str, str] = {
    "aten.empty_permuted": "strides: it is unknown how a shard of them is laid out",
    "aten.empty_strided": "strides: it is unknown how a shard of them is laid out",
    "aten.new_empty_strided": "strides: it is unknown how a shard of them is laid out",
    "aten.scalar_tensor": "one number",
}


def reason_without(kind: str) -> str | None:
    """Return why an operator has no description; None if no reason is listed.

    Args:
        kind: Such as "aten.nonzero.default".
    """
    whole = kind.replace("::", ".")
    name = ".".join(whole.split(".")[:2])
    return WITHOUT.get(whole) or WITHOUT.get(name) or WITHOUT.get(name.removesuffix("_"))
