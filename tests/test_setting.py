import math
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from headrace.config import EngineConfig
from headrace.errors import UsageError
from headrace.serving.settings import ServerSettings
from headrace.setting import Setting, check_settings, declared_settings, size_in_bytes


@dataclass(frozen=True, kw_only=True)
class Kettle:
    litres: Annotated[float, Setting("How much it holds.", above=0, most=5)] = 1.5
    cups: Annotated[int | None, Setting("How many it fills.", least=1)] = None
    degrees: Annotated[int, Setting("How hot.", flag="--heat", least=0, most=100)] = 100
    names: Annotated[tuple[str, ...], Setting("What it is called.")] = field(default=())
    memory: Annotated[int | str, Setting("Of its chip.", size=True)] = "4KiB"
    whistles: bool = True

    def __post_init__(self) -> None:
        check_settings(self)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"litres": 0.0}, "--litres must be above 0 and at most 5, not 0.0"),
        ({"litres": 5.1}, "--litres must be above 0 and at most 5, not 5.1"),
        ({"litres": math.nan}, "--litres must be above 0 and at most 5, not nan"),
        ({"litres": "much"}, "litres must be a number, not 'much'"),
        ({"cups": 0}, "--cups must be at least 1, not 0"),
        ({"degrees": 101}, "--heat must be from 0 to 100, not 101"),
        ({"names": (5,)}, r"names must be a list of texts, not \(5,\)"),
        ({"memory": "much"}, "--memory 'much' is not a size such as 2GiB or 500MB"),
        ({"memory": 0}, "--memory must be at least 1 byte"),
    ],
)
def test_a_value_out_of_range_is_told_in_the_words_of_the_declaration(
    wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=f"^{message}$"):
        Kettle(**wrong)


def test_the_ends_of_a_range_are_in_it_and_none_is_no_value() -> None:
    Kettle(litres=5, cups=1, degrees=0, names=("a",), memory="1")
    Kettle(cups=None, degrees=100)


def test_infinity_is_in_no_range() -> None:
    with pytest.raises(UsageError, match="--max-itl-ms must be above 0, not inf"):
        EngineConfig(model="m", max_itl_ms=math.inf)


def test_only_what_is_declared_is_a_setting() -> None:
    assert list(declared_settings(Kettle)) == ["litres", "cups", "degrees", "names", "memory"]


@pytest.mark.parametrize("settings", [EngineConfig, ServerSettings])
def test_every_default_is_in_its_own_range(settings: type) -> None:
    for declared in declared_settings(settings).values():
        if declared.name not in ("model", "served_model_names"):
            declared.check(declared.default)


def test_a_config_can_be_given_whole_and_changed() -> None:
    config = EngineConfig.of("LLM", EngineConfig(model="m", seed=3), {"block_size": 8})
    assert config == EngineConfig(model="m", seed=3, block_size=8)
    with pytest.raises(UsageError, match="LLM has no setting blocksize: did you mean block_size"):
        EngineConfig.of("LLM", config, {"blocksize": 8})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000000", 10**6),
        ("2GiB", 2**31),
        ("500MB", 5 * 10**8),
        ("1.5 kib", 1536),
        ("3g", 3 * 10**9),
    ],
)
def test_sizes_have_the_usual_units(text: str, size: int) -> None:
    assert size_in_bytes(text) == size_in_bytes(size) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "2TiBs", "1 2"])
def test_what_is_no_size_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        size_in_bytes(text)
