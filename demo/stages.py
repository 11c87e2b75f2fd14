"""The two stages of the demo model's training: few experts for a short time, then every expert cloned and all trained
on.

A killed run goes on from its last checkpoint in the work folder. The learning rate depends on steps alone; writing
`{"steps": N}` or `{"decay_from": M}` to `control.json` in the work folder changes the schedule of a running stage two.
"""

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from .batches import IGNORED, Batch, Batches
from .corpus import SEED
from .model import FULL_SIZE, SEED_SIZE, RouterLog, Size, make_model, upcycle

PEAK_RATE, WARM_UP, BALANCE = 2e-3, 60, 1e-3
NOISE = 0.4
DECAY_FROM = 0.345
QUESTION_SHARES = ((0.1, 0.6), (0.2, 0.85), (1.01, 0.94))
HARD_FROM, HARD_SHARE = 0.25, 0.4
TOKENS_PER_STEP = {"seed": 4096, "full": 2048}
SEED_BATCHES_FROM = 10**6
SAVE_EVERY, PRINT_EVERY = 200, 25


@dataclass
class Plan:
    """The schedule of a stage: `steps` in all, the rate falling linearly from `decay_from`."""

    steps: int
    decay_from: int

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        warm = min(1.0, (step + 1) / WARM_UP)
        if step < self.decay_from:
            return PEAK_RATE * warm
        left = (self.steps - step) / max(1, self.steps - self.decay_from)
        return PEAK_RATE * warm * max(0.01, left)

    def question_share(self, step: int) -> float:
        """The share of rows made of questions."""
        done = step / self.steps if self.decay_from < self.steps else 0.0
        return next(share for limit, share in QUESTION_SHARES if done < limit)

    def hard_share(self, step: int) -> float:
        """The share of facts drawn by their recent loss."""
        return HARD_SHARE if self.decay_from < self.steps and step / self.steps > HARD_FROM else 0.0


class Share(NamedTuple):
    """The result of a worker for its part of a batch: gradients, and per label its loss and fact."""

    gradients: tuple[Tensor, ...]
    losses: Tensor
    facts: Tensor
    balance: float


