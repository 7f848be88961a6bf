"""When and how much is drafted."""

from __future__ import annotations

import pytest
import torch

from speculative.adaptive_policy import AdaptivePolicy
from speculative.costs import MeasuredCosts, StepCosts, StepTimes
from speculative.policy import DraftShape, FixedPolicy
from speculative.request import Request, SamplingParams
from speculative.sequence import Sequence
from speculative.texts import Texts
from speculative.tree import DraftTree
from tests.speculative.conftest import MakeEngine, request, run, tokens

LARGEST = DraftShape(8, 4, 8)
PROMPTS = [[5, 9, 23, 41, 7, 9, 23], [11, 3, 3, 60, 2, 45], [70, 71, 72], [8] * 20]


def sequences(
    count: int = 1, *, temperature: float = 0.0, speculative: bool = True, first: int = 0, **settings: bool
) -> list[Sequence]:
    texts = Texts(None, 100, frozenset())
    names = range(first, first + count)
    params = SamplingParams(temperature=temperature, seed=1, speculative=speculative)
    return [texts.begin(Request(str(name), (1, 2, 3), params, **settings), 100) for name in names]  # type: ignore[arg-type]


def policy(
    *, row: float = 0.01, batch_row: float = 0.01, level: float = 0.05, largest: DraftShape = LARGEST, narrow: bool = False
) -> AdaptivePolicy:
    """A step takes a second, or a tenth more with eight texts; further rows of each text and levels cost what is given."""
    steps = {size: {0: base, 8: base + 8 * more} for size, base, more in ((1, 1.0, row), (8, 1.1, batch_row))}
    return AdaptivePolicy(largest, StepCosts(MeasuredCosts(steps, {1: (0.1, level), 8: (0.1, level)})), narrows=narrow)


def tree(probabilities: list[list[float]]) -> DraftTree:
    known = torch.tensor(probabilities)
    size = known.shape
    return DraftTree(torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long), (size[1],) * size[0], (), known)


def fare(policy: AdaptivePolicy, batch: list[Sequence], gained: int, steps: int = 40) -> None:
    """So many steps in which drafts that promise two tokens gain ``gained``."""
    drafted = tree([[0.5] * 4] * len(batch))
    seconds = policy.costs.verification(len(batch), 0, 4)
    for _ in range(steps):
        policy.observe(StepTimes(len(batch), 0, 4, True, 0.2, seconds), drafted, batch, [gained] * len(batch))


def step_plainly(policy: AdaptivePolicy, batch: list[Sequence], seconds: float = 1.0) -> None:
    """A step without drafts."""
    policy.observe(StepTimes(len(batch), 0, 0, False, 0.0, seconds), DraftTree.empty(len(batch)), batch, [0] * len(batch))


def test_without_anyone_to_draft_for_nothing_is_drafted() -> None:
    plain = sequences(2, speculative=False)
    assert policy().shape(plain) is None
    assert FixedPolicy(LARGEST).shape(plain) is None
    assert FixedPolicy(LARGEST).shape([*plain, *sequences()]) == LARGEST


def test_new_requests_are_drafted_for() -> None:
    shape = policy().shape(sequences())
    assert shape is not None and (shape.depth, shape.breadth, shape.nodes) == (8, 4, 8)


def test_drafts_that_fail_are_given_up_and_tried_again_now_and_then() -> None:
    made, batch = policy(), sequences()
    fare(made, batch, 0, steps=400)
    tried = []
    for _ in range(1000):
        tried.append(made.shape(batch) is not None)
        if tried[-1]:
            fare(made, batch, 0, steps=1)
    # A node that fails costs 0.1 to 0.2 s more than a plain step, which takes one, and may cost half a hundredth of the time.
    assert 20 <= sum(tried) <= 35
    assert sum(tried[:20]) == 0
    fare(made, batch, 3)
    assert made.shape(batch) is not None and made.shape(batch) is not None


