"""The tokenizer in a GGUF file gives the ids of the one it was made from, its special tokens and its chat template."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from core.errors import ModelError
from core.importing.sources.gguf import open_gguf
from core.importing.sources.gguf.pretokenize import SPLITS, WHOLE
from tests.gguf_writer.write import make_gguf
from tests.selection import layered
from tests.tiny_tokenizer import TEMPLATE

TEXTS = [
    "Hello world",
    "  many   spaces \n\n\nlines\r\n\ttabs ",
    "I'LL we've THEY'RE don't",
    "1 12 123 12345 3.14",
    "naïve café Straße",
    "Привет 你好，世界！ 今日は 안녕",
    "def f(x): return x**2  # why\n",
    "🚀 ½ ٣٤",
    "",
    " ",
    "x\n",
    "<|im_start|>user\nhi <think>so</think><|im_end|>",
    "XMLHttpRequest iPhone",
]
CORPUS = [*TEXTS, Path(__file__).read_text(encoding="utf-8"), "hello hello world worlds the there then than"] * 3
SPECIAL = ["<|im_start|>", "<|im_end|>"]


def trained(pre: str) -> tuple[Tokenizer, dict[str, Any]]:
    """A byte-level tokenizer that cuts text as `pre` does, and the same as GGUF metadata."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in WHOLE))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), "isolated") for split in SPLITS[pre]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=500, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
        ),
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    size = tokenizer.get_vocab_size()
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    return tokenizer, {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.tokens": [tokenizer.id_to_token(i) for i in range(size)],
        "tokenizer.ggml.token_type": [1] * (size - 4) + [3, 3, 4, 4],
        "tokenizer.ggml.eos_token_id": size - 3,
        "tokenizer.ggml.bos_token_id": size - 4,
        "tokenizer.ggml.eot_token_id": size - 1,
        "tokenizer.chat_template": TEMPLATE,
    }


def shell(arch: str, folder: Path, metadata: dict[str, Any]) -> Path:
    """A directory with the config and tokenizer of a GGUF model with such metadata."""
    _, file = make_gguf(
        arch, folder, tokenizer=metadata, vocab_size=512, eos_token_id=None, bos_token_id=None, pad_token_id=None
    )
    written = folder / "shell"
    written.mkdir()
    with open_gguf(file) as source:
        source.write_shell(written)
    file.unlink()  # nothing of it is needed from here on
    return written


@pytest.mark.parametrize(
    ("pre", "arch"),
    layered(
        [
            ("qwen2", "qwen3_moe"),
            ("llama-bpe", "mixtral"),
            ("gpt-4o", "gpt_oss"),
            ("deepseek-v3", "deepseek_v3"),
            ("refact", "granitemoe"),
            ("olmo", "olmoe"),
            ("qwen35", "qwen3_5_moe_text"),
            ("bailingmoe2", "sarvam_moe"),
            ("exaone-moe", "exaone_moe"),
            ("afmoe", "afmoe"),
        ],
        quick=lambda case: case[1] in ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"),
    ),
)
def test_byte_level_ids(pre: str, arch: str, tmp_path: Path) -> None:
    original, metadata = trained(pre)
    tokenizer = AutoTokenizer.from_pretrained(shell(arch, tmp_path, metadata), local_files_only=True)
    first = [metadata["tokenizer.ggml.bos_token_id"]] if pre in WHOLE else []
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert ids == first + original.encode(text).ids, text
        assert tokenizer.decode(ids[len(first) :], skip_special_tokens=False) == text
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_start|>")
    assert tokenizer.decode(tokenizer(TEXTS[-2])["input_ids"], skip_special_tokens=True) == "user\nhi <think>so</think>"


def test_chat_template_and_generation_config(tmp_path: Path) -> None:
    _, metadata = trained("qwen2")
    written = shell("qwen3_moe", tmp_path, metadata)
    tokenizer = AutoTokenizer.from_pretrained(written, local_files_only=True)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "u:hi\na:"
    ends = [metadata[f"tokenizer.ggml.{kind}_token_id"] for kind in ("eos", "eot")]
    generation = GenerationConfig.from_pretrained(written, local_files_only=True)
    assert generation.eos_token_id == ends and generation.bos_token_id == ends[0] - 1
    assert AutoConfig.from_pretrained(written).eos_token_id == ends[0]


@pytest.mark.parametrize(("add_bos", "add_eos"), [(True, False), (False, True), (True, True)])
def test_what_encloses_a_text_is_as_metadata_says(add_bos: bool, add_eos: bool, tmp_path: Path) -> None:
    original, metadata = trained("qwen2")
    metadata |= {"tokenizer.ggml.add_bos_token": add_bos, "tokenizer.ggml.add_eos_token": add_eos}
    bos, eos = ((t, metadata[f"tokenizer.ggml.{k}_token_id"]) for t, k in zip(SPECIAL, ("bos", "eos"), strict=True))
    pieces = [*[bos[0]] * add_bos, "$A", *[eos[0]] * add_eos]
    original.post_processor = processors.TemplateProcessing(single=pieces, pair=None, special_tokens=[bos, eos])
    tokenizer = AutoTokenizer.from_pretrained(shell("qwen3_moe", tmp_path, metadata), local_files_only=True)
    assert tokenizer("hello")["input_ids"] == original.encode("hello").ids


