"""bench predictors: recall of each predictor, layer by layer, and its cost on the computing thread.

Recall is measured on a model whose profile comes from other texts than the questions; predictors with background work
are waited for, so that their recall is the method's. Cost is measured without waiting."""

from statistics import fmean

from bench.harness.engines import READ, divided
from bench.harness.report import headline
from bench.harness.run import RESIDENT, Result, Run, Suite
from bench.routing.probe import listen, subjects
from core.engine.texts import bundled
from core.measure.calibrate.gather import calibrate
from core.system.wording import grid


def measure(run: Run, model: str = "demo", tokens: int = 256, answer: int = 48) -> Result:
    """`tokens` = decoded tokens per predictor, at most `answer` of each answer."""
    found = {}
    with run.loaded(model, RESIDENT) as engine:
        known, held_out = divided(bundled(model))
        run.say("calibrating")
        profile = calibrate(engine, known, limit=600 if run.small else READ)
        engine.use_profile(profile)
        layers, k = engine.shape.layers, engine.shape.top_k
        for name, (predictor, params) in subjects().items():
            run.say(name)
            patient = listen(engine, predictor, params, held_out, tokens, answer, patient=True)
            quick = listen(engine, predictor, params, held_out, tokens, answer, patient=False)
            by_layer = patient.recall(layers, k)
            found[name] = {
                "recall_at_k": fmean(by_layer),
                "recall_by_layer": by_layer,
                "recall_by_rank": patient.recall_by_rank(layers, k),
                "blocks": patient.blocks(layers, k),
                "rank_blocks": patient.rank_blocks(layers, k),
                "recall_of_all_named": fmean(patient.recall(layers)),
                "recall_in_time": fmean(quick.recall(layers, k)),
                "named": patient.named(),
                "ms_per_token": quick.ms_per_token(),
            }
    return {
        "profile_tokens": profile.tokens,
        "predictors": found,
    }


def table(r: Result) -> list[str]:
    found = r["predictors"]
    rows = [
        (
            name,
            f"{one['recall_at_k']:.1%}",
            f"{one['recall_of_all_named']:.1%}",
            f"{one['named']:.1f}",
            f"{one['recall_in_time']:.1%}",
            f"{one['ms_per_token']['cpu']:.3f} / {one['ms_per_token']['wall']:.3f}",
        )
        for name, one in sorted(found.items(), key=lambda pair: -pair[1]["recall_at_k"])
    ]
    ranks = range(r["top_k"])
    return [
        f"{headline(r)}; recall@{r['top_k']} of {r['tokens']} decoded tokens; ms per token on the computing thread "
        "(its own work / with waits)",
        *grid(("predictor", "recall", "all named", "named", "in time", "ms"), rows),
        "  recall by layer:",
        *grid(
            ("", *[""] * r["layers"]),
            [(name, *(f"{rate:.0%}" for rate in one["recall_by_layer"])) for name, one in found.items()],
        ),
        "  recall by the chosen expert's weight, heaviest first, mean of the layers:",
        *grid(
            ("", *["" for _ in ranks]),
            [
                (n, *(f"{fmean(rank):.0%}" for rank in zip(*one["recall_by_rank"], strict=True)))
                for n, one in found.items()
            ],
        ),
    ]


SUITE = Suite(measure, table, small={"tokens": 6, "answer": 6})
