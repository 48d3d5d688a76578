"""The simulation finds faults: each of those planted, within a bounded number of seeds."""

from collections.abc import Callable

import pytest

from mutants import MOST_SEEDS, MUTANTS, Mutant, catch


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault)
def test_a_planted_fault_is_found(
    mutant: Mutant, record_property: Callable[[str, object], None]
) -> None:
    found = catch(mutant, mutant.seed)
    assert found is not None, f"{MOST_SEEDS} seeds do not find it"
    record_property("seeds", found.seeds)
    record_property("caught by", repr(found.error))
