"""Scaled dot-product attention in one call, and its gradient."""

from __future__ import annotations

from typing import Any

from pardnn.shard.tdl.language import Apply, At, Loops, Opaque, Sum, Tensor
from pardnn.shard.tdl.registry import describe_aten

attend = Opaque("attend")

ALL = slice(None)


class Heads:
    """Query heads that share a key and value head: `g` runs over the latter."""

    def __init__(self, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> None:
        self.shared = key.shape[1]
        self.size = query.shape[1] // self.shared
        self.mask = mask
        self.is_causal = is_causal

    def __call__(self, g: Any) -> slice:
        """Return the query heads of key head `g`."""
        return slice(g * self.size, g * self.size + self.size)

    def masked(self, b: Any, g: Any, s: Any, t: Any) -> list[Any]:
        """Return the elements of the mask, if there is one."""
        return [] if self.mask is None else [self.mask.broadcast((b, self(g), s, t))]

    def loops(self, names: str, body: Any) -> Loops:
        """Return a lambda whose loop `g` runs over the shared heads."""
        return Loops(tuple(names.split()), body, {"g": self.shared})


@describe_aten("aten._scaled_dot_product_flash_attention_for_cpu")
def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: Any = None,
) -> Any:  # fmt: skip
    """Attention of each head, and the logarithm of its normaliser.

    Heads and samples can be cut; queries too, unless the mask is causal, which is counted from the
    first query and key.
    """
    heads = Heads(query, key, attn_mask, is_causal)

    def head(b: Any, g: Any, s: Any) -> Apply:
        q = ALL if is_causal else s
        keys = [tensor[b, g, :, :] for tensor in (key, value)]
        found = attend(query[b, heads(g), q, :], *keys, *heads.masked(b, g, q, ALL))
        return found[s] if is_causal else found

    def output(b: Any, g: Any, s: Any, d: Any) -> At:
        return At((b, heads(g), s, d), attend(head(b, g, s))[d])

    def normaliser(b: Any, g: Any, s: Any) -> At:
        return At((b, heads(g), s), head(b, g, s))

    return heads.loops("b g s d", output), heads.loops("b g s", normaliser)


@describe_aten("aten._scaled_dot_product_flash_attention_for_cpu_backward")
def flash_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    dropout_p: float, is_causal: bool, *, attn_mask: Tensor | None = None, scale: Any = None,
) -> Any:  # fmt: skip
    """Gradients of query, key and value; given the normalisers, keys too are independent."""
    heads = Heads(query, key, attn_mask, is_causal)

    def term(b: Any, g: Any, s: Any, t: Any) -> Apply:
        rows = [tensor[b, heads(g), s, :] for tensor in (grad_out, query, out)]
        columns = [tensor[b, g, t, :] for tensor in (key, value)]
        return attend(*rows, *columns, logsumexp[b, heads(g), s], *heads.masked(b, g, s, t))

    if is_causal:
        of_query = lambda b, g, s, d: At((b, heads(g), s, d), term(b, g, ALL, ALL)[s, d])  # noqa: E731
        of_key = lambda b, g, t, d: term(b, g, ALL, ALL)[t, d]  # noqa: E731
    else:
        of_query = lambda b, g, s, d: At(  # noqa: E731
            (b, heads(g), s, d), Sum(lambda t: term(b, g, s, t)[d])
        )
        of_key = lambda b, g, t, d: Sum(lambda s: term(b, g, s, t)[d])  # noqa: E731
    return heads.loops("b g s d", of_query), of_key, of_key
