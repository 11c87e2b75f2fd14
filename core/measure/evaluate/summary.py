"""A whole evaluation as plain data: its conditions, and every row with its units."""

from collections.abc import Sequence
from typing import Any

from core.engine import Engine
from core.measure.evaluate.rows import FIGURES, EvaluationRow, pareto, to_json
from core.measure.evaluate.run import Material


def about(engine: Engine, material: Material, text: str = "", questions: str = "") -> dict[str, Any]:
    """The model, the machine, the link, the profile, and the questions and text used. `text` and `questions` name the
    user's own, if any."""
    manifest, shape, profile = engine.manifest(), engine.shape, engine.profile
    pace = engine.transfers.pace
    own = engine.model_name == "demo"
    return {
        "model": engine.model_name,
        "model_hash": engine.model_hash,
        "layers": shape.layers,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "expert_bytes": shape.expert_bytes,
        "questions": {
            "seen": sum(one.seen for one in material.questions),
            "unseen": sum(not one.seen for one in material.questions),
            "source": questions or ("the demo model's facts" if own else "none"),
            "note": material.note,
        },
        "text": {
            "tokens": material.tokens,
            "source": text or ("held-out documentation of Python" if own else "the bundled prompts"),
        },
        "link": f"emulated, {pace.gbps:g} GB/s and {pace.latency_us:g} us a copy" if pace else "this machine's own",
        "emulated": bool(pace),
        "profile": None
        if profile is None
        else {"tokens": profile.tokens, "source": profile.source, "parts": list(profile.parts())},
        "settings": {name: engine.settings[name] for name in ("eviction", "scope", "layer_slots", "predictor")},
        **{name: manifest[name] for name in ("format", "dtype", "device_name", "decode_threads", "versions")},
    }


def result(about: dict[str, Any], rows: Sequence[EvaluationRow]) -> dict[str, Any]:
    """Adds all rows and, by residency, the modes on the Pareto front of accuracy (exact match; without questions
    agreement) and speed."""
    accuracy = "exact_match" if any(one.exact_match is not None for one in rows) else "agreement"
    shares = dict.fromkeys(one.residency for one in rows)
    return {
        **about,
        "units": {name: unit for name, (unit, _) in FIGURES.items()},
        "pareto": {
            f"{share:g}": [one.mode for one in pareto([r for r in rows if r.residency == share], accuracy)]
            for share in shares
        },
        "rows": [to_json(one) for one in rows],
    }
