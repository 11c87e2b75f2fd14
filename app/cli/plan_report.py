"""The result of `plan`, as a table and as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from core.policy.allocation.cache_plan import CachePlan
from core.policy.allocation.curves import Curves
from core.policy.allocation.expert_split import LayerTimes
from core.system.wording import format_bytes, grid

PLANNED = "planned"  # the plan among the others


@dataclass(frozen=True, slots=True)
class Answer:
    """A plan, what it is compared with, and what both were computed from."""

    plan: CachePlan
    compared: Mapping[str, CachePlan]
    curves: Curves
    times: LayerTimes
    experts: int  # memory in whole experts, the buffer included
    aside: int  # of these, the prefetch buffer
    device_bytes: int | None  # in all; None = no model was named
    tpot_ms: float | None  # the requested time
    basis: str  # of the curves, in the user's words
    measured: str  # of the times


def report(answer: Answer) -> str:
    """The result as text."""
    curves, times, plan = answer.curves, answer.times, answer.plan
    total = curves.layers * curves.experts
    parts = [f"{answer.experts} of {total} experts, {answer.experts / total:.1%}"]
    parts += [f"{format_bytes(answer.device_bytes)} in all"] if answer.device_bytes is not None else []
    parts += [f"{answer.aside} of them the prefetch buffer"] if answer.aside else []
    head = "Budget" if answer.tpot_ms is None else f"Least budget for {answer.tpot_ms:g} ms a token"
    rows = {PLANNED: plan, **answer.compared}
    lines = [
        f"{curves.layers} layers of {curves.experts} experts, {curves.top_k} active",
        f"Times: attention {times.att_ms:.3g} ms and experts {times.moe_ms:.3g} ms a layer, the rest "
        f"{times.head_ms:.3g} ms, a copy {times.load_ms:.3g} ms ({answer.measured})",
        f"Statistics: {answer.basis}",
        f"{head}: {'; '.join(parts)}",
        f"Predicted, of which computing takes {plan.compute_ms:.4g} ms:",
        *grid(
            ("", "waiting ms", "ms a token", "tokens/s"),
            [(n, f"{sum(p.exposed_ms):.2f}", f"{p.tpot_ms:.2f}", f"{1e3 / p.tpot_ms:.2f}") for n, p in rows.items()],
        ),
        f"The plan, after {plan.rounds} moves:",
        *grid(
            ("layer", "slots", "experts", "part resident", "waiting ms"),
            [
                (str(layer), f"{slots:.2f}", str(cached), f"{theta:.1%}", f"{waits:.3f}")
                for layer, (slots, cached, theta, waits) in enumerate(
                    zip(plan.slots, plan.cached, plan.theta, plan.exposed_ms, strict=True)
                )
            ],
        ),
    ]
    return "\n".join(lines)


def summary(answer: Answer) -> dict[str, object]:
    """The result as plain values for JSON."""
    curves = answer.curves
    return {
        "layers": curves.layers,
        "experts": curves.experts,
        "top_k": curves.top_k,
        "times": {**asdict(answer.times), "basis": answer.measured},
        "statistics": {"tokens": curves.tokens, "recall": curves.recall.round(4).tolist(), "basis": answer.basis},
        "budget": {"experts": answer.experts, "buffer": answer.aside, "bytes": answer.device_bytes},
        "target_ms": answer.tpot_ms,
        "tpot_ms": answer.plan.tpot_ms,
        "plan": answer.plan.as_json(),
        "compared_ms": {name: one.tpot_ms for name, one in answer.compared.items()},
    }