def test_what_is_due_to_be_tried_stays_so_until_it_was() -> None:
    made, batch = policy(), sequences()
    fare(made, batch, 0, steps=400)
    while made.shape(batch) is None:
        pass
    # The drafter may be told what it has missed first; and nothing is tried beside a prompt, which holds texts up already.
    assert made.shape(batch) is not None
    assert made.shape(batch, reading=True) is None
    assert made.shape(batch) is not None
    fare(made, batch, 0, steps=1)
    assert made.shape(batch) is None


def test_a_trial_verifies_a_node_even_where_none_is_worth_it() -> None:
    """Without, it would show that drafts gain nothing, however good they are."""
    made, batch = policy(row=2.0, level=2.0), sequences()
    while made.shape(batch) is None:
        pass
    assert made.cut(tree([[0.9, 0.8, 0.7]]), batch).num_rows == 2


def test_a_trial_that_pays_is_followed_by_another_at_once() -> None:
    made, batch = policy(), sequences()
    fare(made, batch, 0, steps=400)
    while made.shape(batch) is None:
        pass
    fare(made, batch, 3, steps=1)
    if made.shape(batch) is None:  # after so many that drafted, one step shows what a plain one takes
        step_plainly(made, batch)
    assert made.shape(batch) is not None


@pytest.mark.parametrize("wrong", [{"plain": 0.5}, {"row": 3.0, "draft": 3.0}, {"draft": 6.0}], ids=str)
def test_what_was_measured_in_a_busy_minute_is_put_right(wrong: dict[str, float]) -> None:
    """Drafts that pay are given within a thousand plain steps' time, whatever was measured of them."""
    true = StepCosts(MeasuredCosts({1: {0: 1.0, 1: 1.2, 8: 1.9}}, {1: (0.35, 0.1)}))
    steps = {0: wrong.get("plain", 1.0), 1: 1.2 * wrong.get("row", 1.0), 8: 1.9 * wrong.get("row", 1.0)}
    first, level = (each * wrong.get("draft", 1.0) for each in (0.35, 0.1))
    made = AdaptivePolicy(LARGEST, StepCosts(MeasuredCosts({1: steps}, {1: (first, level)})), narrows=True)
    batch, time, lately = sequences(), 0.0, [False] * 50
    while time < 1000:
        shape = made.shape(batch)
        lately = [*lately[1:], shape is not None]
        if shape is None:
            step, drafted, gained = StepTimes(1, 0, 0, False, 0.0, 1.0), DraftTree.empty(1), 0
        else:
            drafted = made.cut(tree([[0.8**depth for depth in range(1, shape.depth + 1)]]), batch)
            nodes = drafted.num_rows - 1
            gained = min(nodes, 3)
            step = StepTimes(1, 0, nodes, True, true.draft(1, shape.depth), true.verification(1, 0, nodes))
        made.observe(step, drafted, batch, [gained])
        time += step.draft + step.rest
        if sum(lately) >= 45:  # all but those that are taken for comparison
            return
    pytest.fail(f"of the last 50 steps {sum(lately)} drafted")


def test_plain_steps_that_have_come_to_be_faster_than_drafts_are_found() -> None:
    """Who drafts at every step would never learn of it, and what was measured of plain steps may be twice what they take."""
    made, batch, shapes = policy(row=0.1), sequences(), []
    for _ in range(600):
        shapes.append(made.shape(batch))
        step_plainly(made, batch, 0.5) if shapes[-1] is None else fare(made, batch, 1, steps=1)
    assert all(shapes[:16])
    assert sum(shape is not None for shape in shapes[-300:]) <= 3  # drafts make two tokens in 1.6 s: a few are tried


def test_drafts_that_pay_give_way_to_few_steps_without() -> None:
    made, batch, shapes = policy(row=0.1), sequences(), []
    for _ in range(600):
        shapes.append(made.shape(batch))
        step_plainly(made, batch) if shapes[-1] is None else fare(made, batch, 1, steps=1)
    assert 0 < sum(shape is None for shape in shapes) <= 600 // 17
    much = policy(row=0.1)
    for _ in range(600):
        assert much.shape(batch) is not None
        fare(much, batch, 3, steps=1)  # no error of what plain steps take makes up for three tokens


