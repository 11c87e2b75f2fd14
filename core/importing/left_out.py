"""What of a checkpoint its pack will not have: heads that predict further tokens, and parts for pictures or sound."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from core.hf.checkpoint_checks import NUMBERED

AHEAD = "heads that predict further tokens (MTP)"
KINDS = {
    AHEAD: re.compile(r"(?:^|\.)(mtp\w*|nextn\w*|eh_proj|enorm|hnorm|shared_head)(?:\.|$)"),
    "the part that reads pictures": re.compile(
        r"(?:^|\.)(visual|vision\w*|vit|image\w*|mm_projector|multi_modal_projector|embed_vision)(?:\.|$)"
    ),
    "the part that hears or speaks": re.compile(r"(?:^|\.)(audio\w*|embed_audio|speech\w*|talker|code2wav)(?:\.|$)"),
}
FURTHER = f"{AHEAD} after the first one, which is imported"
COPIED = re.compile(r"embed_tokens|shared_head[._]head|lm_head")
COPIES = "copies of the embeddings and the output layer, which the head shares with the model"
OTHER = "weights that the model has no use for"


class LeftOut(NamedTuple):
    """One kind of weights, and the bytes that they take in the source (codes: as plain numbers)."""

    what: str
    bytes: int


def left_out(sizes: Mapping[str, int], head: str | None = None) -> tuple[LeftOut, ...]:
    """By kind, the largest first. `sizes`: bytes of the tensors that nothing reads, by their names. A layer that has a
    head's weights is one as a whole. `head`: why the checkpoint's head is not imported; "" = it is."""
    layers = {(at["before"], at["number"]) for name in sizes if KINDS[AHEAD].search(name) and (at := _layer(name))}
    found: Counter[str] = Counter()
    for name, size in sizes.items():
        at = _layer(name)
        kind = next((kind for kind, known in KINDS.items() if known.search(name)), OTHER)
        kind = AHEAD if at and (at["before"], at["number"]) in layers else kind
        found[FURTHER if kind == AHEAD and head == "" and not COPIED.search(name) else kind] += size
    named = {AHEAD: COPIES if head == "" else f"{AHEAD}: {head}" if head else AHEAD}
    return tuple(LeftOut(named.get(kind, kind), size) for kind, size in found.most_common())


def _layer(name: str) -> re.Match[str] | None:
    return NUMBERED.fullmatch(name)
