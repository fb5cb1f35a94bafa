"""The secret of a run, by which ranks authenticate each other and values in the shared store.

Anyone who can reach the store of torchrun can write to it, and anyone who can reach a port of gloo
can take a rank's place. With a secret that only the ranks have, every value in the store carries an
HMAC over its key and content, and before the first message any two ranks of a process group answer
each other's challenge. Nothing is encrypted.

`pardnn run` makes a secret for each run. Under torchrun it is in `PARDNN_SECRET`, the same on all
nodes; without it nothing is checked.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence

import torch
import torch.distributed as dist

from pardnn.errors import RankError

VARIABLE = "PARDNN_SECRET"
_NONCE_BYTES = 32
_DIGEST_BYTES = hashlib.sha256().digest_size
#: A tag beyond those of messages, see `Channel`.
_CHALLENGE_TAG, _ANSWER_TAG = 1 << 27, 1 << 28


class ForgedError(RankError, RuntimeError):
    """Something comes from outside the run; a failure detector ignores it."""

    default_code = "E607"


def make_secret() -> str:
    """Return a secret for a new run."""
    return secrets.token_hex(32)


def run_secret() -> bytes | None:
    """Return the secret of this run; None if there is none."""
    return os.environ.get(VARIABLE, "").encode() or None


class SignedStore:
    """A store in which values are signed; counters (`add`) and the presence of keys are not.

    Args:
        plain: The store.
        secret: The secret of the run.
    """

    def __init__(self, plain: dist.Store, secret: bytes) -> None:
        self.plain = plain
        self._secret = secret

    def _signed(self, key: str, value: str) -> str:
        content = f"{len(key)}:{key}{value}".encode()
        return hmac.new(self._secret, content, hashlib.sha256).hexdigest() + value

    def _checked(self, key: str, found: bytes) -> bytes:
        value = found[2 * _DIGEST_BYTES :]
        expected = self._signed(key, value.decode(errors="replace")).encode()
        if not hmac.compare_digest(expected, found):
            raise ForgedError(
                f"what the store holds under {key!r:.80} is not from a rank of this run.\nGive "
                f"all ranks the same {VARIABLE}; if they have it, somebody else can write to the "
                "store."
            )
        return value

    def set(self, key: str, value: str) -> None:
        """Set a value."""
        self.plain.set(key, self._signed(key, value))

    def get(self, key: str) -> bytes:
        """Return a value.

        Raises:
            ForgedError: E607, if no rank of this run has set it.
        """
        return self._checked(key, self.plain.get(key))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a value if there is none; return the one in the store.

        Args:
            key: The key of the value.
            expected: Empty, which means that there is none.
            desired: The value.

        Raises:
            ForgedError: E607, if no rank of this run has set it.
        """
        assert not expected
        return self._checked(key, self.plain.compare_set(key, "", self._signed(key, desired)))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return self.plain.check(keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        return self.plain.add(key, amount)


def signed(store: dist.Store) -> dist.Store | SignedStore:
    """Return the store that this run's ranks use: signed, if there is a secret."""
    secret = run_secret()
    return store if secret is None else SignedStore(store, secret)


def counter(store: dist.Store | SignedStore, key: str) -> int:
    """Return a counter of a store, 0 if nobody has added to it."""
    plain = store.plain if isinstance(store, SignedStore) else store
    return int(plain.get(key)) if plain.check([key]) else 0


def prove_links(group: dist.ProcessGroup, rank: int, size: int) -> None:
    """Make any two ranks prove to each other, over gloo, that they have the run's secret.

    Args:
        group: A process group for CPU tensors.
        rank: This rank.
        size: Number of ranks.

    Raises:
        ForgedError: E607, naming the first rank that has another secret, or none.
    """
    secret = run_secret()
    if secret is None:
        return
    peers = [peer for peer in range(size) if peer != rank]
    own = {peer: secrets.token_bytes(_NONCE_BYTES) for peer in peers}
    theirs = _exchanged(group, peers, own, _CHALLENGE_TAG)
    answers = {peer: _answer(secret, theirs[peer], rank, peer) for peer in peers}
    found = _exchanged(group, peers, answers, _ANSWER_TAG)
    for peer in peers:
        if not hmac.compare_digest(found[peer], _answer(secret, own[peer], peer, rank)):
            raise ForgedError(
                f"the process that answers rank {rank} as rank {peer} does not have the secret of "
                f"this run.\nGive all ranks the same {VARIABLE}; if they have it, somebody else "
                "uses the port of that rank.",
                details={"rank": rank, "peer": peer},
            )


def _answer(secret: bytes, nonce: bytes, rank: int, peer: int) -> bytes:
    """Return what a rank answers to the challenge of a peer."""
    return hmac.new(secret, b"%d to %d:" % (rank, peer) + nonce, hashlib.sha256).digest()


def _exchanged(
    group: dist.ProcessGroup, peers: Sequence[int], sent: dict[int, bytes], tag: int
) -> dict[int, bytes]:
    """Send each peer 32 bytes, and return those of each."""
    works, received = [], {}
    for peer in peers:
        received[peer] = torch.zeros(_DIGEST_BYTES, dtype=torch.uint8)
        works.append(group.recv([received[peer]], peer, tag))
        content = torch.frombuffer(bytearray(sent[peer]), dtype=torch.uint8)
        works.append(group.send([content], peer, tag))
    for work in works:
        work.wait()
    return {peer: bytes(each.tolist()) for peer, each in received.items()}
