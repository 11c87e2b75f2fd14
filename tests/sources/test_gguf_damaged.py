"""GGUF files whose header contradicts itself or the model: each is refused at once, by name, with nothing written."""

import hashlib
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from core.errors import ModelError
from core.importing.job import open_job
from core.importing.sources import open_source
from core.system.gguf import read_metadata
from tests.gguf_writer.raw import ARRAY, BOOL, F32, F64, I32, NAN, TEXT, U32, U64, Raw, Row, array
from tests.gguf_writer.write import experts_in, make_gguf

Change = Callable[[Raw], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A good file: qwen3_moe of two layers, experts in Q8_0, a vocabulary of 256."""
    vocabulary = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [chr(0x100 + n) for n in range(256)],
        "tokenizer.ggml.token_type": [1] * 256,
        "tokenizer.ggml.merges": ["\u0100 \u0101"],
    }
    return make_gguf("qwen3_moe", tmp_path_factory.mktemp("gguf"), experts_in("Q8_0"), vocabulary, num_hidden_layers=2)[
        1
    ].read_bytes()


@pytest.fixture
def file(sound: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(sound)
    return path


def swap(raw: Raw) -> None:
    """Two tensors of one shape change places."""
    one, other = raw.row("blk.0.ffn_gate_exps.weight"), raw.row("blk.0.ffn_up_exps.weight")
    one.offset, other.offset = other.offset, one.offset


def shift(name: str, by: int) -> Change:
    def change(raw: Raw) -> None:
        raw.row(name).offset += by

    return change


def twice(raw: Raw) -> None:
    raw.rows.append(replace(raw.rows[-1], offset=len(raw.data)))
    raw.data += bytes(len(raw.data))


def key(name: str, kind: int, value: object) -> Change:
    return lambda raw: raw.set(name, kind, value)


def own(name: str, kind: int, value: object) -> Change:
    return key(f"qwen3moe.{name}", kind, value)


def reshape(name: str, *shape: int) -> Change:
    def change(raw: Raw) -> None:
        raw.row(name).shape = shape

    return change


def lie(tensors: int | None = None, pairs: int | None = None) -> Change:
    def change(raw: Raw) -> None:
        raw.counts = (tensors, pairs)

    return change


def cut_last(raw: Raw) -> None:
    raw.rows.pop()


def aligned_to(raw: Raw, alignment: int) -> None:
    raw.set("general.alignment", U32, alignment)
    raw.alignment = alignment


HEADERS: list[tuple[str, Change, str]] = [
    ("offsets out of order", swap, "'blk.0.ffn_(gate|up)_exps.weight' should begin at byte"),
    ("an offset that is not aligned", shift("blk.1.attn_q.weight", 4), "'blk.1.attn_q.weight' should begin at byte"),
    ("overlapping tensors", shift("blk.1.attn_q.weight", -32), "'blk.1.attn_q.weight' should begin at byte"),
    ("an offset past the end", shift("blk.1.attn_q.weight", 1 << 40), "'blk.1.attn_q.weight' ends at"),
    ("an offset of 2 ** 64", lambda r: setattr(r.rows[0], "offset", (1 << 64) - 32), "ends at"),
    ("a tensor twice", twice, "has the tensor .* twice"),
    ("a key twice", lambda r: r.pairs.append(r.pairs[-1]), "it says 'tokenizer.ggml.merges' twice"),
    ("an alignment of 48", lambda r: aligned_to(r, 48), "alignment is 48, which is not a power of two"),
    ("an alignment of 0", key("general.alignment", U32, 0), "alignment is 0"),
    ("a negative alignment", key("general.alignment", I32, -32), "alignment is -32"),
    ("an alignment of true", key("general.alignment", BOOL, True), "alignment is True"),
    ("an alignment as text", key("general.alignment", TEXT, "32"), "alignment is '32'"),
    ("an alignment of 2 ** 40", key("general.alignment", U64, 1 << 40), "alignment is 1099511627776"),
    ("another alignment", key("general.alignment", U32, 4096), "should begin at byte|ends at"),
    ("a type of another size", lambda r: setattr(r.row("blk.0.attn_q.weight"), "type", 1), "should begin at byte"),
    ("a row of the table lost", cut_last, "but its last tensor ends at"),
    ("one tensor fewer", lambda r: lie(tensors=len(r.rows) - 1)(r), "ends at|should begin"),
    ("2 ** 62 tensors", lie(tensors=1 << 62), "says that it has 4,611,686,018,427,387,904 tensors"),
    ("2 ** 33 keys", lie(pairs=1 << 33), "says that it has 8,589,934,592 settings"),
    ("a dimension of 0", reshape("output_norm.weight", 0), "has a dimension of 0"),
    ("five dimensions", reshape("output_norm.weight", 64, 1, 1, 1, 1), "has 5 dimensions"),
    ("dimensions whose product overflows", reshape("output_norm.weight", 1 << 62, 1 << 62), "ends at"),
    ("a name that is no text", lambda r: r.rows.append(Row(b"\xff\xfe", (32,), 0, 0)), "utf-8"),
    ("an array in an array", key("x", ARRAY, struct.pack("<IQ", ARRAY, 1) + array(U32, [1])), "array of type 9"),
    ("an array of 2 ** 60", key("x", ARRAY, struct.pack("<IQ", U32, 1 << 60)), "array of 1,152,921"),
    ("an array of 2 ** 22 in a small file", key("x", ARRAY, struct.pack("<IQ", U64, 1 << 22)), "cut short"),
    ("a value of an unknown type", key("x", 99, b""), "a value of type 99"),
]
MODELS: list[tuple[str, Change, str]] = [
    ("fewer layers than it holds", own("block_count", U32, 1), "has 1 layers, but holds weights of layer 1"),
    ("a layer said to predict tokens", own("nextn_predict_layers", U32, 1), "1 layers, but holds weights of layer 1"),
    ("all layers said to predict tokens", own("nextn_predict_layers", U32, 2), "of its 2 layers, 2 predict"),
    ("2 ** 31 layers", own("block_count", U32, (1 << 31) - 1), "block_count is 2147483647, not a whole number"),
    ("layers as text", own("block_count", TEXT, "2"), "block_count is '2', not a whole number"),
    ("half a layer", own("block_count", F32, 1.5), "block_count is 1.5, not a whole number"),
    ("experts used as text", own("expert_used_count", TEXT, "4"), "expert_used_count is '4'"),
    ("no experts used", own("expert_used_count", U32, 0), "expert_used_count is 0, not a whole number"),
    ("more experts used than there are", own("expert_used_count", U32, 9), "num_experts_per_tok is 9, .* only 8"),
    ("fewer experts than it holds", own("expert_count", U32, 4), "expert_count is 4, but its tensors have 8"),
    ("an epsilon that is not a number", own("attention.layer_norm_rms_epsilon", F32, NAN), "rms_epsilon is nan, not a"),
    ("a negative epsilon", own("attention.layer_norm_rms_epsilon", F32, -1e-6), "rms_epsilon is -.*, not 0 or more"),
    ("an epsilon as text", own("attention.layer_norm_rms_epsilon", TEXT, "tiny"), "rms_epsilon is 'tiny', not a num"),
    ("a rope base that is not a number", own("rope.freq_base", F32, NAN), "freq_base is nan, not a finite"),
    ("a rope base of 0", own("rope.freq_base", F32, 0.0), "freq_base is 0.0, not more than 0"),
    ("an endless rope base", own("rope.freq_base", F64, float("inf")), "freq_base is inf, not a finite"),
    ("a scale of nan", own("rope.scaling.factor", F32, NAN), "scaling.factor is nan"),
    ("no heads", own("attention.head_count", U32, 0), "head_count is 0, not a whole number"),
    ("heads that do not divide", own("attention.head_count", U32, 3), "64 rows of queries are no multiple of 3 heads"),
    ("other heads than their width says", own("attention.head_count", U32, 2), "key_length is 16, but its heads have"),
    ("a context of 1", own("context_length", U32, 1), "context_length is 1, not a whole number from 2"),
    ("no context", own("context_length", U32, 0), "context_length is 0"),
    ("heads by layer, one missing", own("attention.head_count_kv", ARRAY, array(U32, [2])), "1 values for 2 layers"),
    ("an empty list", own("attention.head_count", ARRAY, array(U32, [])), "head_count is \\[\\], not"),
    ("another width", own("embedding_length", U32, 32), "embedding_length is 32, but its tensors have 64"),
    ("another vocabulary", own("vocab_size", U32, 128), "vocab_size is 128, but its tensors have 256"),
    ("experts of two dimensions", reshape("blk.1.ffn_down_exps.weight", 64, 512), "has 2 dimensions instead of 3"),
    ("embeddings of one dimension", reshape("token_embd.weight", 64 * 256), "do not fit together|its tensors have"),
    ("a normalisation flag as number", own("expert_weights_norm", U32, 1), "weights_norm is 1, not true or false"),
    ("an architecture that is a number", key("general.architecture", U32, 3), "names no architecture"),
    ("split count as text", key("split.count", TEXT, "two"), "split.count is 'two'"),
    (
        "more tokens than embeddings",
        key("tokenizer.ggml.tokens", ARRAY, array(TEXT, [str(n) for n in range(300)])),
        "300 tokens, but embeddings of only 256",
    ),
]
VOCABULARIES: list[tuple[str, Change, str]] = [
    ("an end token as text", key("tokenizer.ggml.eos_token_id", TEXT, "end"), "eos_token_id is 'end', which is no"),
    ("tokens that are numbers", key("tokenizer.ggml.tokens", ARRAY, array(U32, [1, 2])), "tokens is not a list of str"),
    ("no tokens", key("tokenizer.ggml.tokens", U32, 1), "no vocabulary"),
    ("kinds of too few tokens", key("tokenizer.ggml.token_type", ARRAY, array(I32, [1])), "256 tokens, but 1 token_ty"),
    ("merges that are numbers", key("tokenizer.ggml.merges", ARRAY, array(U32, [1])), "merges is not a list of str"),
    ("a template that is a number", key("tokenizer.chat_template", U32, 1), "chat_template is 1"),
    ("a way to cut text that is a number", key("tokenizer.ggml.pre", U32, 1), "tokenizer.ggml.pre is 1"),
    ("a flag as text", key("tokenizer.ggml.add_bos_token", TEXT, "yes"), "add_bos_token is 'yes'"),
]


@pytest.mark.parametrize(
    ("change", "words"), [case[1:] for case in HEADERS + MODELS], ids=[case[0] for case in HEADERS + MODELS]
)
def test_damaged_headers_are_refused(file: Path, change: Change, words: str) -> None:
    raw = Raw.of(file)
    change(raw)
    refused(raw.write(file), words)


def refused(file: Path, words: str) -> None:
    before = hashlib.sha256(file.read_bytes()).digest()
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=f"(?s)(model.gguf|GGUF file).*({words})"):
            open_source(file).close()
        assert tracemalloc.get_traced_memory()[1] < 16 << 20  # nothing is allocated on a header's word
    finally:
        tracemalloc.stop()
    assert hashlib.sha256(file.read_bytes()).digest() == before
    assert [p.name for p in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(("change", "words"), [case[1:] for case in VOCABULARIES], ids=[c[0] for c in VOCABULARIES])
def test_damaged_vocabularies_are_refused(file: Path, change: Change, words: str) -> None:
    raw = Raw.of(file)
    change(raw)
    with pytest.raises(ModelError, match=words), open_job(raw.write(file), "model", "auto", 1):
        raise AssertionError("opened")


def test_a_token_that_is_not_in_the_vocabulary_is_none(file: Path) -> None:
    raw = Raw.of(file)
    raw.set("tokenizer.ggml.padding_token_id", U32, (1 << 32) - 1)
    raw.set("tokenizer.ggml.eos_token_id", I32, -1)
    with open_job(raw.write(file), "model", "auto", 1) as job:
        assert job.source.config["pad_token_id"] is None and job.source.config["eos_token_id"] is None


def test_parts_with_the_same_tensors(tmp_path: Path) -> None:
    make_gguf("qwen3_moe", tmp_path, parts=2, num_hidden_layers=1)
    first, second = sorted(tmp_path.glob("*.gguf"))
    raw = Raw.of(second)
    raw.rows[0].name = Raw.of(first).rows[0].name
    raw.write(second)
    with pytest.raises(ModelError, match=r"00002-of-00002.gguf has the tensor .* which another part"):
        open_source(first)


def test_a_sound_file_put_together_again_is_sound(file: Path, sound: bytes) -> None:
    assert Raw.of(file).write(file).read_bytes() == sound
    with open_job(file, "model", "auto", 1) as job:
        assert job.site.num_experts == 8


@pytest.mark.parametrize(
    "change",
    [
        key("x", ARRAY, struct.pack("<IQ", ARRAY, 1) * 2000 + array(U32, [1])),
        key("x", ARRAY, struct.pack("<IQ", U32, 1 << 62)),
        key("x", ARRAY, struct.pack("<IQ", TEXT, 1 << 62)),
        lie(pairs=1 << 40),
        key("x", 99, b""),
    ],
    ids=["nested", "numbers", "texts", "keys", "type"],
)
def test_the_library_shows_a_damaged_head_as_damaged(file: Path, change: Change) -> None:
    raw = Raw.of(file)
    change(raw)
    with pytest.raises(ModelError, match=r"model\.gguf is damaged"):
        read_metadata(raw.write(file))