def test_telling_the_drafter_of_prompts_must_pay_too() -> None:
    """Answers of a few tokens do not, where drafts gain little else; long ones do."""
    for length, pays in ((4, False), (64, True)):
        made, batch = policy(row=0.1), sequences()
        fare(made, batch, 1)
        for number in range(100):
            made.observe_prompt(5.0)
            (ended,) = sequences(first=1 + number)
            ended.tokens += [1] * length
            made.forget(ended)
        step_plainly(made, batch)
        assert (made.shape(batch) is not None) is pays


def test_what_the_drafter_has_missed_is_weighed_before_drafts_begin_anew() -> None:
    """Two tokens in 1.6 s pay for a sixty-fourth of 9 s each, which is the prompt's share, but not for two."""
    made, batch = policy(row=0.1), sequences()
    made.observe_prompt(9.0)
    fare(made, batch, 1)
    step_plainly(made, batch)
    assert made.shape(batch) is not None  # of a single step there is next to nothing to tell
    step_plainly(made, batch)
    assert made.shape(batch) is None


def plainly(policy: AdaptivePolicy, batch: list[Sequence], *, reading: bool = False) -> None:
    """A hundred steps of texts whose drafts have failed; what is tried fails too."""
    fare(policy, batch, 0, steps=400)
    for _ in range(100):
        if policy.shape(batch, reading=reading) is not None:
            fare(policy, batch, 0, steps=1)


def test_drafts_are_not_begun_beside_a_prompt_where_texts_are_used_to_plain_steps() -> None:
    """A step with drafts is longer, and streams would wait for it and for the reading together."""
    made, batch = policy(), sequences(4)
    fare(made, batch, 3, steps=1)
    assert made.shape(batch) is not None
    assert made.shape(batch, reading=True) is not None  # so far all steps drafted
    plainly(made, batch)
    fare(made, batch, 3, steps=20)  # drafts have come to pay
    for _ in range(200):
        assert made.shape(batch, reading=True) is None
    fare(made, batch, 3, steps=200)  # what happens beside prompts changes nothing
    assert made.shape(batch, reading=True) is None
    assert made.shape(batch) is not None
    fare(made, batch, 3, steps=200)  # they become what is usual
    assert made.shape(batch, reading=True) is not None


def test_texts_that_begin_while_prompts_are_read_are_drafted_for_whatever_those_before_them_were_used_to() -> None:
    made, batch = policy(), sequences(4)
    plainly(made, batch)
    fare(made, batch, 3, steps=20)
    new = sequences(16, first=4)
    assert made.shape(batch, reading=True) is None
    assert made.shape([*batch, *new], reading=True) is not None
    assert made.shape(new, reading=True) is not None


def test_plain_steps_beside_prompts_are_no_pace_that_drafts_would_break() -> None:
    made, batch = policy(), sequences(4)
    plainly(made, batch, reading=True)
    fare(made, batch, 3, steps=20)
    assert made.shape(batch, reading=True) is not None


def test_steps_of_requests_without_speculation_are_no_habit_of_others() -> None:
    made, without, batch = policy(), sequences(4, speculative=False), sequences(4, first=4)
    for _ in range(1000):
        assert made.shape(without) is None
        made.observe(StepTimes(4, 0, 0, False, 0.0, 1.0), DraftTree.empty(4), without, [0] * 4)
    assert made.shape(batch, reading=True) is not None


def test_a_request_that_asks_for_drafts_has_them_beside_prompts_too() -> None:
    made, batch = policy(), sequences()
    plainly(made, batch)
    object.__setattr__(batch[0].request, "adaptive", False)
    assert made.shape(batch, reading=True) is not None


