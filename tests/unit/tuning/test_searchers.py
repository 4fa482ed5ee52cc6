"""Promises that all searchers share, and the algorithm of each searcher's paper."""

import math
import random
import sys
from statistics import mean

import numpy as np
import pytest
import torch

from graphstash.tuning.search import SEARCHERS, make_searcher
from graphstash.tuning.search._cost_model import LENGTH, NOISE, CostModel
from graphstash.tuning.search.base import CostError, Trial
from graphstash.tuning.search.gbfs import GBFS
from graphstash.tuning.search.na2c import ActorCritic, Transitions
from graphstash.tuning.search.rnn import Controller, Sequences
from graphstash.tuning.space import SearchSpace, SpaceError
from graphstash.tuning.spaces import GemmSpace, ParameterSpace, TableSpace
from support.tuning_costs import COSTS, area_above, best_so_far

SMALL = GemmSpace(8, 4, 8, factors=(3, 2, 3))  # 10 * 3 * 10 configurations
SPACES = {
    "gemm": GemmSpace(4, 4, 4, factors=(3, 2, 3)),
    "parameters": ParameterSpace(
        {"a": [1, 2, 4, 8], "b": [1, 2, 4, 8], "c": ["x", "y"], "d": [0, 1, 2]},
        ["a * b <= 16", "d < a"],
    ),
    "table": TableSpace("ab", [(i, j) for i in range(12) for j in range(12) if (i + j) % 5]),
}
QUICK = {"xgboost": {"plan_size": 8, "chains": 8, "steps": 20, "trees": 5}}


def searcher_of(name, space=SMALL, **options):
    return make_searcher(name, space, **(QUICK.get(name, {}) | options))


def cost_of(configuration):
    """Return a random cost for a configuration of any space. One cost in ten is infinite."""
    rng = random.Random(repr(configuration))
    return math.inf if rng.random() < 0.1 else 0.5 + rng.random()


def run(searcher, count, *, batch=1, shuffled=None):
    """Search until there are `count` trials.

    Report the costs of a batch in the order of `ask`, or in the order that the generator `shuffled`
    draws.
    """
    while len(searcher.trials) < count:
        asked = searcher.ask(few := min(batch, count - len(searcher.trials)))
        assert len(asked) <= few
        if not asked:
            break
        if shuffled is not None:
            shuffled.shuffle(asked)
        for each in asked:
            searcher.tell(each, cost_of(each))
    return searcher


@pytest.fixture(params=SEARCHERS)
def name(request):
    return request.param


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for number, name in enumerate(SEARCHERS)
        for kind in ("parameters", ("gemm", "table")[number % 2])
    ],
)
def test_search_visits_every_configuration_once_and_ends(name, kind):
    space = SPACES[kind]
    searcher = run(searcher_of(name, space), 2 * space.size, batch=3)
    visited = [trial.configuration for trial in searcher.trials]
    assert sorted(map(repr, visited)) == sorted(map(repr, space))
    assert searcher.ask() == []
    assert searcher.best.cost == min(map(cost_of, space))


def test_equal_seeds_give_equal_searches_for_any_batch_size(name):
    one = run(searcher_of(name, seed=3), 60)
    assert run(searcher_of(name, seed=3), 60, batch=4).trials == one.trials
    shuffled = run(searcher_of(name, seed=3), 60, batch=4, shuffled=random.Random(0))
    assert set(shuffled.trials) == set(one.trials)
    if name != "exhaustive":
        assert run(searcher_of(name, seed=4), 60).trials != one.trials


@pytest.mark.parametrize("stopped", [1, 23])
def test_resumed_search_continues_as_uninterrupted_search(name, stopped):
    whole = run(searcher_of(name, seed=1), 70, batch=4)
    before = run(searcher_of(name, seed=1), stopped, batch=4)
    before.ask(3)  # was being measured when the process died
    after = searcher_of(name, seed=1)
    after.resume(before.trials)
    assert run(after, 70, batch=4).trials == whole.trials


def test_search_resumes_from_batches_in_any_order(name):
    order = random.Random(5)
    before = run(searcher_of(name, seed=1), 30, batch=5, shuffled=order)
    after = searcher_of(name, seed=1)
    after.resume(before.trials)
    assert set(run(after, 60).trials) == set(run(before, 60).trials)


