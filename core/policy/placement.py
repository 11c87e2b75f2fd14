"""Where missing experts are computed: so many on the device, once they are copied, the others where they lie in host
memory.

A layer has r residents and m missing experts, n of which the host computes; q = m - n are copied.

    host  = host_fixed + n host                              0 where n = 0
    ready = device_fixed + r device                          the residents, which are computed first
    late  = the largest of  ready + q device                 the device has more to do than the link
                            backlog + copy + q device        it waits for the first copy alone
                            backlog + q copy + device        it waits for each of them; ready alone where q = 0

A GPU computes beside the host: the larger of host and late. On a CPU the computing thread takes part in the host's work
once the residents are computed, and then computes what was copied: late, with ready + (host - ready) t / (t + 1) in
place of ready where host > ready, for t threads of the host; with ready + host where it has none.

All of these are straight lines in n while 0 < n < m. One of them, the host's, may rise and the others fall, so that the
least is where it crosses the highest of these, or at an end: 0 (all over the link) or m (all by the host)."""

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Costs:
    """Seconds, changed as they are measured. `device_s` while nothing else computes, `device_beside_s` while threads of
    the host do."""

    copy_s: float  # of one expert over the link
    device_fixed_s: float  # of a layer
    device_s: float  # of one expert on the device
    device_beside_s: float
    host_fixed_s: float  # to hand over a layer's experts and take their outputs
    host_s: float  # of one expert in host memory
    threads: int = 1  # of the host; 0: the computing thread computes these experts as well
    gpu: bool = True  # the device computes while the computing thread does something else


def in_place(costs: Costs) -> Costs:
    """Those of a CPU whose computing thread computes residents and missing experts in their turn."""
    each_s = costs.device_s
    return Costs(costs.copy_s, costs.device_fixed_s, each_s, each_s, 0.0, each_s, threads=0, gpu=False)


@dataclass(frozen=True, slots=True)
class Layer:
    """What a layer asks for: experts that are resident, that are missing, and the seconds until the link is free."""

    residents: int
    misses: int
    backlog_s: float = 0.0


def layer_s(costs: Costs, layer: Layer, to_host: int) -> float:
    """Seconds of a layer whose host computes so many of the missing experts."""
    copied, begin_s, copy_s = layer.misses - to_host, layer.backlog_s, costs.copy_s
    device_s = costs.device_beside_s if to_host and _apart(costs) else costs.device_s
    host_s = costs.host_fixed_s + to_host * costs.host_s if to_host else 0.0
    ready_s = costs.device_fixed_s + layer.residents * device_s
    if not costs.gpu:
        ready_s = max(ready_s, ready_s + (host_s - ready_s) * _share(costs)) if costs.threads else ready_s + host_s
        host_s = 0.0
    late_s = ready_s + copied * device_s
    if copied:
        late_s = max(late_s, begin_s + copy_s + copied * device_s, begin_s + copied * copy_s + device_s)
    return max(host_s, late_s)


def to_host(costs: Costs, layer: Layer) -> int:
    """How many of the missing experts the host computes, for the least `layer_s`; of equally good numbers the least."""
    most = layer.misses
    waits_s = layer.backlog_s + costs.copy_s + min(costs.device_s, costs.device_beside_s)
    if layer_s(costs, layer, most) < waits_s:  # the least that any number takes that waits for a copy
        return most
    candidates = {0, most}
    if most > 1:
        at = _crossing(costs, layer)
        candidates |= {min(max(n, 1), most - 1) for n in (math.floor(at), math.ceil(at))}
    return min(sorted(candidates), key=lambda n: layer_s(costs, layer, n))


def _crossing(costs: Costs, layer: Layer) -> float:
    """Where the host's line crosses the highest of the falling ones, between 0 and the number of misses; this number
    where it falls as well. Lines are (height at 0, slope)."""
    most, begin_s, copy_s = layer.misses, layer.backlog_s, costs.copy_s
    device_s = costs.device_beside_s if _apart(costs) else costs.device_s
    ready_s = costs.device_fixed_s + layer.residents * device_s
    falling = [(begin_s + copy_s + most * device_s, -device_s), (begin_s + most * copy_s + device_s, -copy_s)]
    if _apart(costs):
        falling.append((ready_s + most * device_s, -device_s))
    if costs.gpu:
        height, slope = costs.host_fixed_s, costs.host_s
    else:
        share = _share(costs) if costs.threads else 1.0
        left_s = ready_s * (1 - share) if costs.threads else ready_s
        height = left_s + share * costs.host_fixed_s + most * device_s
        slope = share * costs.host_s - device_s
    if slope <= 0:
        return float(most)
    return min(most, max(0.0, *[(high - height) / (slope - falls) for high, falls in falling]))


def _apart(costs: Costs) -> bool:
    """Whether something computes for the host while the device computes."""
    return costs.gpu or costs.threads > 0


def _share(costs: Costs) -> float:
    """What is left of the host's time once the computing thread takes part."""
    return costs.threads / (costs.threads + 1)