PIECES = [
    "▁",
    "h",
    "e",
    "l",
    "o",
    "w",
    "r",
    "d",
    "▁h",
    "▁w",
    "he",
    "ll",
    "llo",
    "hello",
    "▁hello",
    "or",
    "ld",
    "orld",
    "▁world",
    "[",
    "I",
    "]",
    "▁[",
    "▁▁",
    "a",
    "aa",
]
SCORES = {
    piece: -float(rank)
    for rank, piece in enumerate(
        ["▁hello", "▁world", "orld", "hello", "llo", "ll", "he", "▁h", "▁w", "or", "ld", "▁▁", "▁[", "aa"]
    )
}


def sentencepiece() -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<tool>"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [SCORES.get(piece, -99.0) for piece in PIECES] + [0.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES) + [4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def merged_by_score(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """SentencePiece's rule: of all neighbours that make a token, join the best-scored, the leftmost of equals."""
    if not text:
        return []
    pieces = list(text.replace(" ", "▁"))
    while True:
        pairs = [(-scores[tokens.index(a + b)], at) for at, (a, b) in enumerate(pairwise(pieces)) if a + b in tokens]
        if not pairs:
            break
        at = min(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [
        i
        for piece in pieces
        for i in ([tokens.index(piece)] if piece in tokens else [3 + byte for byte in piece.encode()])
    ]


@pytest.mark.parametrize("prefixed", [True, False])
def test_sentencepiece_ids(prefixed: bool, tmp_path: Path) -> None:
    metadata = sentencepiece() | ({} if prefixed else {"tokenizer.ggml.add_space_prefix": False})
    tokenizer = AutoTokenizer.from_pretrained(shell("mixtral", tmp_path, metadata), local_files_only=True)
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    for text in ("hello world", "helloworld", "  hello", "hell wor", "[I]", "né 🚀", "aaaa a", "", "world\nhello"):
        wanted = merged_by_score(" " + text if prefixed and text else text, tokens, scores)
        assert tokenizer(text)["input_ids"] == [1, *wanted], text
        assert tokenizer.decode(wanted) == text
    before, after = tokenizer("hello", add_special_tokens=False)["input_ids"], len(tokens) - 1
    assert tokenizer("hello<tool>hello")["input_ids"] == [1, *before, after, *before]


def test_digits_that_are_grouped_from_the_right() -> None:
    cut = pre_tokenizers.Split(Regex(SPLITS["afmoe"][0]), "isolated")
    assert [piece for piece, _ in cut.pre_tokenize_str("a1 12345 1234567")] == [
        *("a", "1", " ", "12", "345", " ", "1", "234", "567")
    ]


def test_kimi_cuts_between_han_and_other_letters() -> None:
    cut = pre_tokenizers.Split(Regex(*SPLITS["kimi-k2"]), "isolated").pre_tokenize_str
    for wanted in ("中文|English|混合", "北京市| Pascal's| かな|漢字| |123|4"):
        assert "|".join(piece for piece, _ in cut(wanted.replace("|", ""))) == wanted


def test_marks_belong_to_the_letters_before_them() -> None:
    def pieces(pre: str) -> list[str]:
        return [piece for piece, _ in pre_tokenizers.Split(Regex(*SPLITS[pre]), "isolated").pre_tokenize_str("क्षि x")]

    assert pieces("qwen35") == ["क्षि", " x"] != pieces("qwen2")


def test_gemma_ids(tmp_path: Path) -> None:
    """Merges over the whole text, whose spaces are written as another character."""
    original = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    original.normalizer = normalizers.Replace(" ", "▁")
    original.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    first = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    original.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, special_tokens=first, show_progress=False))
    size = original.get_vocab_size()
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": [original.id_to_token(i) for i in range(size)],
        "tokenizer.ggml.scores": [-1000.0] * size,
        "tokenizer.ggml.token_type": [3, 3, 3, 2] + [6] * 256 + [1] * (size - 260),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in json.loads(original.to_str())["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = AutoTokenizer.from_pretrained(shell("gemma4_26b", tmp_path, metadata), local_files_only=True)
    for text in (*TEXTS, "a\n\n\nb", "ẞ"):
        ids = tokenizer(text)["input_ids"]
        assert ids == [2, *original.encode(text).ids], text
        assert tokenizer.decode(ids[1:]) == text


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ({"tokenizer.ggml.model": "bert"}, "kind 'bert'"),
        ({"tokenizer.ggml.pre": "mystery"}, "the way 'mystery'"),
        ({"tokenizer.ggml.pre": "default"}, "the way 'default'"),
    ],
)
def test_vocabularies_that_are_not_known_are_refused(field: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=text):
        shell("qwen3_moe", tmp_path, trained("qwen2")[1] | field)


def test_a_vocabulary_without_scores_is_refused(tmp_path: Path) -> None:
    metadata = sentencepiece()
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(ModelError, match="no scores"):
        shell("mixtral", tmp_path, metadata)


def test_merges_of_tokens_that_are_not_there_are_left_out(tmp_path: Path) -> None:
    original, metadata = trained("qwen2")
    metadata["tokenizer.ggml.merges"] = [*metadata["tokenizer.ggml.merges"], "zz zzzz"]
    tokenizer = AutoTokenizer.from_pretrained(shell("qwen3_moe", tmp_path, metadata), local_files_only=True)
    assert tokenizer("hello")["input_ids"] == original.encode("hello").ids