def test_known_trials_are_not_proposed_again(name):
    known = [each for each in SMALL if random.Random(repr(each)).random() < 0.3]
    searcher = searcher_of(name)
    asked = searcher.ask(2)
    known = [each for each in known if each not in asked]
    for each in known + asked:
        searcher.tell(each, 1.0)
    while new := searcher.ask(7):
        asked += new
        for each in new:
            searcher.tell(each, cost_of(each))
    assert not set(asked) & set(known)
    assert len(asked) == SMALL.size - len(known)


def test_preferred_configurations_are_proposed_first(name):
    first = [(2, 2, 2, 2, 2, 2, 2, 2), (1, 1, 8, 1, 4, 8, 1, 1), (2, 2, 2, 2, 2, 2, 2, 2)]
    searcher = run(searcher_of(name, first=first), 20)
    visited = [trial.configuration for trial in searcher.trials]
    assert visited[:2] == first[:2]
    assert len(set(visited)) == 20
    with pytest.raises(SpaceError, match="not in the space"):
        searcher_of(name, first=[(1, 2, 3)])


def test_search_continues_if_every_trial_fails(name):
    searcher = searcher_of(name)
    for _ in range(40):
        for each in searcher.ask():
            searcher.tell(each, math.inf)
    assert len(searcher.trials) == 40
    assert searcher.best is None


@pytest.mark.parametrize(
    "cost", [math.nan, 0, -1.0, -math.inf, "1", None, True, 1j, 10**400, [1.0]], ids=repr
)
def test_invalid_cost_is_refused_and_changes_nothing(cost):
    searcher = searcher_of("g-bfs", starts=0)
    [asked] = searcher.ask()
    with pytest.raises(CostError, match="above 0, or infinity"):
        searcher.tell(asked, cost)
    assert searcher.trials == []
    assert searcher.ask() == []  # the searcher still waits for costs
    searcher.tell(asked, np.float32(2))
    assert searcher.best == Trial(asked, 2.0)


def test_a_configuration_of_another_space_is_refused():
    with pytest.raises(SpaceError, match="not in the space of m_0, m_1"):
        searcher_of("random").tell((1, 2), 1.0)


def test_repeated_measurement_changes_only_the_best():
    searcher = run(searcher_of("g-bfs", seed=2), 10)
    again = searcher.trials[4].configuration
    searcher.tell(again, 0.001)
    assert searcher.best == Trial(again, 0.001)
    assert run(searcher, 31).trials[11:] == run(searcher_of("g-bfs", seed=2), 30).trials[10:]


def test_search_continues_from_a_better_configuration_that_it_has_not_proposed():
    """Another host may have measured the better configuration."""
    start, foreign = SMALL.start, (2, 2, 2, 2, 2, 2, 2, 2)
    searcher = searcher_of("g-bfs", first=[start])
    assert searcher.ask(2) == [start]
    searcher.tell(foreign, 1.0)
    searcher.tell(start, 2.0)
    asked = searcher.ask(5)
    assert len(asked) == 5
    assert set(asked) <= set(SMALL.neighbours(foreign))


@pytest.mark.parametrize("name", ["g-bfs", "random", "exhaustive"])
def test_a_searcher_without_a_model_needs_no_numpy(name, monkeypatch):
    for module in [each for each in sys.modules if each.startswith("graphstash.tuning.search")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "numpy", None)
    from graphstash.tuning.search import make_searcher as fresh

    assert fresh(name, SMALL).ask()


# --- G-BFS


def test_gbfs_with_all_neighbours_is_best_first_search_by_hand():
    """The example has m = 4 in three factors: six states with given costs."""
    costs = {(4, 1, 1): 9, (2, 2, 1): 7, (2, 1, 2): 4, (1, 4, 1): 6, (1, 2, 2): 5, (1, 1, 4): 8}
    space = GemmSpace(4, 1, 1, factors=(3, 1, 1))
    searcher = GBFS(space, rho=100, starts=0, modelled=0)
    rounds = []
    while asked := searcher.ask(100):
        rounds.append({each[:3] for each in asked})
        for each in asked:
            searcher.tell(each, costs[each[:3]])
    assert rounds == [
        {(4, 1, 1)},
        {(2, 2, 1), (2, 1, 2)},  # around (4, 1, 1)
        {(1, 2, 2), (1, 1, 4)},  # around (2, 1, 2), the cheapest; its other neighbours are known
        {(1, 4, 1)},  # around (1, 2, 2), the cheapest remaining state
    ]


def test_gbfs_restarts_at_another_state_if_its_queue_is_empty():
    space = TableSpace("ab", [(0, 0), (0, 1), (5, 7), (9, 9)])  # three islands
    searcher = run(GBFS(space, starts=0, modelled=0), 10)
    assert {trial.configuration for trial in searcher.trials} == set(space)


