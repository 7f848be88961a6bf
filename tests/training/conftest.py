"""A made-up chat, a tokenizer for it, and the reference target with that tokenizer."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

FIXTURES = Path(__file__).parents[1] / "fixtures"

TEMPLATE = (
    "{%- if tools %}<|im_start|>system\nTools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{%- if m.tool_calls %}{{- '<call>' + m.tool_calls[0].function.name + '</call>' }}{% endif %}{{- '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = ["tea", "milk", "cup", "one", "two", "three", "four", "please", "yes", "no", "more", "thanks"]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 160 entries, the reference target's vocabulary."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    ascii_bytes = [c for c in pre_tokenizers.ByteLevel.alphabet() if ord(c) < 128 or c in "ĠĊ"]
    trainer = trainers.BpeTrainer(
        vocab_size=160,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=ascii_bytes,
        show_progress=False,
    )
    backend.train_from_iterator([" ".join(WORDS), "system user assistant Tools"] * 20, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    assert len(fast) <= 160
    return fast


@pytest.fixture(scope="session")
def target_folder(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The four-layer reference target, with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("target")
    for file in (FIXTURES / "llama-n0" / "target").iterdir():
        shutil.copy(file, folder / file.name)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def write_chats() -> Callable[[Path, int], Path]:
    """A function that writes the given number of conversations, all different and all predictable, to a JSON-lines file."""

    def write(path: Path, count: int) -> Path:
        with path.open("w") as file:
            for row in range(count):
                first, second = WORDS[row % 12], WORDS[(row * 5 + 1) % 12]
                answer = " ".join([first, second] * (3 + row % 4))
                messages = [
                    {"role": "user", "content": f"{first} {second}"},
                    {"role": "assistant", "content": answer},
                    {"role": "user", "content": "more"},
                    {"role": "assistant", "content": answer},
                ]
                file.write(json.dumps({"messages": messages}) + "\n")
        return path

    return write
