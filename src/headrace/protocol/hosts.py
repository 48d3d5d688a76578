"""Hosts: what each has, what lies on it, and how far they are from each other."""

import msgspec


class KernelRates(msgspec.Struct, frozen=True, array_like=True):
    """What all cores of a host together do with weights of one type.

    read_bytes_per_s: of weights, in products of one row. operations_per_s: multiplications and
    additions, in products of many rows.
    """

    read_bytes_per_s: float
    operations_per_s: float


class HostSpeed(msgspec.Struct, frozen=True, array_like=True):
    """How fast a host is. kernels: the path that they take. rates: by the dtype's torch name."""

    kernels: str
    rates: dict[str, KernelRates]


class TensorDigest(msgspec.Struct, frozen=True, array_like=True):
    """A tensor's name in the files, and the hash of its shape, type, size and samples of its
    bytes."""

    name: str
    digest: bytes


class WeightsDigest(msgspec.Struct, frozen=True, array_like=True):
    """Of all tensors, in the order of their names. total: the hash of them all, in hexadecimal."""

    total: str
    tensors: tuple[TensorDigest, ...]


class LinkFigures(msgspec.Struct, frozen=True, array_like=True):
    """Of the way from one host to another. latency_s: one way."""

    latency_s: float
    bytes_per_s: float


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A host as it is when ranks are about to be placed.

    name: its own, for people. address: by which others reach it, empty for this very host. version:
    of Headrace. allowed_cpus: those that its processes may use. cores: those of them that are worth
    a thread each, in ascending order. free_memory: in bytes. computes_bfloat16: whether the cores
    multiply it; bfloat16_tiles: by whole tiles (AMX). native_kernels: whether there are any. speed:
    None on one host alone, where nothing hangs on it, and on one that has the engine and is to have
    no stages. weights: of the model's files, None where there are none.
    """

    name: str
    address: str
    version: str
    allowed_cpus: frozenset[int]
    cores: tuple[int, ...]
    free_memory: int
    computes_bfloat16: bool
    native_kernels: bool
    bfloat16_tiles: bool = False
    speed: HostSpeed | None = None
    weights: WeightsDigest | None = None

    @property
    def label(self) -> str:
        """What people call it: hosts of one name differ by their addresses."""
        return f"{self.name} ({self.address})" if self.address else self.name
