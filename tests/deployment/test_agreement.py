"""Hosts that cannot work together are told so, both of them by name."""

import pytest
from msgspec.structs import replace

from headrace.deployment.agreement import check_agreement
from headrace.errors import StartError
from headrace.protocol.hosts import HostFacts, TensorDigest, WeightsDigest
from machines import FOUR_CORES

BOB = replace(FOUR_CORES, name="bob")


def with_weights(host: HostFacts, total: str, **tensors: bytes) -> HostFacts:
    named = tuple(TensorDigest(name, digest) for name, digest in tensors.items())
    return replace(host, weights=WeightsDigest(total, named))


def refusal(*hosts: HostFacts) -> str:
    with pytest.raises(StartError) as refused:
        check_agreement(hosts)
    return str(refused.value)


def test_like_hosts_agree_and_so_do_those_without_the_model() -> None:
    has = with_weights(FOUR_CORES, "aa", x=b"1")
    check_agreement([has, with_weights(BOB, "aa", x=b"1"), BOB])
    check_agreement([FOUR_CORES])


def test_another_version_is_refused_naming_both() -> None:
    assert refusal(FOUR_CORES, replace(BOB, version="2")) == (
        "host bob has Headrace 2, ada 1: install the same on both"
    )


def test_other_weights_are_refused_naming_both_and_the_first_tensor_that_differs() -> None:
    ada = with_weights(FOUR_CORES, "a" * 32, x=b"1", y=b"1")
    words = refusal(ada, with_weights(BOB, "b" * 32, x=b"1", y=b"2"))
    assert "hosts ada and bob have different weights (aaaaaaaa and bbbbbbbb)" in words
    assert "tensor y differs" in words
    assert "bob has a tensor z, ada has none" in refusal(
        ada, with_weights(BOB, "b", x=b"1", y=b"1", z=b"1")
    )
    assert "ada has a tensor y, bob has none" in refusal(ada, with_weights(BOB, "b", x=b"1"))


def test_hosts_of_one_name_are_told_apart_by_their_addresses() -> None:
    here, there = replace(FOUR_CORES, address="10.0.0.1"), replace(FOUR_CORES, address="10.0.0.2")
    words = refusal(with_weights(here, "a", x=b"1"), with_weights(there, "b", x=b"2"))
    assert "hosts ada (10.0.0.1) and ada (10.0.0.2) have different weights" in words
