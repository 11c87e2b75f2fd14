"""Does it fit, and how fast will it be? Computed from config, manifest and file headers, before weights are read."""

from core.capacity.forecast import Forecast, Seen, Speeds, forecast, mean_speeds
from core.capacity.free_memory import device_free, host_free
from core.capacity.plan import Plan, plan
from core.memory.disk import measure_disk
from core.memory.link import Link, measure_gbps, scaled_gbps
from core.settings.loading import LoadSpec
from core.system.wording import format_bytes
from core.types import Fit, Memory

HOST_MARGIN = 256 << 20  # host memory left to the system
SAFE = 0.9  # share of the free memory that a budget may take without a warning


def estimate(spec: LoadSpec, instead_of: Memory | None = None, seen: Seen | None = None, forecast: bool = True) -> Fit:
    """Estimates whether a load fits and how fast it will be, without reading weights.

    `instead_of` = memory of the model loaded now, which is freed first; `seen` = what is known from earlier use;
    `forecast` = include the speed forecast. Takes milliseconds, and with a forecast a short measurement of this machine
    the first time for a model. Raises ModelError when the model itself is unusable.
    """
    return fit_of(plan(spec, instead_of), instead_of, seen, forecast)


def fit_of(plan: Plan, instead_of: Memory | None = None, seen: Seen | None = None, forecast: bool = True) -> Fit:
    """The verdict on a plan, next to a loaded model or replacing it (`instead_of`). `forecast` = include the
    speed forecast."""
    settings, tier = plan.spec.settings, plan.tier
    sizes = plan.sizes.under(settings)
    budget, scope, cpu = settings.cache.budget, settings.cache.scope, plan.device.type == "cpu"
    free, on_host = device_free(plan.device, instead_of), host_free(plan.device, instead_of)
    slots, least = sizes.slots(budget), sizes.slots_min(scope)
    problem, warning = sizes.problem(budget, scope, free), ""
    if not problem and tier.bytes + (sizes.budget_bytes(budget) if cpu else 0) + HOST_MARGIN > on_host:
        problem = _lacks_host_memory(plan, on_host)
    safe = int(SAFE * free) - (tier.bytes if cpu else 0)
    most = max(0, min(sizes.slots_all, (safe - sizes.fixed) // sizes.slot))
    suggested = f"{most * 100 // sizes.slots_all}%" if most >= least else ""
    if not problem and slots > most:
        warning = (
            f"This leaves less than {1 - SAFE:.0%} of the memory that is free now. Other programs may be slowed "
            "down" + (f"; {suggested} would be safe." if suggested else ".")
        )
    elif not problem and slots < sizes.slots_all and slots < 2 * least:
        warning = "Barely more than one token's experts fit: expect almost every request to be fetched."
    from_disk = tier.kind != "all"
    expected = _forecast(plan, slots, seen or Seen()) if forecast and not problem else Forecast((0, 1), (0, 0), "")
    return Fit(
        model=plan.spec.model,
        shape=sizes.shape,
        format=plan.format,
        device=str(plan.device),
        context=plan.context,
        context_limit=plan.outline.context_limit,
        dense=sizes.dense,
        kv=sizes.kv,
        workspace=sizes.workspace,
        slots=slots // sizes.blocks,
        slots_min=least // sizes.blocks,
        budget=sizes.budget_bytes(budget),
        budget_min=plan.bytes_min,
        budget_all=sizes.bytes(sizes.slots_all),
        device_free=free,
        host=tier.bytes,
        host_free=on_host,
        disk=_on_disk(plan) if from_disk and slots < sizes.slots_all else 0,
        hit_low=expected.hit[0],
        hit_high=expected.hit[1],
        tok_s_low=expected.tok_s[0],
        tok_s_high=expected.tok_s[1],
        basis=expected.basis,
        suggested=suggested,
        problem=problem,
        warning=warning,
        note=plan.note,
    )


def _on_disk(plan: Plan) -> int:
    """Bytes of all experts that are cached, in the files of their pack."""
    pack = plan.pack
    assert pack is not None
    return pack.experts * sum(pack.kind(layer).padded_bytes for layer in range(plan.sizes.shape.cached_layers))


def _lacks_host_memory(plan: Plan, free: int) -> str:
    besides = " besides the budget" if plan.device.type == "cpu" else ""
    remedy = "Import the model (its experts are then read from disk), choose a smaller expert format"
    remedy = "Choose less host memory" if plan.pack is not None else remedy
    return (
        f"The experts need {format_bytes(plan.tier.bytes)} of host memory{besides}, but only {format_bytes(free)} are "
        f"free. {remedy}, or close other programs."
    )


def copies_gbps(plan: Plan) -> float:
    """Measured GB/s at which the slowest tier delivers experts to the device."""
    disk = [] if plan.tier.kind == "all" else [measure_disk(plan.files.path).gbps]
    return min(measure_gbps(plan.device), *disk, float("inf"))


def _forecast(plan: Plan, slots: int, seen: Seen) -> Forecast:
    """The forecast, from speeds that are measured once per codec, device and pack."""
    fast = plan.spec.arithmetic != "reference"
    speeds = mean_speeds(plan.codecs, plan.outline.hidden, plan.sizes.shape.top_k, fast)
    link = _link(plan, speeds, seen.link)
    where = "over an emulated link" if link.emulated else "over the link" if plan.device.type == "cuda" else "in memory"
    if plan.tier.kind != "all" and not link.emulated:
        where = "from disk"
    return forecast(
        plan.sizes,
        slots // plan.sizes.blocks,
        plan.spec.settings,
        speeds,
        link,
        f"{where} at {link.gbps:.2g} GB/s",
        seen,
    )


def _link(plan: Plan, speeds: Speeds, known: Link | None) -> Link:
    """The link that the settings ask for: emulated, the one that is `known` from a load, or as this machine's would be
    measured at a load."""
    requested = plan.spec.settings.link
    if requested.kind == "emulated":
        return Link(requested.gbps, requested.latency_us, True)
    if known is not None:
        return known
    if requested.kind == "auto" and plan.spec.model == "demo" and plan.device.type == "cpu":
        layer_ms = plan.sizes.shape.top_k * speeds.expert_ms + speeds.block_ms[1]
        return Link(scaled_gbps(layer_ms, plan.sizes.blob, requested.latency_us), requested.latency_us, True)
    return Link(copies_gbps(plan))
