import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.sampling.sampler import token_logprobs

VOCAB = 50


@given(
    counts=st.lists(st.sampled_from([0, 1, 5, VOCAB - 1, VOCAB, VOCAB + 3, -1]), max_size=20),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30, deadline=None)
def test_logprobs_are_those_of_log_softmax_with_the_likeliest_first(
    counts: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(counts), VOCAB, generator=generator) * 4
    tokens = torch.randint(VOCAB, (len(counts),), generator=generator)
    reports = token_logprobs(logits, tokens, counts)
    assert reports == token_logprobs(logits, tokens.tolist(), counts)
    assert len(reports) == len(counts)
    for row, report in enumerate(reports):
        count = VOCAB if counts[row] in (-1, VOCAB + 3) else counts[row]
        expected = torch.log_softmax(logits[row].double(), -1)
        token = int(tokens[row])
        order = expected.argsort(descending=True).tolist()
        assert report.ids == [token, *order[:count]]
        assert report.rank == order.index(token) + 1
        torch.testing.assert_close(
            torch.tensor(report.logprobs, dtype=torch.float64),
            expected[report.ids],
            rtol=1e-5,
            atol=1e-5,
        )


def test_equals_come_by_id_and_share_a_rank() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 0.0]])
    (report,) = token_logprobs(logits, [4], [3])
    assert report.ids == [4, 1, 3, 0]
    assert report.rank == 3
    (everything,) = token_logprobs(logits, [3], [-1])
    assert everything.ids == [3, 1, 3, 0, 2, 4, 5]
    assert everything.rank == 1


def test_a_token_without_probability_is_reported_as_such() -> None:
    logits = torch.tensor([[0.0, -torch.inf]])
    (report,) = token_logprobs(logits, [1], [1])
    assert report.ids == [1, 0]
    assert report.logprobs == [-torch.inf, 0.0]
    assert report.rank == 2


def test_a_row_reports_the_same_alone_and_in_any_batch() -> None:
    vocab_size = 49157
    logits = (
        torch.randn(20, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    ).bfloat16()
    counts = [n % 7 for n in range(19)] + [300]
    together = token_logprobs(logits, list(range(20)), counts)
    for row in range(20):
        alone = token_logprobs(logits[row : row + 1], [row], counts[row : row + 1])
        assert alone == [together[row]]
