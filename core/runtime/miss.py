"""Decides what happens to a layer's missing experts: wait, substitute, drop, or execute the predicted routing instead.

Called by `core.runtime.moe_step` between the router and the cache, on the compute thread, and only while a lossy option
is on. The decision for each missing expert, and its reason, become events of the step record.
"""

from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from core.cache.expert_cache import ExpertCache
from core.cache.lease import SkippedRequest
from core.memory.to_device import to_device
from core.metrics.lossy_events import CHOICE, Action, Lossy
from core.policy.substitute import Ask, Gates, Substitute, batch, plain
from core.policy.substitute.entropy import entropy
from core.profile import Profile
from core.runtime.gates import ALWAYS, gates_of, thresholds
from core.runtime.prediction.predictor_host import PredictorHost
from core.runtime.prediction.speculation import Executing
from core.runtime.rows import NOTHING, Routed, distinct
from core.settings.lossy import LossySettings
from core.settings.registry import create
from core.types import ModelShape, Outcome, Phase

Bytes = npt.NDArray[np.integer[Any]]
OUTCOME_OF = {Action.SUBSTITUTE: Outcome.SUBSTITUTED, Action.DROP: Outcome.DROPPED, Action.PREDICTED: Outcome.PREDICTED}


class MissPolicy:
    """For one model. `configure` between passes; `begin`, then `route` once per layer, then `take` within a pass;
    `forget` what a pass noted that is not taken."""

    def __init__(
        self, shape: ModelShape, expert_cache: ExpertCache, predictor_host: PredictorHost, device: torch.device
    ) -> None:
        self.executing = Executing(predictor_host)
        self.profile: Profile | None = None
        self._shape, self._expert_cache, self._predictor_host, self._device = (
            shape,
            expert_cache,
            predictor_host,
            device,
        )
        self._substitute: Substitute | None = None
        self._gates: list[Gates] = []  # per layer; empty: every miss is waited for
        self._budget = -1.0  # bytes that a pass may copy on demand; < 0: no adaptive gate
        self._temperature, self._renormalise = 1.0, False
        self._begin_anew()

    def configure(self, old: LossySettings | None, settings: LossySettings, profile: Profile | None) -> None:
        """Apply settings. `core.engine.lossy_check` has checked that they are possible."""
        if settings == old and profile is self.profile:
            return
        shape, self.profile = self._shape, profile
        self._substitute, self._gates = None, []
        if settings.substitutes:
            self._substitute = substitute = cast(Substitute, create("substitute", *settings.substitute))
            substitute.prepare(profile, shape.layers, shape.experts, self._device)
        if settings.miss != "wait":
            self._gates = gates_of(settings, self._substitute, shape, profile, self._device)
        adaptive = settings.miss != "wait" and settings.batch_gate == "adaptive"
        self._budget = settings.beta_budget * 1e6 if adaptive else -1.0
        self._temperature = settings.gate_temperature
        self._renormalise = settings.drop_renormalise
        self.executing.use(
            settings.execute, settings.execute_weights, settings.execute_share, prefill=settings.execute_prefill
        )
        self._predictor_host.enable_outputs(
            router=self.executing.active or bool(self._substitute and self._substitute.logits),
            predictions=bool(self._substitute and self._substitute.named),
        )

    @property
    def active(self) -> bool:
        """Whether a lossy option is on."""
        return bool(self._gates) or self.executing.active

    @property
    def thresholds(self) -> list[float]:
        """[L] entropy at or below which nothing is replaced; NaN for layers without an entropy gate."""
        return thresholds(self._gates, self._shape.layers)

    def look(self, layer: int) -> tuple[list[float], npt.NDArray[np.float32] | None] | None:
        """For the deck: `thresholds` and the substitution scores [E, E] of one layer; None while no lossy option is
        on."""
        matrix = self._substitute.matrix(layer) if self._substitute is not None else None
        return (self.thresholds, None if matrix is None else matrix.float().cpu().numpy()) if self.active else None

    def begin(self, phase: Phase) -> None:
        """Start a pass."""
        if self.executing.active:
            self.executing.begin(phase)
        self.forget()

    def forget(self) -> None:
        """Discard what a pass noted."""
        if self._weights:
            self._begin_anew()

    def _begin_anew(self) -> None:
        self._rows: list[np.ndarray[Any, Any]] = []
        self._weights: list[torch.Tensor] = []
        self._delta, self._beta = np.full((2, self._shape.layers), np.nan, np.float32)

    def route(self, layer: int, ids: torch.Tensor, weights: torch.Tensor, asked: list[list[int]]) -> Routed:
        """The routing to compute in place of the router's ids [T, k] and weights [T, k]."""
        self._weights.append(weights)
        now = Routed(ids, weights, asked, distinct(asked), asked)
        if self.executing.active:
            now = self._execute(layer, now)
        missing = self._expert_cache.lacking(layer, now.wanted)
        self._delta[layer] = len(missing) / max(1, len(now.wanted))
        if self._gates and missing and layer >= self._shape.encoder_layers:
            now = self._replace(layer, now, missing)
        return now

    def take(self, tokens: int) -> Lossy | None:
        """End a pass over `tokens` tokens: its lossy events; None while no lossy option is on."""
        if not self.active:
            return None
        layers = self._shape.layers
        tae = np.full((layers, tokens), np.nan, np.float16)
        if len(self._weights) == layers:
            gates = torch.stack(self._weights).float().cpu().numpy()  # [L, T, k]
            tae = entropy(gates.astype(np.float64), self._temperature).astype(np.float16)
        rows = np.concatenate(self._rows) if self._rows else np.empty(0, CHOICE)
        return Lossy(rows, self._delta, self._beta, tae, self.executing.take_reweighed())

    # ------------------------------------------------------------------ internals

    def _execute(self, layer: int, now: Routed) -> Routed:
        """Use the predicted routing for the tokens that qualify."""
        ids, weights, changed = self.executing.route(layer, now.ids, now.weights, now.asked)
        if ids is now.ids:
            return now
        both = torch.stack((ids, changed.to(ids.dtype))).cpu().numpy()  # read back at once
        chosen: list[list[int]] = both[0].tolist()
        token, place = np.nonzero(both[1])
        self._note(
            layer,
            token,
            np.array(now.asked)[token, place],
            np.array(chosen)[token, place],
            np.uint8(Action.PREDICTED),
            np.uint8(0),
        )
        wanted = distinct(chosen)
        spared = set(now.wanted).difference(wanted)
        return replace(
            now,
            ids=ids,
            weights=weights,
            chosen=chosen,
            wanted=wanted,
            fates=[SkippedRequest(expert, Outcome.PREDICTED) for expert in sorted(spared)],
            executed=True,
        )

    def _replace(self, layer: int, now: Routed, missing: list[int]) -> Routed:
        """Substitute or drop missing experts as far as the gates allow."""
        lacks, ready = self._expert_cache.availability(layer)
        gates, source = self._gates[layer], self._substitute
        if self._budget >= 0:
            share = self._affordable(layer) / len(now.wanted)
            self._beta[layer] = min(share, 1.0)
            gates = replace(gates, beta=0.0 if self._delta[layer] <= share else ALWAYS)
        elif gates.beta < ALWAYS:
            self._beta[layer] = gates.beta
        ask = Ask(
            layer,
            now.ids,
            now.weights,
            to_device(lacks, self._device),
            to_device(ready, self._device),
            *self._inputs(layer, source),
        )
        if len(now.chosen) > 1 or (source is not None and source.reroutes):
            found = batch.select(ask, gates, source)
            ids, action, why = torch.stack((found.ids, found.action.long(), found.why.long())).cpu().numpy()
            return self._taken(layer, now, missing, ids.tolist(), action, why, found.weights)
        listed = partial(source.listed, ask, 0) if source is not None else no_candidates
        one = plain.pick(now.chosen[0], ask.numbers("weights"), lacks, ready, gates, listed, float(self._delta[layer]))
        return self._taken(layer, now, missing, [one.ids], np.array([one.action]), np.array([one.why]), None)

    def _inputs(self, layer: int, source: Substitute | None) -> tuple[Any, Any, Any]:
        """Further inputs of a substitute: the router's logits, the predicted experts, and the router's weighting
        rule."""
        predictor_host, logits, named, weigh = self._predictor_host, None, None, None
        layer -= self._shape.encoder_layers  # which no predictor sees
        if source is not None and source.logits:
            logits, rule = predictor_host.output(layer).logits.float(), predictor_host.rules[layer]
            weigh = partial(rule.weigh, logits) if rule is not None else None
        if source is not None and source.named:
            named = predictor_host.predicted_scores(layer)
        return logits, named, weigh

    def _affordable(self, layer: int) -> int:
        """Experts that may still be loaded on demand in this layer: an even share of the remaining budget."""
        left = self._budget - self._expert_cache.counts.demand_bytes
        return max(0, int(left / (self._shape.layers - layer) / self._shape.expert_bytes))

    def _taken(
        self,
        layer: int,
        now: Routed,
        missing: list[int],
        ids: list[list[int]],
        action: Bytes,
        why: Bytes,
        weights: torch.Tensor | None,
    ) -> Routed:
        """Record the decisions, [T, k] each, and return the resulting routing; `weights` only where they changed."""
        token, place = np.nonzero(action)
        done, asked = action[token, place], np.array(now.chosen)[token, place]
        self._note(layer, token, asked, np.array(ids)[token, place], done, why[token, place])
        if not (done >= Action.SUBSTITUTE).any():
            return now
        weights = now.weights if weights is None else weights
        changed = to_device(ids, self._device)
        if (done == Action.DROP).any():
            weights = without(weights, changed == NOTHING, renormalise=self._renormalise)
        wanted, how = distinct(ids), dict(zip(asked.tolist(), done.tolist(), strict=True))
        fates = [
            SkippedRequest(e, OUTCOME_OF[Action(how[e])])
            for e in missing
            if e not in wanted and how.get(e, 0) in OUTCOME_OF
        ]
        kept = (one for one in now.fates if one.expert not in wanted)  # others have been taken as substitutes
        return replace(now, ids=changed, weights=weights, chosen=ids, wanted=wanted, fates=[*kept, *fates])

    def _note(self, layer: int, token: Any, expert: Any, to: Any, action: Any, why: Any) -> None:
        rows = np.empty(len(token), CHOICE)
        rows["layer"], rows["token"], rows["expert"], rows["to"] = layer, token, expert, to
        rows["action"], rows["why"] = action, why
        self._rows.append(rows)


def no_candidates(position: int, expert: int) -> tuple[tuple[int, float], ...]:
    """The candidates where substitution is off: none."""
    return ()


def without(weights: torch.Tensor, dropped: torch.Tensor, *, renormalise: bool) -> torch.Tensor:
    """Gate weights [T, k] with those of dropped experts set to 0; `renormalise` scales a token's other weights to the
    original sum."""
    kept = weights.masked_fill(dropped, 0.0)
    if not renormalise:
        return kept
    before, after = weights.sum(-1, keepdim=True), kept.sum(-1, keepdim=True)
    return kept * (before / after.clamp_min(torch.finfo(kept.dtype).tiny))
