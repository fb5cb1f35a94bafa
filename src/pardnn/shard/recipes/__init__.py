"""Cuts that experts write by hand: data parallelism, ZeRO, Megatron's tensor parallelism."""
