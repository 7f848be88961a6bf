"""What each token of a tokenizer spells, for llguidance."""

from __future__ import annotations

from llguidance import LLTokenizer
from llguidance._tokenizer import TokenizerWrapper
from tokenizers import Tokenizer


class _Spelled:
    """A tokenizer for llguidance with what each token spells; it calls this for the tokens of a text that must come."""

    def __init__(self, text: Tokenizer, spelled: LLTokenizer, end_token_id: int) -> None:
        added = text.get_added_tokens_decoder()
        plain = {token: each.content.encode() for token, each in added.items() if not each.special}
        tokens = range(spelled.vocab_size)  # those that the tokenizer does not have are special too
        self.tokens = [plain.get(token) or spelled.decode_bytes([token]) for token in tokens]
        self.special_token_ids = [token for token in tokens if spelled.is_special_token(token) and token not in plain]
        self.eos_token_id, self.bos_token_id = end_token_id, None
        self._text = text

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._text.encode(text, add_special_tokens=False).ids
        return ids


def spelled_tokens(text: Tokenizer, vocab_size: int, end_token_ids: list[int]) -> LLTokenizer:
    """The same tokenizer for llguidance; raises ValueError where it does not tell its tokens' bytes, or has too many of them."""
    source = text.to_str()
    # It takes all added tokens in angle brackets for special ones, which no text may hold: <tool_call> too, which is none.
    if all(each.special for each in text.get_added_tokens_decoder().values()):
        return LLTokenizer(source, n_vocab=vocab_size, eos_token=end_token_ids)
    spelled = LLTokenizer(source, n_vocab=vocab_size, eos_token=end_token_ids, slices=[])
    # Its own: tokenizers are not made for several threads.
    wrapped = TokenizerWrapper(_Spelled(Tokenizer.from_str(source), spelled, end_token_ids[0]))
    return LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=end_token_ids)