class Stage:
    """One model, its optimizer and its place in the schedule, saved to and resumed from one checkpoint."""

    def __init__(self, name: str, size: Size, work: Path, plan: Plan, seed: int) -> None:
        torch.manual_seed(seed)
        self.name, self.work, self.plan, self.seed = name, work, plan, seed
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = make_model(size).to(self.device).train()
        self.log = RouterLog(self.model)
        self.named = dict(self.model.named_parameters())
        decayed = [p for n, p in self.named.items() if p.ndim >= 2 and "embed" not in n]
        other = [p for n, p in self.named.items() if not (p.ndim >= 2 and "embed" not in n)]
        groups = [{"params": decayed, "weight_decay": 0.03}, {"params": other, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98), eps=1e-9, fused=True)
        self.batches = Batches(work, seed)
        self.workers = 1 if self.device == "cuda" else torch.get_num_threads()
        self.pool = ThreadPoolExecutor(self.workers, initializer=torch.set_num_threads, initargs=(1,))
        self.step, self.seconds = 0, 0.0

    @property
    def path(self) -> Path:
        """Path of the checkpoint."""
        return self.work / f"{self.name}.safetensors"

    def save(self) -> None:
        """Save weights, optimizer state, fact losses and counters, replacing the old checkpoint atomically."""
        tensors = {f"model.{n}": p.detach().cpu().contiguous() for n, p in self.named.items()}
        for name, parameter in self.named.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = value.detach().cpu().contiguous()
        tensors["hard"] = torch.from_numpy(self.batches.hard.copy())
        place = {"step": str(self.step), "seconds": str(self.seconds)}
        place |= {"steps": str(self.plan.steps), "decay_from": str(self.plan.decay_from)}
        save_file(tensors, self.path.with_suffix(".tmp"), metadata=place)
        self.path.with_suffix(".tmp").replace(self.path)

    def resume(self) -> bool:
        """Load the checkpoint if there is one."""
        if not self.path.exists():
            return False
        tensors = load_file(self.path)
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(tensors[f"model.{name}"])
                keys = ("step", "exp_avg", "exp_avg_sq")
                state = {key: tensors[f"{key}.{name}"] for key in keys if f"{key}.{name}" in tensors}
                if state:
                    self.optimizer.state[parameter] = {
                        key: value.to(self.device if key != "step" or self.device == "cuda" else "cpu")
                        for key, value in state.items()
                    }
        self.batches.hard[:] = tensors["hard"].numpy()
        stored = counters(self.path)
        self.step, self.seconds = int(stored["step"]), stored["seconds"]
        return True

    def read_control(self) -> None:
        """Apply a changed schedule from control.json, if there is one."""
        control = self.work / "control.json"
        if self.name == "full" and control.exists():
            changes = json.loads(control.read_text(encoding="utf-8"))
            self.plan = Plan(changes.get("steps", self.plan.steps), changes.get("decay_from", self.plan.decay_from))

    def update(self) -> tuple[float, float]:
        """One step of training; returns (cross entropy, balance loss per layer)."""
        plan, step = self.plan, self.step
        number = step if self.name == "full" else step + SEED_BATCHES_FROM
        batch = self.batches.draw(number, TOKENS_PER_STEP[self.name], plan.question_share(step), plan.hard_share(step))
        for group in self.optimizer.param_groups:
            group["lr"] = plan.rate(step)
        labels = int((batch.labels != IGNORED).sum())
        parts = [batch.part(worker, self.workers) for worker in range(self.workers)]
        loss = balance = 0.0
        for worker, done in enumerate(self.pool.map(self.gradients, parts, [labels] * self.workers)):
            for parameter, gradient in zip(self.named.values(), done.gradients, strict=True):
                parameter.grad = gradient if worker == 0 else torch.add(parameter.grad, gradient)
            loss += float(done.losses.sum()) / labels
            balance += done.balance / self.workers / self.model.config.num_hidden_layers
            self.batches.note_losses(done.facts, done.losses)
        torch.nn.utils.clip_grad_norm_(self.named.values(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss, balance

    def gradients(self, part: Batch, labels: int) -> Share:
        """Gradients of a worker's part of a batch that has `labels` labels in all."""
        self.log.seen.clear()
        flat = part.labels.reshape(-1)
        labelled = (flat != IGNORED).nonzero().squeeze(1)
        with torch.autocast(self.device, torch.bfloat16):
            hidden = self.model.model(input_ids=part.ids.to(self.device), use_cache=False).last_hidden_state
            wanted = hidden.reshape(-1, hidden.shape[-1]).index_select(0, labelled.to(self.device))
            logits = self.model.lm_head(wanted)
        each = F.cross_entropy(logits.float(), flat[labelled].to(self.device), reduction="none")
        balance = self.log.balance_loss()
        loss = each.sum() / labels + BALANCE * balance / self.workers
        found = torch.autograd.grad(loss, list(self.named.values()), materialize_grads=True)
        return Share(found, each.detach().cpu(), part.facts.reshape(-1)[labelled], float(balance.detach()))

    def stop(self) -> None:
        """Save and exit."""
        self.save()
        raise SystemExit(f"stopped at step {self.step}")

    def run(self) -> None:
        """Train to the end of the plan."""
        recent: list[float] = []
        began, first = time.perf_counter() - self.seconds, self.step
        started = time.perf_counter()
        signal.signal(signal.SIGTERM, lambda *_: self.stop())
        while self.step < self.plan.steps:
            loss, balance = self.update()
            self.seconds = time.perf_counter() - began
            recent.append(loss)
            if self.step % PRINT_EVERY == 0:
                speed = (self.step - first) * TOKENS_PER_STEP[self.name] / (time.perf_counter() - started)
                mean = sum(recent) / len(recent)
                rate = self.plan.rate(self.step)
                hard = float(self.batches.hard.mean())
                place = f"{self.name} step {self.step}/{self.plan.steps} rate {rate:.1e}"
                losses = f"loss {mean:.4f} facts {hard:.4f} balance {balance:.3f}"
                print(f"{place} {losses} tokens/s {speed:.0f} seconds {self.seconds:.0f}", flush=True)
                recent.clear()
                self.read_control()
            if self.step % SAVE_EVERY == 0:
                self.save()
        self.save()


def train(work: Path, steps_seed: int, steps: int, seed: int) -> Stage:
    """Both stages; returns the finished second one."""
    full = Stage("full", FULL_SIZE, work, Plan(steps, int(steps * DECAY_FROM)), seed)
    if not full.resume():
        small = Stage("seed", SEED_SIZE, work, Plan(steps_seed, steps_seed), seed)
        small.resume()
        small.run()
        upcycle({n: p.detach().cpu() for n, p in small.model.state_dict().items()}, full.model, NOISE, seed)
        full.batches.hard[:] = small.batches.hard
    full.read_control()
    full.run()
    return full


def counters(path: Path) -> dict[str, float]:
    """Counters in a checkpoint: step, seconds, steps, decay_from."""
    with safe_open(path, "pt") as file:
        return {key: float(value) for key, value in file.metadata().items()}


def history(work: Path) -> dict[str, Any]:
    """Training record of a work folder's model: steps of both stages, seconds, tokens."""
    small, full = counters(work / "seed.safetensors"), counters(work / "full.safetensors")
    return {
        "seed_steps": int(small["step"]),
        "steps": int(full["step"]),
        "decay_from": int(full["decay_from"]),
        "seconds": small["seconds"] + full["seconds"],
        "tokens": sum(int(c["step"]) * TOKENS_PER_STEP[n] for n, c in (("seed", small), ("full", full))),
    }


def finished_model(work: Path) -> Any:
    """The model of the second stage's checkpoint, in float32."""
    stage = Stage("full", FULL_SIZE, work, Plan(1, 1), SEED)
    if not stage.resume():
        raise FileNotFoundError(f"{stage.path}: train first")
    return stage.model
