"""What an edge makes of a server's frames, in order, out of order, and after a connection was lost."""

from dataclasses import replace

import pytest

from speculative.edge.session import Session, SessionFault
from speculative.remote.frames import Logprob, Memory, Open, Opened, Result, Resume
from speculative.remote.packing import pack_rows, pack_tokens, unpack_tokens
from speculative.request import OfferedTree, Request, SamplingParams

ROW = 4
PROMPT = (5, 6, 7)
REQUEST = Request("one", PROMPT, SamplingParams(seed=1, max_tokens=20), priority=3, cache_salt="pepper")


def rows(count: int) -> bytes:
    return bytes(ROW * count)


def opened(length: int = 3, step: int = 0) -> Opened:
    return Opened(0, b"token", length, 0, 1, step)


def first_result(session: Session) -> None:
    """Open it, and take the prompt's memory and the first token, 8."""
    assert isinstance(session.begin(0, ROW), Open)
    session.take_opened(opened())
    session.take_memory(Memory(0, 0, rows(2)))
    session.take_result(Result(0, 0, 3, pack_tokens([8]), memory_first=2, memory=rows(1), text_delta="a"))


def wants_tree(session: Session) -> bool:
    return session.can_draft(4) and not session.under_way()


@pytest.fixture
def session() -> Session:
    return Session(REQUEST)


def test_it_is_opened_with_all_that_was_asked_for(session: Session) -> None:
    frame = session.begin(7, ROW)
    assert isinstance(frame, Open)
    assert (frame.session, unpack_tokens(frame.prompt), frame.output, frame.memory_from) == (7, [5, 6, 7], b"", 0)
    assert (frame.priority, frame.cache_salt, frame.sampling.seed, frame.sampling.max_tokens) == (3, "pepper", 1, 20)


def test_a_tree_is_wanted_once_the_first_token_and_its_memory_are_there(session: Session) -> None:
    session.begin(0, ROW)
    assert not wants_tree(session)
    session.take_opened(opened())
    session.take_memory(Memory(0, 0, rows(2)))
    assert not wants_tree(session)
    session.take_result(Result(0, 0, 3, pack_tokens([8]), memory_first=2, memory=rows(1)))
    assert wants_tree(session)
    assert [(each.first, len(each.rows)) for each in session.take_rows()] == [(0, 8), (2, 4)]


def test_a_step_is_told_what_was_drafted_and_accepted(session: Session) -> None:
    first_result(session)
    frame = session.verify(0, OfferedTree(4, (9, 10, 11), (0, 1, 1)))
    assert (frame.step, frame.length, unpack_tokens(frame.tokens)) == (1, 4, [9, 10, 11]) and frame.parents
    assert not wants_tree(session)
    told = Result(0, 1, 4, pack_tokens([9, 11, 2]), pack_rows([1, 3]), 3, rows(3), text_delta="bcd", finish_reason="stop")
    gain = session.take_result(told)
    assert (gain.tokens, gain.num_accepted, gain.drafted, gain.text, gain.finish_reason) == ((9, 11, 2), 2, 3, "bcd", "stop")
    assert session.output == [8, 9, 11, 2] and session.num_characters == 4 and not wants_tree(session)


def test_chains_need_no_parents(session: Session) -> None:
    first_result(session)
    assert session.verify(0, OfferedTree(4, (9, 10), (0, 1))).parents == b""


def test_memory_may_come_before_its_tokens(session: Session) -> None:
    first_result(session)
    session.take_rows()
    session.verify(0, OfferedTree(4, (9,), (0,)))
    session.take_memory(Memory(0, 3, rows(2)))
    assert [each.first for each in session.take_rows()] == []
    session.take_result(Result(0, 1, 4, pack_tokens([9, 10]), pack_rows([1])))
    assert [each.first for each in session.take_rows()] == [3] and wants_tree(session)


@pytest.mark.parametrize(
    "wrong",
    [
        Result(0, 0, 5, pack_tokens([8])),
        Result(0, 0, 2, pack_tokens([8])),
        Result(0, 1, 4, pack_tokens([8])),
        Memory(0, 4, rows(1)),
        Memory(0, 2, rows(1)),
        opened(length=3),
    ],
)
def test_what_does_not_follow_is_a_fault(session: Session, wrong: Result | Memory | Opened) -> None:
    first_result(session)
    with pytest.raises(SessionFault):
        if isinstance(wrong, Opened):
            session.take_opened(wrong)
        elif isinstance(wrong, Memory):
            session.take_memory(wrong)
        else:
            session.take_result(wrong)


