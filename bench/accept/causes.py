"""Likely causes of what `launch.py accept` found on a machine: of what failed by what it printed, of what is slow by
its figures. Each with what to look at, so that a file says what to mend without asking its sender again."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

Figures = Mapping[str, Any]
LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.97, 5: 3.94, 6: 7.56}  # PCI-SIG's figures, one direction, without headers
REACHED = 0.75  # of a link's figure that large copies from pinned memory reach


class Cause(NamedTuple):
    """A likely cause of what a check found, the evidence, and what to look at."""

    check: str
    cause: str
    evidence: str
    look: str


# What a failed check prints -> its likely cause, and where to look.
PRINTED = (
    (
        r"no kernel image is available|not compatible with the current PyTorch",
        "This torch has no code for this card.",
        "`doctor --mend`; the architectures in app/start/installer.py",
    ),
    (
        r"driver version is insufficient|CUDA error: system has unsupported",
        "The driver is older than this torch's CUDA.",
        "the driver; doctor's line GPU",
    ),
    (
        r"illegal memory access|misaligned address",
        "A kernel reads or writes outside its slots, or a slot was given on too early.",
        "the check sanitizer; core/memory/codec/kernels; the events of core/memory/transfer.py",
    ),
    (
        r"out of memory|OutOfMemory",
        "There was less room than the memory plan took for granted.",
        "core/capacity; figures of the check memory; other programs on the card",
    ),
    (
        r"Failed to find C compiler|no C compiler",
        "Triton needs a C compiler here, and launching through the driver was not taken.",
        "core/memory/codec/kernels: driver_launcher, and the reason in the log",
    ),
    (
        r"CompilationError|ptxas|PassManager::run failed|out of resource",
        "Triton cannot compile a kernel for this card.",
        "triton's version in the file; registers and shared memory of that kernel",
    ),
    (
        r"StreamCapture|captur",
        "Something that may not be captured stands in a token's graph.",
        "core/runtime/token_graph.py; the last lines of the traceback",
    ),
    (
        r"logits are others|other bits|not the same bits|other logits",
        "A result depends on where an expert lies, or an expert was read before its copy was over.",
        "tests/cuda/test_prompt_bits.py and test_races.py; a pass's choice of products",
    ),
    (
        r"bytes of a budget|are reserved, and|left after unloading|no room for the same model",
        "The allocator keeps more than the memory plan says.",
        "core/capacity/device.py; PYTORCH_CUDA_ALLOC_CONF there",
    ),
    (
        r"fast became",
        "The fast arithmetic does not compute this model here.",
        "the reason in the line itself; core/engine/program_trial.py",
    ),
    (r"No module named", "A package is missing that the check needs.", "bench/accept/checks.py: without"),
)
Read = Callable[[Figures], Iterator[tuple[str, str, str]]]
READERS: dict[str, Read] = {}


def of(check: str) -> Callable[[Read], Read]:
    """Decorator: what the figures of a check, with the link's, say, as (cause, evidence, what to look at)."""

    def register(read: Read) -> Read:
        READERS[check] = read
        return read

    return register


def causes(result: Mapping[str, Any]) -> list[Cause]:
    """The likely causes in a result, failed checks first."""
    checks, found = list(result["checks"]), list[Cause]()
    link: Figures = next((one.get("figures", {}) for one in checks if one["name"] == "copies"), {})
    for one in checks:
        if one["outcome"] in ("failed", "took too long"):
            found.append(Cause(one["name"], *failed(one)))
    for one in checks:
        if (read := READERS.get(one["name"])) is not None and one.get("figures"):
            found += [Cause(one["name"], *said) for said in read({**link, **one["figures"]})]
    return found


def failed(one: Mapping[str, Any]) -> tuple[str, str, str]:
    """Cause, evidence and what to look at of a check that did not pass."""
    text = f"{one.get('output', '')}\n{one.get('why', '')}"
    if one["outcome"] == "took too long":
        done = ", ".join(one.get("figures", {})) or "nothing"
        return "It was slower than its limit, or hung.", f"measured by then: {done}", "the last lines of its output"
    cause, look = next(
        ((cause, look) for pattern, cause, look in PRINTED if re.search(pattern, text)),
        ("Not known to this reader.", "the traceback in its output"),
    )
    evidence, waited = str(one.get("why", "")), one.get("blocking", {}).get("outcome")
    if waited == "passed":
        cause += " It passes when each launch is waited for: two streams are out of order."
    elif waited == "failed" and one["blocking"].get("why") != one.get("why"):
        evidence += f"; with each launch waited for: {one['blocking'].get('why')}"
    return cause, evidence, look


