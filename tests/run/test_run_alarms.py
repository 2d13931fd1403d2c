"""Each alarm sounds on a row that shows its trouble, once, and not on a healthy one."""

import json

import pytest

from cleanrl_zoo.run.alarms import Alarms

HEALTHY = {
    "losses/entropy": 1.0,
    "losses/ref_kl": 0.02,
    "losses/approx_kl": 0.001,
    "losses/sampler_kl": 1e-8,
    "charts/zero_std_groups": 0.3,
    "charts/reward_mean": 0.5,
    "charts/success": 0.5,
    "rewards/margin": 1.0,
    "rewards/chosen_logprob": -2.0,
}


@pytest.mark.parametrize(
    "change, words",
    [
        ({"losses/entropy": 0.04}, "entropy fell from 1 to 0.04 nats"),
        ({"losses/ref_kl": 1.5}, "1.5 nats per token away from the reference"),
        ({"losses/approx_kl": 0.3}, "moved the policy by 0.3 nats per token"),
        ({"losses/sampler_kl": 0.01}, "sampler and trainer are 0.01 nats per token apart"),
        ({"rewards/chosen_logprob": -2.6}, "chosen completions became less likely, log-prob -2 to -2.6 nats"),
        ({"charts/zero_std_groups": 0.75}, "75% of the groups"),
        ({"charts/reward_mean": 0.7, "charts/success": 0.3}, "reward rose to 0.7 while success fell from 0.5 to 0.3"),
    ],
)
def test_an_alarm_sounds_once_and_again_after_it_ended(change, words):
    alarms = Alarms()
    assert alarms.check(HEALTHY) == []
    bad = {**HEALTHY, **change}
    first = alarms.check(bad)
    assert len(first) == 1 and words in first[0]
    assert alarms.check(bad) == []
    assert alarms.check(HEALTHY) == []
    assert alarms.check(bad) == first


def test_reward_and_success_that_fall_together_are_no_hacking():
    alarms = Alarms()
    alarms.check(HEALTHY)
    assert alarms.check({**HEALTHY, "charts/reward_mean": 0.3, "charts/success": 0.3}) == []


def test_a_row_without_the_metric_does_not_end_an_alarm():
    alarms = Alarms()
    high = {"losses/ref_kl": 2.0}
    assert len(alarms.check(high)) == 1
    assert alarms.check({"eval/episodic_return": 0.5}) == [] and alarms.check(high) == []


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_a_resumed_run_compares_with_what_was_seen_before_it_was_cut(cut):
    """The entropy of the first row, the best success and log-prob, and what is sounding, through a file of JSON."""
    rows = [HEALTHY, {**HEALTHY, "charts/zero_std_groups": 0.75}, {**HEALTHY, "charts/zero_std_groups": 0.8},
            {**HEALTHY, "losses/entropy": 0.01 * HEALTHY["losses/entropy"], "rewards/chosen_logprob": -9.0},
            {**HEALTHY, "charts/reward_mean": 0.9, "charts/success": 0.1}]  # fmt: skip
    whole, first, second = Alarms(), Alarms(), Alarms()
    told = [whole.check(row) for row in rows]
    assert [len(sentences) for sentences in told] == [0, 1, 0, 2, 1]
    again = [first.check(row) for row in rows[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert again + [second.check(row) for row in rows[cut:]] == told


def test_alarms_that_have_seen_nothing_have_a_state_too():
    alarms = Alarms()
    alarms.load_state_dict(json.loads(json.dumps(Alarms().state_dict(), allow_nan=False)))
    assert len(alarms.check(HEALTHY)) == 0 and alarms.first_entropy == HEALTHY["losses/entropy"]


def test_rows_without_these_metrics_are_silent():
    assert Alarms().check({"charts/SPS": 100.0}) == []
