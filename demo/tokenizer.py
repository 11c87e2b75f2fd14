"""The demo model's tokenizer: byte-level BPE of 4096 tokens with the ChatML markers, and its chat template."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (END_OF_TEXT, START, END)
SPLIT = r"[^\r\n\w]?[A-Za-z]+|\d| ?[^\s\w]+[\r\n]*|_+|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def user_turn(question: str) -> str:
    """A question up to where the answer begins; what the chat template gives for one user message."""
    return f"{START}user\n{question}{END}\n{START}assistant\n"


def system_turn(prompt: str) -> str:
    """A system message as the chat template writes it."""
    return f"{START}system\n{prompt}{END}\n"


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer trained on the texts; deterministic for given texts."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=list(SPECIALS), min_frequency=2, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def as_transformers(tokenizer: Tokenizer) -> Any:
    """The tokenizer as transformers loads it, with chat template and special tokens."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )  # fmt: skip
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    as_transformers(tokenizer).save_pretrained(folder)
