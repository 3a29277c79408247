"""Drawing: bounds are checked, filters do what they say, a seed gives the same token whatever else happens."""

from typing import Any

import numpy as np
import pytest
import torch

from sala.backends.rows import uniform
from sala.backends.torch.sampler import adjust, filters, sample
from sala.errors import InputError
from sala.protocol import Row, Sampling

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("temperature", NAN), ("temperature", 1e308), ("temperature", "1"), ("temperature", True),
        ("top_p", 0), ("top_p", 1.1), ("top_p", NAN), ("top_k", -5), ("top_k", 1.5), ("min_p", 2), ("min_p", -0.1),
        ("repetition_penalty", 0), ("repetition_penalty", INF), ("presence_penalty", 3), ("frequency_penalty", -3),
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2.5), ("max_tokens", 1 << 40), ("seed", 1 << 70),
        ("seed", 1.0), ("logprobs", 21), ("logprobs", -1), ("stop", ("",)), ("stop", (3,)),
        ("logit_bias", {"a": 1}), ("logit_bias", {-1: 1}), ("logit_bias", {1: 1000}), ("logit_bias", {1: NAN}),
    ],
)  # fmt: skip
def test_bounds(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=field):
        Sampling(**{field: value})


def test_a_single_stop_string() -> None:
    assert Sampling(stop="x").stop == ("x",)  # type: ignore[arg-type]


def test_unknown_settings_are_errors() -> None:
    with pytest.raises(TypeError, match="temprature"):
        Sampling(temprature=1)  # type: ignore[call-arg]


def row(sampling: Sampling, position: int = 0, history: tuple[int, ...] = (), prompt_len: int = 0) -> Row:
    return Row((0,), position, (), 0, 0, sampling, history=history, prompt_len=prompt_len)


def test_greedy() -> None:
    assert sample(torch.tensor([0.0, 3.0, 1.0]), row(Sampling(temperature=0))).token == 1


def test_uniform_numbers_are_uniform_and_repeatable() -> None:
    numbers = np.array([uniform(seed, position) for seed in range(50) for position in range(200)])
    assert uniform(3, 4) == uniform(3, 4) != uniform(4, 3)
    assert 0 <= numbers.min() < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01
    histogram = np.histogram(numbers, 20, (0, 1))[0]
    assert (abs(histogram - 500) < 120).all()
    assert uniform(-5, 1) != uniform(5, 1)


def frequencies(logits: list[float], sampling: Sampling, count: int = 4000) -> np.ndarray:
    sampled = [sample(torch.tensor(logits), row(sampling, position)).token for position in range(count)]
    return np.bincount(sampled, minlength=len(logits)) / count


def test_the_distribution() -> None:
    logits = [1.0, 0.0, 2.0, -1.0]
    want = torch.tensor(logits).div(0.8).softmax(0).numpy()
    np.testing.assert_allclose(frequencies(logits, Sampling(temperature=0.8, seed=1)), want, atol=0.025)


def test_filters() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    cases = [
        (Sampling(top_k=2), [1, 1, 0, 0]),
        (Sampling(top_p=0.5), [1, 0, 0, 0]),
        (Sampling(top_p=0.51), [1, 1, 0, 0]),
        (Sampling(min_p=0.3), [1, 1, 1, 0]),
        (Sampling(top_p=1e-9), [1, 0, 0, 0]),
        (Sampling(top_k=3, min_p=0.5), [1, 1, 0, 0]),
    ]
    for sampling, keep in cases:
        assert filters(probs, sampling).int().tolist() == keep, sampling


def test_filtered_tokens_are_never_drawn() -> None:
    counts = frequencies([2.0, 1.0, 1.5, 0.0], Sampling(temperature=1.0, top_k=2, seed=3), 500)
    assert counts[1] == counts[3] == 0
    assert counts[0] > counts[2] > 0


def test_bias_and_penalties() -> None:
    logits = torch.tensor([2.0, -1.0, 1.0, 0.5])
    biased = adjust(logits, Sampling(logit_bias={0: -100, 3: 2}), row(Sampling()))
    assert biased.tolist() == [-98.0, -1.0, 1.0, 2.5]
    history = (0, 1, 3, 3)  # a prompt of two tokens, then 3 twice
    repeated = adjust(logits, s := Sampling(repetition_penalty=2.0), row(s, history=history, prompt_len=2))
    assert repeated.tolist() == [1.0, -2.0, 1.0, 0.25]
    counted = adjust(logits, s := Sampling(frequency_penalty=0.5), row(s, history=history, prompt_len=2))
    assert counted.tolist() == [2.0, -1.0, 1.0, -0.5]
    present = adjust(logits, s := Sampling(presence_penalty=0.5), row(s, history=history, prompt_len=2))
    assert present.tolist() == [2.0, -1.0, 1.0, 0.0]
    assert logits.tolist() == [2.0, -1.0, 1.0, 0.5]


def test_all_tokens_biased_away_still_end_well() -> None:
    sampling = Sampling(temperature=1.0, seed=0, logit_bias=dict.fromkeys(range(4), -100.0))
    assert sample(torch.zeros(4), row(sampling)).token in range(4)


def test_logprobs_are_those_of_the_model() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0])
    sampled = sample(logits, row(Sampling(temperature=0, logprobs=2, logit_bias={0: 100})))
    assert sampled.token == 0
    assert sampled.logprob == pytest.approx(logits.log_softmax(0)[0].item())
    assert [token for token, _ in sampled.top_logprobs] == [1, 2]
