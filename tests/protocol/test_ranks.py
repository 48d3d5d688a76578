from headrace.protocol import codec
from headrace.protocol.plan import Plan
from headrace.protocol.ranks import Ranks


def test_the_shards_of_a_stage_are_numbered_side_by_side() -> None:
    ranks = Ranks(num_stages=3, num_shards=2)
    assert ranks.count == 6
    places = [(ranks.stage_of(rank), ranks.shard_of(rank)) for rank in range(ranks.count)]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [ranks.number(*place) for place in places] == list(range(6))
    assert ranks.by_stage("abcdef") == ["ab", "cd", "ef"]


def test_people_hear_of_shards_only_where_a_stage_has_several() -> None:
    assert Ranks(2).name(1) == "stage 1"
    assert Ranks(2, 2).name(3) == "stage 1 shard 1"


def test_every_rank_is_sent_every_plan() -> None:
    plan = Plan(0, 0, 0, [], [], [], [])
    assert len(codec.encode_plan(plan, Ranks(3, 2))) == 6
