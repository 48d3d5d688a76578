from headrace.host.memory import free_memory


def test_free_memory_is_a_plausible_number_of_bytes() -> None:
    assert 2**20 < free_memory() < 2**45