def test_gbfs_expands_several_states_for_parallel_measurement():
    searcher = GBFS(GemmSpace(64, 64, 64), width=4, modelled=13)
    for least, most in ((8, 8), (4, 4), (4, 4), (6, 20)):  # random, two by the model, neighbours
        asked = searcher.ask(100)
        assert least <= len(asked) <= most
        for each in asked:
            searcher.tell(each, cost_of(each))


def test_gbfs_draws_a_random_configuration_beside_the_neighbours():
    searcher = run(GBFS(GemmSpace(64, 64, 64), starts=1, modelled=0, exploring=1), 1)
    around = set(searcher.space.neighbours(searcher.trials[0].configuration))
    asked = searcher.ask(100)
    assert len(asked) == 6
    assert len(set(asked) - around) == 1


def test_model_finds_the_lowest_sum_after_few_measurements():
    """Each parameter adds to the logarithm of the cost, so a part of the space tells the rest."""
    space = ParameterSpace({name: [*range(8)] for name in "abc"})  # 512 configurations
    ranks = []
    for seed in range(10):
        searcher = GBFS(space, seed=seed, modelled=18)
        for _ in range(18):
            [asked] = searcher.ask()
            searcher.tell(asked, math.exp(sum(abs(value - 5) for value in asked)))
        ranks.append(searcher.best.cost)
    assert mean(map(math.log, ranks)) < 1, ranks


def test_costs_with_equal_logarithms_are_no_reason_for_a_model():
    searcher, costs = GBFS(GemmSpace(64, 64, 64), modelled=18), (1e-3, math.nextafter(1e-3, 1))
    for number in range(30):
        (chosen,) = searcher.ask(1)
        searcher.tell(chosen, costs[number % 2])


def test_score_is_the_mean_minus_the_deviation_of_its_gaussian_process():
    draw = np.random.default_rng(0)
    known, other, costs = draw.uniform(-1, 1, (6, 3)), draw.uniform(-1, 1, 3), draw.uniform(1, 9, 6)
    costs[4] = math.inf

    def similar(x, y):
        away = np.abs(x[:, None] - y[None]) / LENGTH
        return (np.exp(-away).mean(axis=2) + np.exp(-2 * away.mean(axis=2))) / 2

    logs = np.log(np.where(np.isinf(costs), costs[np.isfinite(costs)].max(), costs))
    inverse = np.linalg.inv(similar(known, known) + NOISE * np.eye(6))
    row = similar(other[None], known)[0]
    expected = row @ inverse @ (logs - logs.mean()) / logs.std() - np.sqrt(1 - row @ inverse @ row)
    model = CostModel(known.tolist(), costs.tolist())
    assert model.score(other.tolist()) == pytest.approx(expected)


# --- Networks


def torch_of(parameters):
    return {k: torch.tensor(v, requires_grad=True) for k, v in parameters.items()}


def same(gradients, parameters):
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, parameters[name].grad.numpy(), rtol=1e-9, atol=1e-12)


def test_the_gradients_of_n_a2c_are_those_of_its_definition():
    network = ActorCritic(4, 3, hidden=5, learning_rate=0.1, seed=1)
    draw = np.random.default_rng(2)
    for parameter in network.parameters.values():
        parameter[:] = draw.normal(size=parameter.shape)
    legal = np.array([[1, 1, 1], [1, 0, 1]], dtype=bool)
    before, after = draw.normal(size=(2, 2, 4))
    moves, rewards = np.array([1, 2]), np.array([0.5, -2.0])
    p = torch_of(network.parameters)

    def hidden(states):
        return torch.tanh(torch.tensor(states) @ p["hidden"] + p["hidden_bias"])

    def values(states):
        return hidden(states) @ p["value"] + p["value_bias"]

    target = torch.tensor(rewards) + 0.9 * values(after).detach()
    advantage = target - values(before)
    logits = hidden(before) @ p["policy"] + p["policy_bias"]
    log_pi = torch.log_softmax(logits.masked_fill(~torch.tensor(legal), -math.inf), dim=1)
    chosen = log_pi[torch.arange(2), torch.tensor(moves)]
    (-(chosen * advantage.detach()) + advantage**2).mean().backward()
    batch = Transitions(before, after, legal, moves, rewards)
    same(network.gradients(batch, 0.9), p)


