"""Decides whether decoded tokens are computed without the host (`core.runtime.device_step`), and says why not."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from core.errors import DeviceError, HostError, MoestroError
from core.memory.codec.fast.background import Background
from core.memory.store import ExpertStore
from core.runtime.batch import Batch
from core.runtime.device_step import Ahead, DeviceStep
from core.runtime.host_join import HostJoin
from core.runtime.joining import Joining
from core.runtime.lead import Lead
from core.runtime.moe_step import MoEStep
from core.runtime.out_of_memory import shortage
from core.runtime.prediction.predictor_host import PredictorHost
from core.runtime.token_graph import TokenGraphs
from core.runtime.trace_capture import TraceCapture
from core.settings.link import LinkSettings
from core.types import ModelShape

log = logging.getLogger("moestro.device_decode")


class DeviceDecode:
    """For the answers of one model. `configure` between two passes, on the compute thread. `say` gets the reason why it
    is not used although it was chosen, each time that this changes."""

    def __init__(
        self,
        step: MoEStep,
        store: ExpertStore,
        shape: ModelShape,
        predictor_host: PredictorHost,
        capture: TraceCapture,
        graphs: Callable[[], TokenGraphs],
    ) -> None:
        """`step` computes the passes that it does not; `graphs` makes what captures passes, called when they are
        chosen."""
        self._host, self._math, self._expert_cache = step, step.math, step.expert_cache
        self._device = step.math[0].codec.device
        self._store, self._shape, self._graphs = store, shape, graphs
        self._predictor_host, self._capture = predictor_host, capture
        self.say: Callable[[str], None] = lambda text: None
        self.step: DeviceStep | None = None
        self.graphs: TokenGraphs | None = None
        self.reason = ""  # why it is not used although it was chosen
        self._said = ""  # why passes are not captured
        self._quiet = False  # nobody has asked for it by name
        self._lead = Lead()
        self._last: tuple[bool, float] | None = None  # who led the last token, and when it began
        self._asked = "host"
        self._joining = Joining(step.host, step.math, step.expert_cache, store)
        self._team: Background | None = None  # whose threads compute missing experts within tokens
        self._ahead: Ahead | None = None
        self._left: Ahead | None = None  # of a pass that is left to the host, as was decided ahead of it
        self._lasting = ""  # why it can never be used with this load, once that was tried

    def configure(self, old: LinkSettings | None, new: LinkSettings) -> None:
        """Use it or do not, after all other parts have their settings. What it needs is allocated when it is first
        chosen."""
        self._asked = new.decode
        if new.decode == "host" or (self.step is not None and self._team is not self._joining.team(new.decode)):
            self.close()
        reason = "" if new.decode == "host" else self._objection()
        self._quiet, self._lead, self._last = new.decode == "auto", Lead(), None
        if reason and reason != self.reason:
            self._tell(f"gpu_decode {new.decode} is not used", reason)
        self.reason = reason
        if not new.captures or self.step is None:
            self.drop_graphs()
        elif self.graphs is None or self.graphs.reason:  # what stood in the way may be gone
            self.graphs = self._graphs()
            self.graphs.say, self.graphs.broke_off = self._say_uncaptured, self._broke_off

    def _broke_off(self) -> None:
        if self.step is not None:
            self.step.broke_off()

    def step_for(self, batch: Batch) -> DeviceStep | None:
        """What computes a pass without the host; None where the host leads. To be asked as a pass begins."""
        step, left, self._left = self.step, self._left, None
        if left is not None and left.is_of(batch):
            return None
        if step is not None and step.join is not None and step.join.failed:
            self.close()
            self.reason, step = self._objection(), None
        if step is None or self.reason or self._capture.watches_routers or not step.serves(batch):
            self._last = None
            return None
        return step if not self._quiet or self._leads() else None

    def _leads(self) -> bool:
        """Whether the GPU leads the token that begins now; the last one is over."""
        now = time.perf_counter()
        if self._last is not None:
            self._lead.took(self._last[0], now - self._last[1])
        self._last = self._lead.next, now
        return self._lead.next

    def compute(self, batch: Batch, launch: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The logits [1, V] of a pass that `step_for` serves: what `launch` computes, or a graph in its place."""
        (share,) = batch.shares
        return launch() if self.graphs is None else self.graphs.compute(share, launch)

    def launch_ahead(self, batch: Batch) -> None:
        """Launch the pass that is to follow, of one token of one sequence, if it is a graph: `taken` has it then, and
        until `recall` slots and KV stay as they are."""
        assert self._ahead is None
        (share,), graphs = batch.shares, self.graphs
        if graphs is None or share.kv is None or not graphs.usable(share):
            return
        if (step := self.step_for(batch)) is None:
            self._left = Ahead(share, share.kv.length)
            return
        with suppress(MoestroError, RuntimeError):  # it occurs again in the pass itself, whose it is
            with step.launching():
                logits = graphs.replayed(share)
            self._ahead = Ahead(share, share.kv.length, step, logits)
            return
        self._last = None

    def taken(self, batch: Batch) -> torch.Tensor | None:
        """The logits [1, V] of a pass that was launched ahead; None where this one was not. Waits for it."""
        ahead, (share, *_) = self._ahead, batch.shares
        if ahead is None or not ahead.is_of(batch):
            self.recall()
            return None
        assert self.graphs is not None and ahead.step is not None and share.kv is not None
        self._ahead = None
        ahead.step.finish()
        self.graphs.took(share.kv)
        return ahead.logits

    def recall(self) -> None:
        """Nothing may be launched ahead any more: what is, is waited for, and of no use. The KV does not know of it."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.step is not None:
            self._last = None
            ahead.step.drop()
        if self.step is not None:
            self.step.forget()

    def settle(self) -> None:
        """Request what the last pass was computed with."""
        if self.step is not None:
            self.step.settle(launched=self._ahead is not None)

    def _say_uncaptured(self, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            self._tell("gpu_decode graph computes as device does", reason)

    def _tell(self, what: str, reason: str) -> None:
        """On the timeline and in the log; of what nobody asked for, in the log of what is being tried."""
        if self._quiet:
            log.info("%s: %s.", what, reason)
        else:
            log.warning("%s: %s.", what, reason)
            self.say(f"{what}: {reason}")

    def drop_graphs(self) -> None:
        """Give back the graphs, until settings ask for them."""
        self.recall()
        if self.graphs is not None:
            self.graphs.close()
        self.graphs, self._said = None, ""

    def close(self) -> None:
        """Give back what it holds, until it is chosen again."""
        self.drop_graphs()
        if self.step is not None:
            self.step.close()
        self.step = None

    def lasting_objection(self) -> str:
        """Why this load can never use it; "" when it can, as far as can be told without trying."""
        if self._device.type != "cuda":
            return "the model is not on a GPU"
        if not all(one.finds for one in self._math):
            return "the Triton kernels do not run here"
        codecs = [one.codec for one in self._math]
        if codecs[0].blocks > 1:
            return "the model was loaded with several blocks per expert"
        if not all(one.verbatim for one in codecs):
            return (
                "experts are stored in other number types than they are computed in, so that kernels cannot read them"
            )
        if self._shape.encoder_layers:
            return "a text-to-text model's encoder and decoder are passes of their own"
        return self._lasting

    def _objection(self) -> str:
        """Why it cannot be used now. Builds what it needs where it can."""
        if reason := self.lasting_objection():
            return reason
        if self._predictor_host.predictor.looks or self._predictor_host.predictor.starts:
            return "a prefetcher is on, which needs the host within a token"
        if self._host.miss is not None and self._host.miss.active:
            return "a lossy mode is on, which needs the host within a token"
        if reason := self._joining.objection(self._asked):
            return reason
        if self._host.transfers.pace:
            return "the link is emulated, and what kernels read would not be paced"
        if self._capture.shadows.on:
            return "prefetchers are recorded for the lab, which need the host within a token"
        return self._built() if self.step is None else ""

    def _built(self) -> str:
        """Build the step, and try whether kernels compute the same out of host memory, or the host does -> why not."""
        step: DeviceStep | None = None
        join: HostJoin | None = None
        self._team = self._joining.team(self._asked)
        try:
            if self._team is not None:
                join = self._joining.make(self._shape.top_k)
            home = () if join is not None else self._store.device_addresses()
            if join is None and not home:
                why = "not every expert is in pinned host memory"
                if self._joining.helps:
                    return f"{why}, which none has to be with miss_placement host"
                self._lasting = why
                return why
            step = DeviceStep(
                self._math, self._expert_cache, self._host.sink, home, self._shape.top_k, self._device, join
            )
            if self._same_bits(step, home):
                self.step = step
                return ""
            where = "kernels that read host memory do" if join is None else "the host's kernels do"
            why = f"{where} not compute the bits that the GPU's do out of slots"
        except (DeviceError, HostError) as error:
            why = str(error)
        except Exception as error:  # any error of a compiler or driver
            if lack := shortage(error):
                return self._unbuilt(step, join, f"the device has no room for {lack}")
            what = str(error).strip().partition("\n")[0]
            why = f"its kernels do not run here ({type(error).__name__}: {what})"
        if self._team is None:
            self._lasting = why
        else:
            self._joining.failed = why
        return self._unbuilt(step, join, why)

    def _unbuilt(self, step: DeviceStep | None, join: HostJoin | None, reason: str) -> str:
        if step is not None:
            step.close()
        elif join is not None:
            join.close()
        return reason

    @torch.inference_mode()
    def _same_bits(self, step: DeviceStep, home: Sequence[int]) -> bool:
        """Whether residents of some layer of each codec give the same out of their slots and out of host memory, where
        the GPU reads them, or the host computes every second one."""
        cache, layers = self._expert_cache, range(self._shape.layers)
        ready = [[e for e, there in enumerate(cache.availability(at)[1]) if there] for at in layers]
        found = {self._math[at].codec: at for at in sorted(layers, key=lambda at: len(ready[at]))}
        return all(self._same(step, at, ready[at][: self._shape.top_k], home) for at in found.values())

    def _same(self, step: DeviceStep, layer: int, some: Sequence[int], home: Sequence[int]) -> bool:
        cache, experts, math = self._expert_cache, self._shape.experts, self._math[layer]
        if not some or not math.finds:
            return True
        x = torch.randn(1, math.inputs, generator=torch.Generator().manual_seed(0))
        x = x.to(self._device, math.codec.dtype)
        slots = [cache.core.table[layer * experts + expert][0] for expert in some]
        ids = torch.tensor(some, device=self._device)
        weights = torch.ones(1, len(some), dtype=x.dtype, device=self._device)
        wanted = math.in_slots(slots, x, weights)
        if step.join is None:
            own = home[layer * experts : (layer + 1) * experts]
            return torch.equal(wanted, math.by_ids(_table(own, self._device), ids, x, weights))
        if len(some) < self._shape.top_k:
            return True
        own = [0] * experts
        for expert, slot in list(zip(some, slots, strict=True))[1::2]:
            own[expert] = slot.raw.data_ptr()
        table = _table(own, self._device)
        with step.join.attended():
            got = step.joined(step.join, layer, table, ids, x, weights)
            torch.cuda.current_stream(self._device).synchronize()
        return torch.equal(wanted, got)


def _table(addresses: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(addresses, dtype=torch.int64, device=device)
