"""Pre-tokenization patterns of byte-level vocabularies, by the name in `tokenizer.ggml.pre`.

Each is the pattern in the models' own tokenizer.json; the names are those of llama.cpp's src/llama-vocab.cpp. The
letters of "deepseek-llm" are written there as a list of ranges, which are Unicode's cased letters.
"""

from collections.abc import Mapping

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + REST
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + REST
QWEN35 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + REST
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
EXAONE = CONTRACTIONS + (
    r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
GPT4O = (
    rf"{_WORD[0]}{CONTRACTIONS}?|{_WORD[1]}{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + REST
)
_NOT_HAN = tuple(kind.removesuffix("]") + r"&&[^\p{Han}]]" for kind in (_UPPER, _LOWER))
KIMI = (
    r"\p{Han}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN[0]}*{_NOT_HAN[1]}+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN[0]}+{_NOT_HAN[1]}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + REST
)
TEKKEN = rf"{_WORD[0]}|{_WORD[1]}" r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + REST
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*" + REST,
)
AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",  # groups of three, counted from the right
    "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
    DEEPSEEK3[2],
)
DEEPSEEK = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    "\\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
    r"\p{N}+",
)
STARCODER = (r"\p{N}", GPT2)

SPLITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "olmo", "mpt", "jais", "trillion", "mellum", "a.x-4.0", "granite-docling"), (GPT2,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "stablelm2", "hunyuan", "megrez", "solar-open"), (QWEN2,)),
    **dict.fromkeys(
        (
            "llama3",
            "llama-v3",
            "llama-bpe",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "dbrx",
            "smaug-bpe",
            "glm4",
            "chatglm-bpe",
        ),
        (LLAMA3,),
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), (GPT4O,)),
    "qwen35": (QWEN35,),
    **dict.fromkeys(("bailingmoe", "bailingmoe2"), (BAILING,)),
    "exaone-moe": (EXAONE,),
    "afmoe": AFMOE,
    "tekken": (TEKKEN,),
    "kimi-k2": (KIMI,),
    "deepseek-v3": DEEPSEEK3,
    "deepseek-llm": DEEPSEEK,
    **dict.fromkeys(("refact", "starcoder", "command-r", "smollm", "codeshell", "minerva-7b"), STARCODER),
}
WHOLE = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"})
"""Where a piece that is a token is that token, whatever the merges; and where texts begin with bos unless metadata says
otherwise."""