def test_few_nodes_are_drafted_where_they_pay_and_many_would_not() -> None:
    """A busy server's rows cost so much that a tree of eight is not worth it, and a chain of two is."""
    made, batch = policy(batch_row=0.3, narrow=True), sequences(8)
    drafted = tree([[0.9, 0.8, 0.3, 0.2, 0.1, 0.1, 0.05, 0.05]] * 8)
    shapes = []
    for _ in range(200):
        shapes.append(made.shape(batch))
        if shapes[-1] is None:
            made.observe(StepTimes(8, 0, 0, False, 0.0, 1.1), DraftTree.empty(8), batch, [0] * 8)
            continue
        cut = made.cut(drafted, batch)
        nodes = cut.num_rows - 1
        made.observe(StepTimes(8, 0, nodes, True, 0.2, 1.1 + 0.3 * nodes), cut, batch, [nodes if nodes < 3 else 2] * 8)
    assert all(shapes) and nodes == 2
    assert shapes[-1] is not None and shapes[-1].breadth == 1
    # Alone, where rows cost little, the same drafts are verified whole, and drafted in full breadth.
    alone = sequences(first=8)
    shape = made.shape(alone)
    assert shape is not None and shape.breadth > 1
    assert made.cut(tree([[0.9, 0.8, 0.3, 0.2, 0.1, 0.1, 0.05, 0.05]]), alone).num_rows - 1 > 4


def test_breadth_that_is_built_in_stays() -> None:
    made, batch = policy(batch_row=0.3), sequences(8)
    for _ in range(100):
        made.cut(tree([[0.9, 0.8, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0]] * 8), batch)
    shape = made.shape(batch)
    assert shape is not None and shape.breadth == LARGEST.breadth


def test_a_trial_does_not_hold_texts_up_for_long() -> None:
    made, batch = policy(batch_row=0.16), sequences(8)
    fare(made, batch, 0, steps=400)
    while made.shape(batch) is None:
        pass
    # A plain step takes 1.1 s and a level 0.1: into twice a plain step go six rows more of each text, at 0.16 s for all.
    likely = tree([[0.99] * 8] * 8)
    assert made.cut(likely, batch).num_rows == 1 + 6
    made._trying = False
    hoping = policy(batch_row=0.16)
    assert hoping.shape(batch) is not None
    assert hoping.cut(likely, batch).num_rows == 1 + 8


def test_a_request_may_insist() -> None:
    made, (insisting,) = policy(), sequences(adaptive=False)
    fare(made, [insisting], 0)
    assert all(made.shape([insisting]) for _ in range(10))


def test_what_one_kind_of_request_has_shown_is_expected_of_the_next() -> None:
    made = policy()
    fare(made, sequences(temperature=1.5), 0)
    assert made.shape(sequences(temperature=1.5, first=1)) is None
    assert made.shape(sequences(temperature=0.0, first=2)) is not None


def test_of_requests_that_have_ended_nothing_is_kept() -> None:
    """A step is judged once its texts have been told, and those that ended with it been forgotten."""
    made, batch = policy(), sequences(2)
    fare(made, batch, 1)
    assert made.expected.num_requests == 2
    batch[0].finish("length")
    made.forget(batch[0])
    fare(made, batch, 1, steps=1)
    assert made.expected.num_requests == 1


def test_the_dearer_a_level_the_likelier_it_must_be() -> None:
    reaches = [policy(level=level).shape(sequences()).min_reach for level in (0.01, 0.05, 0.2)]  # type: ignore[union-attr]
    assert reaches == sorted(reaches) and reaches[0] < reaches[-1]
    # A rate of one token and the three that are hoped for, in some 1.28 seconds; a level, and a row more.
    # Of what gets as far three quarters go on.
    assert reaches[1] == pytest.approx((0.05 + 0.01) * 4 / 1.28 / 0.75, rel=0.05)
    floor = policy(largest=DraftShape(8, 4, 8, min_reach=0.5)).shape(sequences())
    assert floor is not None and floor.min_reach == 0.5


def test_rows_that_cost_nothing_are_all_verified() -> None:
    drafted = tree([[0.5, 0.3, 0.1, 0.05, 0.02, 0.01, 0.01, 0.01]])
    assert policy(row=0.0).cut(drafted, sequences()) is drafted