@of("doctor")
def _doctor(found: Figures) -> Iterator[tuple[str, str, str]]:
    for problem in found.get("problems", ()):
        yield "Something on this machine slows Moestro down.", str(problem), "the sentence itself says what to do"
    for gpu in found.get("gpus", ()):
        pcie = gpu.get("pcie") or {}
        now, most, lane_gbps = pcie.get("width"), pcie.get("width_max"), LANE_GBPS.get(pcie.get("generation_max", 0))
        if now and most and now < most:
            lanes = f"PCIe x{now} of x{most}"
            yield "The card has fewer lanes than it could have.", lanes, "the slot, a riser, lanes shared with an SSD"
        if now and lane_gbps and (copied := found.get("copy_gbps")) and copied < REACHED * lane_gbps * now:
            reached = f"{copied:.1f} of {lane_gbps * now:.1f} GB/s (PCIe {pcie['generation_max']}.0 x{now})"
            yield (
                "Copies are slower than the card's link.",
                reached,
                "the link under load; a slot of an older generation",
            )


@of("copies")
def _copies(found: Figures) -> Iterator[tuple[str, str, str]]:
    if found.get("not_pinned_bytes"):
        size = f"{found['not_pinned_bytes'] / 1e9:.1f} GB of experts are not pinned"
        yield "Copies from memory that is not pinned are about half as fast.", size, "ulimit -l; on Windows half of RAM"
    large, each = found.get("copy_gbps"), found.get("experts_gbps")
    if large and each and each < 0.7 * large:
        yield "Single experts are too small to fill the link.", f"{each:.1f} of {large:.1f} GB/s", "copies in one call"
    alone, there = found.get("demand_copy_alone_us"), found.get("demand_there_us")
    if alone and there and there > alone + 200:
        late = f"there after {there:.0f} us, the copy alone takes {alone:.0f}"
        yield "The host issues a copy late.", late, "core/memory/transfer.py: who waits makes the copy; busy cores"


@of("zerocopy")
def _zerocopy(found: Figures) -> Iterator[tuple[str, str, str]]:
    read, copied = found.get("8_of_host_gbps"), found.get("copy_gbps")
    if read and copied and read < REACHED * copied:
        speeds = f"8 experts at {read:.1f} GB/s, copies at {copied:.1f}"
        yield "Kernels read host memory slower than it is copied.", speeds, "gpu_decode host beside device and graph"


@of("launches")
def _launches(found: Figures) -> Iterator[tuple[str, str, str]]:
    driver, triton = found.get("driver_us"), found.get("triton_us")
    if driver and triton and driver >= triton:
        yield "Launching through the driver gains nothing here.", f"{driver:.0f} and {triton:.0f} us", "driver_launcher"


@of("attention")
def _attention(found: Figures) -> Iterator[tuple[str, str, str]]:
    if found.get("cudnn_plans_anew") and found.get("torch_takes") == "CUDNN_ATTENTION":
        plan = f"{found['cudnn']['new_us'] / 1e3:.0f} ms for a length that is new"
        yield "torch's attention is planned anew for every length.", plan, "core/hf/attention_launch.py has to be taken"


@of("norms")
def _norms(found: Figures) -> Iterator[tuple[str, str, str]]:
    if found.get("taken") == "the model's own":
        off = ", ".join(f"{name} {found[name]}" for name in found if name.endswith("units_off"))
        yield "No form of the norms has the model's own bits here.", off, "core/hf/fused_rmsnorm.py: FORMS"


@of("rows")
def _rows(found: Figures) -> Iterator[tuple[str, str, str]]:
    wrong = [name for name, value in found.items() if name.endswith("_differs") and value]
    if wrong or found.get("beside_others", "the same bits") != "the same bits":
        yield "A row's product depends on the rows beside it.", ", ".join(wrong) or str(found["beside_others"]), "tiles"


@of("fast")
def _fast(found: Figures) -> Iterator[tuple[str, str, str]]:
    for what, said in found.get("verdict", {}).items():
        if float(str(said).split()[1]) < 1:  # "fast 1.20 times as fast as ..."
            yield (
                "The fast arithmetic is slower than the reference here.",
                f"{what}: {said}",
                "kernels of core/runtime/program/gpu",
            )


@of("decode")
def _decode(found: Figures) -> Iterator[tuple[str, str, str]]:
    for budget, ways in found.get("by_budget", {}).items():
        if ways.get("not_captured"):
            yield "A token is no graph.", f"{budget}: {ways['not_captured']}", "core/runtime/token_graph.py"
        took = {way: _ms(ways[way]) for way in ("host", "graph") if way in ways}
        if len(took) == 2 and took["graph"] > took["host"]:
            times = f"{budget}: graph {took['graph']:.1f}, host {took['host']:.1f} ms a token"
            yield "A token as a graph is slower than led by the host.", times, "misses read by kernels; split of the KV"


@of("joined")
def _joined(found: Figures) -> Iterator[tuple[str, str, str]]:
    for budget, ways in found.get("by_budget", {}).items():
        took = {way: _ms(ways[way]) for way in ("graph", "graph_joined") if way in ways}
        if len(took) == 2 and took["graph_joined"] > took["graph"]:
            times = f"{budget}: {took['graph_joined']:.1f}, over the link {took['graph']:.1f} ms a token"
            yield "Misses that the host computes take longer than over the link.", times, "host_threads; busy cores"


def _ms(rounds: Any) -> float:
    """The median of one way's rounds, or their only figure, in ms a token."""
    times = sorted(float(one["ms"]) for one in (rounds if isinstance(rounds, list) else [rounds]))
    return times[len(times) // 2]
