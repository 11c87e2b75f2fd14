"""ExpertFlow's routing-path predictor (sections 3.1 and 5.2): from token ids alone to the experts of all layers.

A small T5: the encoder reads the prompt, the decoder the tokens that the model is given, and a head per MoE layer gives
each expert's probability of being used by that token. Choices that the paper leaves open: two blocks on either side
with four heads of 64, which with T5's vocabulary are the paper's 7.2 MB; and, for decoder-only models, the decoder
reads the prompt's tokens too. Positions are relative, so that a window over the last `WINDOW` tokens can move on
without limit."""

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from core.policy.predict.nets.t5 import Bias, KeysValues, RMSNorm, T5Block, start_weights
from core.policy.predict.nets.training import Progress, TrainingState, batches, descend, packed, seeded, unpacked
from core.policy.predict.path_reader import WINDOW

NAME = "path"
EPOCHS, MOST, STEPS = 10, 30, 750  # minimum and maximum training epochs, and steps to reach with them


class Passage(NamedTuple):
    """One recorded request, as training data."""

    prompt: Sequence[int]  # token ids
    ids: Sequence[int]  # [m] all token ids that the model was given, those of the prompt first
    routes: torch.Tensor  # [m, L, k] integers: the experts that each of them used


class State(NamedTuple):
    """The decoder's state between two calls: keys and values of its own tokens and of the prompt, per block."""

    own: tuple[KeysValues | None, ...]
    prompt: tuple[KeysValues, ...]
    mask: torch.Tensor | None  # [B, S] which of the prompt's positions are used; None = all


