"""A head that predicts one token more (MTP), trained here for a small model, as published checkpoints bring their own.

The model writes texts, and its head, a decoder layer more in the layout of DeepSeek-V3 (arXiv 2412.19437, section 2.2),
learns the token after the next one from the last hidden state and the token that was written. The model itself does not
change. The head's layer begins as a copy of the model's last one."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from core.engine import Engine
from core.engine.batch_request import BatchRequest
from core.engine.texts import bundled, tokenize
from core.hf.files import model_path
from core.hf.head import attach
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import Ids

PROMPT, WRITTEN, TOGETHER = 24, 200, 16  # tokens of a prompt and after it, and texts that are written at a time
BATCH, RATE, WARM = 16, 2e-3, 20  # texts of a step, learning rate at most, and steps until then
PARTS = ("enorm", "hnorm", "eh_proj", "shared_head")  # of a head, beside its layer


def with_head(folder: Path, model: str | Path, say: Callable[[str], None], texts: int = 384, steps: int = 400) -> Path:
    """A checkpoint in `folder` of the same model with a head, trained unless it is there. It has the model's name, by
    which the texts are found that it knows."""
    made, source = folder / "with-head" / Path(model).name, model_path(str(model))
    if not (made / "config.json").exists():
        say(f"{texts} texts are written for a head")
        _write(source, made, _trained(source, _texts(str(model), texts), steps, say))
    return made


def _texts(model: str, count: int) -> list[list[int]]:
    """What the model writes at temperature 1, with what it was asked."""
    settings = Settings({"budget": "100%", "link": "own", "predictor": "none", "drafts": "off"})
    spec = LoadSpec.checked(model, settings, context=PROMPT + WRITTEN + 8, sequences=TOGETHER)
    engine = Engine.load(spec)
    try:
        engine.prompt.ends = set()
        ids = [
            one for text in bundled(engine.model_name) for one in tokenize(engine.prompt.tokenizer, text).ids.tolist()
        ]
        last = ids[-PROMPT * count :]  # what is measured are the first texts
        found = [last[at * PROMPT :][:PROMPT] for at in range(count)]
        how = [Sampling(temperature=1.0, seed=at, max_new_tokens=WRITTEN) for at in range(count)]
        asked = [BatchRequest(at, Ids(one), how[at]) for at, one in enumerate(found)]
        for one in engine.generate_many(asked, TOGETHER):
            if one.piece is not None and one.piece.token is not None:
                assert isinstance(one.key, int)
                found[one.key] = [*found[one.key], one.piece.token]
        return found
    finally:
        engine.unload()


def _trained(source: Path, texts: Sequence[Sequence[int]], steps: int, say: Callable[[str], None]) -> Any:
    """The model in fp32, with the head as its last layer."""
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True)
    model.requires_grad_(False)
    attach(model)
    *_, like, head = model.model.layers
    head.load_state_dict(like.state_dict(), strict=False)
    head.requires_grad_(True)
    with torch.no_grad():
        half = torch.eye(model.config.hidden_size) / 2
        head.eh_proj.weight.copy_(torch.cat([half, half], 1))
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM, 1.02 - step / steps)
    )
    draw = torch.Generator().manual_seed(0)
    ids = torch.tensor(texts)
    for step in range(steps):
        some = ids[torch.randint(len(ids), (BATCH,), generator=draw)]
        logits, wanted = _guesses(model, head, some), some[:, 2:]
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            right = float((logits.argmax(-1) == wanted).float().mean())
            say(f"step {step} of {steps}: loss {loss.item():.3f}, {right:.0%} of the likeliest tokens are right")
    return model


def _guesses(model: Any, head: Any, ids: torch.Tensor) -> torch.Tensor:
    """[B, T - 2, V] logits of the tokens after the next ones."""
    with torch.no_grad():
        hidden = model.model(input_ids=ids[:, :-2], use_cache=False).last_hidden_state
        embedded = model.model.embed_tokens(ids[:, 1:-1])
    x = head.eh_proj(torch.cat([head.enorm(embedded), head.hnorm(hidden)], -1))
    positions = torch.arange(x.shape[1])[None]
    angles = model.model.rotary_emb(x, positions)
    x = head(x, attention_mask=None, position_ids=positions, position_embeddings=angles)
    found: torch.Tensor = model.lm_head(head.shared_head.norm(x[0] if isinstance(x, tuple) else x))
    return found


def _write(source: Path, folder: Path, model: Any) -> None:
    """The checkpoint, under the names that transformers writes for a layer more, and the head's other parts."""
    number = model.config.num_hidden_layers
    config = AutoConfig.from_pretrained(source, local_files_only=True)
    config.num_hidden_layers = number + 1
    whole: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    whole.load_state_dict(model.state_dict(), strict=False)
    whole.bfloat16().save_pretrained(folder)
    file = folder / "model.safetensors"
    parts = {
        f"model.layers.{number}.{name}": one.bfloat16().contiguous()
        for name, one in model.model.layers[number].state_dict().items()
        if name.startswith(PARTS)
    }
    save_file({**load_file(file), **parts}, file, metadata={"format": "pt"})
    for one in source.iterdir():
        if one.name not in ("model.safetensors", "config.json") and one.is_file():
            shutil.copy(one, folder / one.name)
    stated = json.loads((folder / "config.json").read_text())
    stated |= {"num_hidden_layers": number, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(stated))