def test_a_drafters_window_may_begin_late_and_nothing_may_be_left_out_after_it(session: Session) -> None:
    session.begin(0, ROW)
    session.take_opened(opened())
    session.take_memory(Memory(0, 1, rows(1)))
    with pytest.raises(SessionFault):
        session.take_memory(Memory(0, 4, rows(1)))


def test_a_tree_that_was_never_seen_is_drafted_anew(session: Session) -> None:
    first_result(session)
    session.verify(0, OfferedTree(4, (9,), (0,)))
    frame = session.begin(2, ROW)
    assert frame == Resume(2, b"token", 4, 3, 1)
    session.take_opened(opened(4, step=0))
    session.take_result(Result(0, 0, 4, b""))
    assert wants_tree(session) and session.verify(2, OfferedTree(4)).step == 1


def test_a_lost_result_comes_again(session: Session) -> None:
    first_result(session)
    session.verify(0, OfferedTree(4, (9,), (0,)))
    session.begin(2, ROW)
    session.take_opened(opened(6, step=1))
    assert not wants_tree(session)
    gain = session.take_result(Result(0, 1, 4, pack_tokens([9, 10]), memory_first=3, memory=rows(2), text_delta="bc"))
    assert gain.tokens == (9, 10) and gain.drafted == 0, "nobody says how many of them were accepted"
    assert wants_tree(session) and session.verify(2, OfferedTree(6)).step == 2


def test_memory_of_tokens_that_were_lost_is_asked_for_again(session: Session) -> None:
    first_result(session)
    session.verify(0, OfferedTree(4, (9,), (0,)))
    session.take_memory(Memory(0, 3, rows(2)))
    frame = session.begin(0, ROW)
    assert isinstance(frame, Resume) and (frame.length, frame.memory_from) == (4, 3)
    session.take_opened(opened(6, step=1))
    session.take_memory(Memory(0, 3, rows(2)))


def test_a_forgotten_session_is_opened_with_what_was_written(session: Session) -> None:
    session.request = replace(REQUEST, params=replace(REQUEST.params, prompt_logprobs=1))
    session.begin(0, ROW)
    session.take_opened(opened())
    told = (Logprob(6, -1.0), Logprob(7, -2.0))
    session.take_result(Result(0, 0, 3, pack_tokens([8]), memory=rows(3), text_delta="a", prompt_logprobs=told))
    session.forget()
    frame = session.begin(0, ROW)
    assert isinstance(frame, Open) and unpack_tokens(frame.output) == [8]
    assert (frame.text_length, frame.memory_from, frame.sampling.prompt_logprobs) == (1, 3, None)
    session.take_opened(opened(4))
    assert not wants_tree(session), "the next token comes without a tree"
    session.take_result(Result(0, 0, 4, pack_tokens([9]), memory_first=3, memory=rows(1)))
    assert wants_tree(session) and session.verify(0, OfferedTree(5)).step == 1


def test_a_server_with_other_rows_is_asked_anew(session: Session) -> None:
    first_result(session)
    assert isinstance(session.begin(0, 2 * ROW), Open)


def test_a_refused_tree_leaves_its_step_free(session: Session) -> None:
    first_result(session)
    session.verify(0, OfferedTree(4, (9,), (0,)))
    session.refused(1)
    assert wants_tree(session) and session.verify(0, OfferedTree(4)).step == 1
    session.take_result(Result(0, 1, 4, pack_tokens([9])))
    with pytest.raises(SessionFault):
        session.refused(1)


def test_what_followed_a_refused_tree_is_out_of_order(session: Session) -> None:
    first_result(session)
    session.verify(0, OfferedTree(4, (9,), (0,)))
    session.verify(0, OfferedTree(4, (9, 10), (0, 1)))
    assert session.refused(1) and not session.refused(2), "the second says nothing new"
    assert wants_tree(session) and session.verify(0, OfferedTree(4)).step == 1