class RoutingPathNet(nn.Module):
    """`tokens` [V] int64, ascending: the token ids with their own embedding row; all others share row 0."""

    def __init__(
        self,
        layers: int,
        experts: int,
        tokens: torch.Tensor,
        d_model: int = 32,
        d_ff: int = 2048,
        heads: int = 4,
        d_kv: int = 64,
        blocks: int = 2,
    ) -> None:
        super().__init__()
        self.config = {
            "layers": layers,
            "experts": experts,
            "tokens": len(tokens),
            "d_model": d_model,
            "d_ff": d_ff,
            "heads": heads,
            "d_kv": d_kv,
            "blocks": blocks,
        }
        self.layers, self.experts = layers, experts
        self.tokens: torch.Tensor
        self.register_buffer("tokens", tokens.long())
        self.embed = nn.Embedding(len(tokens) + 1, d_model)
        self.reads, self.writes = Bias(heads, both_ways=True), Bias(heads, both_ways=False)
        self.encoder = nn.ModuleList(T5Block(d_model, d_ff, heads, d_kv, cross=False) for _ in range(blocks))
        self.decoder = nn.ModuleList(T5Block(d_model, d_ff, heads, d_kv, cross=True) for _ in range(blocks))
        self.read_norm, self.write_norm = RMSNorm(d_model), RMSNorm(d_model)
        self.heads = nn.Linear(d_model, layers * experts)

    def _writers(self) -> list[T5Block]:
        return [block for block in self.decoder if isinstance(block, T5Block)]

    def places(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids of any shape -> rows of the embedding."""
        if not len(self.tokens):
            return torch.zeros_like(ids)
        at = torch.searchsorted(self.tokens, ids).clamp_max(len(self.tokens) - 1)
        return torch.where(self.tokens[at] == ids, at + 1, 0)

    def encode(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> State:
        """Encode the prompts [B, S] int64, using the positions in `mask` [B, S]: the initial decoder state. For one
        prompt, pass the last WINDOW tokens."""
        x = self.embed(self.places(ids))
        bias = self.reads(ids.shape[1], ids.shape[1])
        if mask is not None:
            bias = bias.masked_fill(~mask[:, None, None, :], float("-inf"))
        for block in self.encoder:
            x, _ = block(x, bias)
        x = self.read_norm(x)
        return State((None,) * len(self.decoder), tuple(block.over(x) for block in self._writers()), mask)

    def decode(self, ids: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """The next tokens [B, T] -> (logits [B, T, L, E] that each expert is used for them, the state after them)."""
        x = self.embed(self.places(ids))
        before = 0 if state.own[0] is None else state.own[0].keys.shape[2]
        bias = self.writes(ids.shape[1], before + ids.shape[1])
        over = (
            None
            if state.mask is None
            else torch.zeros_like(state.mask, dtype=x.dtype).masked_fill(~state.mask, float("-inf"))[:, None, None, :]
        )
        own: list[KeysValues] = []
        for block, past, prompt in zip(self._writers(), state.own, state.prompt, strict=True):
            x, kept = block(x, bias, past, prompt, over)
            own.append(KeysValues(kept.keys[:, :, 1 - WINDOW :], kept.values[:, :, 1 - WINDOW :]))
        logits = self.heads(self.write_norm(x)).unflatten(-1, (self.layers, self.experts))
        return logits, State(tuple(own), state.prompt, state.mask)


def train(
    data: Sequence[Passage],
    *,
    experts: int,
    epochs: int = 0,
    batch: int = 16,
    rate: float = 1e-3,
    seed: int = 0,
    progress: Progress = lambda text, share: None,
    cancel: threading.Event | None = None,
    state: TrainingState | None = None,
) -> RoutingPathNet | None:
    """Learn the routing of `data`: binary cross-entropy per layer and expert, Adam with weight decay .01 (the paper
    does not say of which kind: see `descend`), cosine schedule. Long passages are cut into pieces of WINDOW tokens.
    `epochs` = 0: as many as make STEPS steps, between EPOCHS and MOST. `state`: from which a cancelled or interrupted
    training of the same data continues.

    Deterministic for the same data and seed. None when cancelled. Raises ValueError when there are no tokens."""
    pieces = [
        Passage(one.prompt[-WINDOW:], one.ids[at : at + WINDOW], one.routes[at : at + WINDOW])
        for one in data
        for at in range(0, len(one.ids), WINDOW)
    ]
    if not pieces:
        raise ValueError("there are no tokens to learn from")
    layers, k = pieces[0].routes.shape[1:]
    known = torch.tensor(sorted({token for one in data for ids in (one.ids, one.prompt) for token in ids}))
    with seeded(seed) as generator:
        net = RoutingPathNet(layers, experts, known)
        start_weights(net)
        share = k / experts
        nn.init.constant_(net.heads.bias, float(torch.tensor(share).logit().clamp(-8, 8)))
        each = -(-len(pieces) // batch)
        epochs = epochs or min(MOST, max(EPOCHS, -(-STEPS // each)))
        pick = batches(len(pieces), batch, generator, [len(one.ids) for one in pieces])  # few padded positions

        def loss_of(step: int) -> torch.Tensor:
            chosen = [pieces[i] for i in pick(step).tolist()]
            prompts, asked = _padded([one.prompt or one.ids[:1] for one in chosen])
            ids, given = _padded([one.ids for one in chosen])
            logits, _ = net.decode(ids, net.encode(prompts, asked))
            target = torch.zeros_like(logits[given])  # [tokens, L, E]
            target.scatter_(-1, torch.cat([one.routes for one in chosen]).long(), 1.0)
            return functional.binary_cross_entropy_with_logits(logits[given], target)

        done = descend(
            net,
            epochs * each,
            loss_of,
            "Training the routing-path predictor",
            rate=rate,
            progress=progress,
            cancel=cancel,
            state=state,
        )
    return None if done is None else net


@torch.no_grad()
def recall(net: RoutingPathNet, data: Sequence[Passage]) -> torch.Tensor:
    """[L] share of each layer's experts that are among the net's k likeliest, over all tokens."""
    layers, k = data[0].routes.shape[1:]
    hits, tokens = torch.zeros(layers), 0
    for one in data:
        state = net.encode(torch.tensor([(one.prompt or one.ids[:1])[-WINDOW:]]))
        for at in range(0, len(one.ids), WINDOW):
            logits, state = net.decode(torch.tensor([one.ids[at : at + WINDOW]]), state)
            estimated, true = logits[0].topk(k).indices, one.routes[at : at + WINDOW].long()
            hits += (estimated[..., :, None] == true[..., None, :]).any(-2).float().sum((0, 2))
            tokens += len(true)
    return hits / (tokens * k)


def to_tensors(net: RoutingPathNet) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """(weights by "path...." names, {"path": configuration}), as stored in a profile."""
    return packed(NAME, net), {NAME: dict(net.config)}


def from_tensors(tensors: Mapping[str, torch.Tensor], settings: Mapping[str, object]) -> RoutingPathNet:
    """The net from a profile's `nets` and `settings`. Raises KeyError or RuntimeError when they are incomplete."""
    config = settings[NAME]
    assert isinstance(config, Mapping)
    sizes = {name: int(value) for name, value in config.items()}
    net = RoutingPathNet(tokens=tensors[f"{NAME}.tokens"].long(), **{n: v for n, v in sizes.items() if n != "tokens"})
    unpacked(NAME, net, tensors)
    return net


def _padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of different lengths as ([B, longest] int64, mask of real positions)."""
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    return ids, torch.arange(longest) < torch.tensor([[len(row)] for row in rows])
