"""What the engine says of its own time."""

from speculative.timing import PHASES
from tests.speculative.conftest import MakeEngine, request


def test_steps_and_their_phases_are_counted(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert engine.status().num_steps == 0
    engine.add(request("a", [1, 2, 3, 4], max_tokens=12, temperature=0.0))
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    status = engine.status()
    assert status.num_steps == steps
    assert tuple(status.phase_seconds) == PHASES
    assert all(seconds > 0 for seconds in status.phase_seconds.values())


def test_the_trees_limits_are_those_of_the_latest_step(make_engine: MakeEngine) -> None:
    engine = make_engine(draft_depth=3, draft_breadth=2, draft_nodes=5)
    assert (engine.status().draft_depth, engine.status().draft_nodes) == (0, 0)
    engine.add(request("a", [1, 2, 3], max_tokens=8))
    engine.step()  # reads the prompt
    engine.step()
    assert (engine.status().draft_depth, engine.status().draft_nodes) == (3, 5)
    engine.abort("a")
    engine.add(request("b", [1, 2, 3], max_tokens=8, speculative=False))
    engine.step()
    engine.step()
    assert (engine.status().draft_depth, engine.status().draft_nodes) == (0, 0)


def test_a_request_knows_when_it_got_its_slot(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1)
    for name in ("first", "second"):
        engine.add(request(name, [1, 2, 3], max_tokens=4))
    ended = {}
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason is not None:
                ended[output.request_id] = output.stats
    first, second = ended["first"], ended["second"]
    for stats in (first, second):
        assert stats.scheduled_time is not None and stats.first_token_time is not None
        assert stats.arrival_time <= stats.scheduled_time <= stats.first_token_time
    assert second.scheduled_time is not None and first.last_token_time is not None
    assert second.scheduled_time >= first.last_token_time