def test_nodes_that_cost_more_than_they_bring_are_not_verified() -> None:
    drafted = tree([[0.9, 0.6, 0.3, 0.05, 0.02, 0.01, 0.01, 0.01]])
    few = policy(row=0.15).cut(drafted, sequences())
    assert few.num_rows - 1 == 3 and few.sizes == (3,) and few.tokens.shape == few.parents.shape == (1, 3)
    assert policy(row=1.0).cut(drafted, sequences()).num_rows - 1 < 3
    assert policy(row=5.0).cut(drafted, sequences()).num_rows == 1


def test_a_busy_batch_verifies_less() -> None:
    drafted = [0.9, 0.6, 0.3, 0.2, 0.1, 0.1, 0.1, 0.1]
    alone = policy(row=0.05, batch_row=0.3).cut(tree([drafted]), sequences())
    together = policy(row=0.05, batch_row=0.3).cut(tree([drafted] * 8), sequences(8))
    assert together.num_rows < alone.num_rows


def test_drafts_that_break_their_promise_are_cut_shorter() -> None:
    drafted = tree([[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]])
    trusted, broken = (policy(row=0.35) for _ in range(2))
    batch = sequences()
    fare(trusted, batch, 2)
    fare(broken, batch, 0)
    assert broken.cut(drafted, batch).num_rows < trusted.cut(drafted, batch).num_rows


def test_what_comes_without_probabilities_stays() -> None:
    made, batch = policy(row=5.0), sequences(2)
    chains = DraftTree.from_chains([[1, 2, 3], [4]])
    assert made.cut(chains, batch) is chains
    straight = tree([[0.1] * 4] * 2).straightened([True, False])
    assert made.cut(straight, batch) is straight
    # A chain in a batch of trees counts as certain.
    mixed = tree([[0.01] * 2] * 2).with_chains([[7, 8, 9], []])
    assert policy(batch_row=0.01).cut(mixed, batch).sizes == (3, 2)


SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.5, "seed": 4, "top_k": 30},
]


ASKED = [
    request(f"{number}", prompt, max_tokens=30, **params)
    for number, (prompt, params) in enumerate((prompt, params) for params in SETTINGS for prompt in PROMPTS)
]
AGAIN = [request(f"again {number}", each.prompt_token_ids, max_tokens=20, temperature=0.0) for number, each in enumerate(ASKED[:4])]


@pytest.fixture(scope="module")
def plain_tokens(make_engine: MakeEngine) -> dict[str, dict[str, list[int]]]:
    """What is written without a draft."""
    engine = make_engine(drafter="none")
    return {name: tokens(run(engine, requests)) for name, requests in (("asked", ASKED), ("again", AGAIN))}


@pytest.mark.parametrize("drafter", ["moa", "entry and block", "eagle2", "eagle3", "independent", "ngram"])
@pytest.mark.parametrize("worth", [1e9, 0.0, None])
def test_texts_are_the_same_whatever_the_policy_does(
    drafter: str, worth: float | None, make_engine: MakeEngine, plain_tokens: dict[str, dict[str, list[int]]]
) -> None:
    """With drafts that always pay, that never do but for being tried, and by the measured costs."""
    adaptive = make_engine(drafter=drafter, draft_policy="adaptive", draft_lookup=4)
    assert isinstance(adaptive.policy, AdaptivePolicy)
    if worth is not None:
        steps = {1: {0: 1.0 + worth, 16: 1.0 + 2 * worth}}
        drafts = {1: (1e-3, 1e-3)} if worth else {1: (3.0, 3.0)}
        adaptive.policy = AdaptivePolicy(adaptive.largest_shape, StepCosts(MeasuredCosts(steps, drafts)), narrows=True)
    assert tokens(run(adaptive, ASKED)) == plain_tokens["asked"]
    # And what was kept of them serves those that begin alike.
    assert tokens(run(adaptive, AGAIN)) == plain_tokens["again"]