def test_trees_in_flight_are_cut_as_the_server_cuts_them(session: Session) -> None:
    first_result(session)
    session.verify(0, OfferedTree(4, (9, 10), (0, 0)))
    frame = session.verify(0, OfferedTree(4, (9, 12, 13, 14), (0, 1, 2, 2)))
    assert (frame.step, frame.length) == (2, 4) and len(session.under_way()) == 2
    gain = session.take_result(Result(0, 1, 4, pack_tokens([9, 12]), pack_rows([1]), 3, rows(2)))
    assert gain.drafted == 2 and session.can_draft(2) and not session.can_draft(1)
    assert session.under_way() == [OfferedTree(6, (13, 14), (0, 0))]
    gain = session.take_result(Result(0, 2, 6, pack_tokens([13, 7]), pack_rows([3]), 5, rows(2)))
    assert (gain.drafted, gain.num_accepted) == (2, 1) and wants_tree(session)


def test_a_tree_that_the_text_has_left_keeps_nobody_from_the_next(session: Session) -> None:
    first_result(session)
    session.verify(0, OfferedTree(4, (9, 10), (0, 0)))
    session.verify(0, OfferedTree(4, (9, 12, 13), (0, 1, 2)))
    session.take_result(Result(0, 1, 4, pack_tokens([9, 11]), pack_rows([1]), 3, rows(2)))
    assert wants_tree(session)
    session.verify(0, OfferedTree(6, (5,), (0,)))
    gain = session.take_result(Result(0, 2, 6, b""))
    assert (gain.tokens, gain.drafted) == ((), 0) and session.under_way() == [OfferedTree(6, (5,), (0,))]
    assert session.take_result(Result(0, 3, 6, pack_tokens([5, 6]), pack_rows([1]), 5, rows(2))).num_accepted == 1


def test_another_text_keeps_the_memory_of_what_is_the_same(session: Session) -> None:
    first_result(session)
    session.verify(0, OfferedTree(4, (9,), (0,)))
    session.take_result(Result(0, 1, 4, pack_tokens([9, 10]), pack_rows([1]), 3, rows(2), text_delta="bc"))
    session.go_on_with([*PROMPT, 8, 11, 12], 3)
    frame = session.begin(0, ROW)
    assert isinstance(frame, Open)
    assert (unpack_tokens(frame.output), frame.text_length, frame.memory_from) == ([8, 11, 12], 3, 3)


def test_log_probabilities_of_the_prompt_are_told_whole_however_they_come(session: Session) -> None:
    session.request = replace(REQUEST, params=replace(REQUEST.params, prompt_logprobs=1))
    session.begin(0, ROW)
    session.take_opened(opened())
    first, second = Logprob(6, -1.0), Logprob(7, -2.0)
    assert session.take_result(Result(0, 0, 3, b"", prompt_logprobs=(first,))).prompt_logprobs is None
    assert not session.told_prompt_logprobs, "nobody has heard of them yet"
    assert isinstance(session.begin(0, ROW), Resume), "and so they come again from the first"
    session.take_opened(opened())
    for each in (first, second):
        assert session.take_result(Result(0, 0, 3, b"", prompt_logprobs=(each,))).prompt_logprobs is None
    gain = session.take_result(Result(0, 0, 3, pack_tokens([8]), memory=rows(3), text_delta="a"))
    assert [(each.token_id, each.logprob) for each in gain.prompt_logprobs or ()] == [(6, -1.0), (7, -2.0)]
    again = session.take_result(Result(0, 0, 4, pack_tokens([9]), memory_first=3, memory=rows(1), prompt_logprobs=(first,)))
    assert again.prompt_logprobs is None, "once is enough"


def test_log_probabilities_of_a_prompt_that_nothing_follows_are_told_with_the_end(session: Session) -> None:
    session.begin(0, ROW)
    session.take_opened(opened())
    session.take_result(Result(0, 0, 3, b"", prompt_logprobs=(Logprob(6, -1.0),)))
    gain = session.take_result(Result(0, 0, 3, b"", finish_reason="length", prompt_logprobs=(Logprob(7, -2.0),)))
    assert [each.token_id for each in gain.prompt_logprobs or ()] == [6, 7]