def test_n_a2c_makes_a_move_with_a_positive_advantage_more_likely():
    network = ActorCritic(2, 3, hidden=8, learning_rate=0.01, seed=0)
    state, legal = np.array([[0.3, -0.2]]), np.ones((1, 3), dtype=bool)
    for sign in (1, -1):
        before = network.log_policy(state, legal)[0, 1]
        network.learn(Transitions(state, state, legal, np.array([1]), np.array([sign * 5.0])), 0)
        assert (network.log_policy(state, legal)[0, 1] > before) == (sign == 1)


def test_n_a2c_samples_near_the_best_so_far():
    searcher = run(make_searcher("n-a2c", GemmSpace(64, 64, 64), seed=1, steps=1, starts=0), 1)
    for _ in range(3):
        around = searcher.space.neighbours(searcher.best.configuration)
        asked = searcher.ask(6)
        assert set(asked) <= set(around)
        for each in asked:
            searcher.tell(each, cost_of(each))


def test_the_gradients_of_the_controller_are_those_of_its_definition():
    controller = Controller([3, 2, 4], hidden=5, learning_rate=0.1, seed=3)
    draw = np.random.default_rng(4)
    prior = draw.normal(size=(2, 3, 4))
    prior[:, 0, 3] = prior[:, 1, 2:] = prior[1, 2, 1] = -np.inf
    for parameter in controller.parameters.values():
        parameter[:] = draw.normal(size=parameter.shape)
    places, advantage = np.array([[1, 0, 3], [2, 1, 0]]), draw.normal(size=2)
    p = torch_of(controller.parameters)
    h = c = torch.zeros(2, 5, dtype=torch.float64)
    loss = 0
    for t in range(3):
        x = p["embedding"][t, places[:, t - 1]] if t else torch.zeros_like(h)
        take, keep, show, new = (torch.cat([x, h], 1) @ p["lstm"] + p["lstm_bias"]).chunk(4, 1)
        c = torch.sigmoid(keep) * c + torch.sigmoid(take) * torch.tanh(new)
        h = torch.sigmoid(show) * torch.tanh(c)
        logits = h @ p["heads"][t] + p["head_biases"][t]
        logs = torch.log_softmax(logits + torch.tensor(prior[:, t]), 1)
        entropy = -(logs.exp() * logs.masked_fill(logs.isinf(), 0)).sum(1)
        chosen = logs[torch.arange(2), torch.tensor(places[:, t])]
        loss = loss - (torch.tensor(advantage) * chosen + 0.1 * entropy).mean()
    loss.backward()
    same(controller.gradients(Sequences(places, prior), advantage, 0.1), p)


def test_controller_refuses_unsupported_space():
    class Other(SearchSpace):
        names, moves, size, start = ("a",), 0, 1, (1,)
        __contains__ = __iter__ = draw = moved = features = describe = None

    with pytest.raises(SpaceError, match="TreeSpace"):
        make_searcher("rnn", Other())


# --- Comparison with random search


def extended(*values):
    return pytest.param(*values, marks=pytest.mark.extended)


LESS = {"plan_size": 32, "chains": 32, "steps": 60, "trees": 30}


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("g-bfs", "ridge", {}),
        *(extended("g-bfs", "cliffs", {}), extended("n-a2c", "valley", {})),
        *(extended("n-a2c", "rugged", {}), extended("xgboost", "ridge", LESS)),
    ],
)
def test_a_search_beats_random_on_a_lattice_with_a_known_optimum(name, shape, options):
    """The area under the best cost so far is smaller than random search's.

    Costs are logarithms over the optimum. Wilcoxon's signed-rank test compares paired seeds. `make
    bench-tuning` has full sizes.
    """
    space, cost, seeds, budget = GemmSpace(32, 32, 32), COSTS[shape], 15, 150
    optimum = min(cost(space.named(each)) for each in space)
    areas = {
        which: [
            area_above(
                best_so_far(make_searcher(which, space, seed=seed, **kept), cost, budget), optimum
            )
            for seed in range(seeds)
        ]
        for which, kept in ((name, options), ("random", {}))
    }
    from scipy.stats import wilcoxon

    test = wilcoxon(areas[name], areas["random"], alternative="less")
    assert test.pvalue < 0.01, {which: mean(each) for which, each in areas.items()}


def test_an_untrained_controller_draws_uniformly():
    space = GemmSpace(4, 2, 1, factors=(3, 2, 1))  # 12 configurations
    searcher = make_searcher("rnn", space, batch=600)
    drawn = [configuration for configuration, _ in searcher._draw_sequences()]
    counts = [drawn.count(each) for each in space]
    expected = 600 / space.size
    assert sum((each - expected) ** 2 / expected for each in counts) < 11 + 30
