import pytest

from benchmarks import lossless
from benchmarks.lossless import TEXTS, check, compare
from benchmarks.prompts import Prompt


def test_comparisons_name_what_differs() -> None:
    result = compare("texts", ["a", "b", "c"], ["a", "x", "c"])
    assert not result.ok and result.different == (1,)
    assert "2 of 3" in result.line()
    assert compare("texts", ["a"], ["a"]).ok


def test_a_server_is_compared_greedily_with_transformers_and_sampled_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    async def served(base_url, prompts, *, concurrency, progress, temperature, speculative=True, **_) -> list[str]:
        for _ in prompts:
            progress()
        wrong = temperature == 1.3 and speculative and concurrency == 8
        return [f"text at {temperature}{' gone wrong' if wrong else ''}" for _ in prompts]

    def referred(model, tokenizer, prompts, max_tokens, progress) -> list[str]:
        for _ in prompts:
            progress()
        return ["text at 0" for _ in prompts]

    monkeypatch.setattr(lossless, "server_texts", served)
    monkeypatch.setattr(lossless, "reference_texts", referred)
    written: list[int] = []
    prompts = [Prompt("a", (1,)), Prompt("b", (2,))]
    results = check("http://test", None, None, prompts, max_tokens=4, seed=0, progress=lambda: written.append(1))
    assert [result.ok for result in results] == [True] * 7 + [False]
    assert "'temperature': 1.3" in results[-1].name and "8 at a time" in results[-1].name
    assert len(written) == TEXTS * len(prompts)
