"""Products of a CPU with AVX2 alone, wherever the tests run: in a process of its own, whose torch has been told so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.system.native.compile import widths
from tests.selection import layered

ROOT = Path(__file__).parents[2]
MORE = 64 in widths()  # than AVX2; where this CPU has no more, tests/memory/test_plain_products.py and others try it
pytestmark = pytest.mark.skipif(not widths(), reason="no kernels for this CPU")

CODE = """
import sys
import torch
from torch import nn
from core.memory.codec import PartSpec, make_codec
from core.memory.codec.measure import fill, random_expert, specs_of
from core.memory.codec.native import choice
from core.memory.codec.kernel_choice import choose, kind
from core.system.native.compile import multiplies_pairs

limited = sys.argv[1] == "avx2"
assert torch.backends.cpu.get_cpu_capability() == ("AVX2" if limited else "DEFAULT")
assert not multiplies_pairs() or not limited
torch.set_num_threads(1)
torch.manual_seed(0)

def made(name):
    parts = random_expert(512, 256)
    codec = make_codec(name, specs=specs_of(parts), dtype=torch.bfloat16, device=torch.device("cpu"))
    return codec, fill(codec, parts)

# plain numbers: torch's very bits, whatever is chosen
codec, slot = made("checkpoint")
assert bool(codec.ways("gate_up_proj")) == limited, "torch adds up in another order without AVX2"
for rows in (1, 2, 3, 17, 130):
    x = torch.randn(rows, 512).bfloat16()
    wanted = torch.mm(x, slot.weights["gate_up_proj"][0])
    for way in codec.ways("gate_up_proj").values():
        assert torch.equal(way(slot, x), wanted), rows
    assert torch.equal(codec.linear(slot, "gate_up_proj", x), wanted), rows
choose(codec)
assert (kind(codec, "gate_up_proj") in choice.known()) == limited
for rows in (2, 17, 64, 130):
    x = torch.randn(rows, 512).bfloat16()
    assert torch.equal(codec.linear(slot, "gate_up_proj", x), torch.mm(x, slot.weights["gate_up_proj"][0])), rows

# codes: every way is there, and dequantising above some rows is no law any more
codec, slot = made("int4-g64")
ways = codec.ways("gate_up_proj")
assert [*ways] == ["codes", "tiles", "torch"], [*ways]
x = torch.randn(70, 512).bfloat16()
exact = x.double() @ codec.dequantize(slot, "gate_up_proj").double().t()
for name, way in ways.items():
    assert float((way(slot, x) - exact).norm() / exact.norm()) < 3e-3, name
choose(codec)
way = choice.choice_of(kind(codec, "gate_up_proj"), "codes").way(70)
assert torch.equal(codec.linear(slot, "gate_up_proj", x), ways[way](slot, x))
timed = choice.known()[kind(codec, "gate_up_proj")]
assert timed.estimate(way, 70) == min(timed.estimate(name, 70) for name in ways)

# dense layers of the model
if sys.argv[2] == "plain":
    sys.exit(print("whole"))
from core.hf.fast_linear import dense_codecs, patch_linears  # takes longer to import than all else
layers = nn.Linear(512, 1024, bias=False), nn.Linear(512, 1024), nn.Linear(500, 1024, bias=False)
model = nn.ModuleList(layers).bfloat16()
own = model[0].forward
assert patch_linears(model) == ([model[0]] if limited else [])
for codec in dense_codecs(model):
    choose(codec)
with torch.inference_mode():
    for shape in ((512,), (1, 512), (1, 1, 512), (1, 6, 512), (2, 35, 512)):
        x = torch.randn(shape).bfloat16()
        assert torch.equal(model[0](x), own(x)), shape
print("whole")
"""


@pytest.mark.parametrize(
    ("capability", "parts"),
    layered(
        [("avx2", "plain"), ("avx2", "dense"), ("default", "dense")], quick=lambda case: case[1] == "plain" and MORE
    ),
)
def test_products_where_torch_has_avx2_at_most(capability: str, parts: str) -> None:
    limits = {"ATEN_CPU_CAPABILITY": capability, "ONEDNN_MAX_CPU_ISA": "AVX2" if capability == "avx2" else "SSE41"}
    ended = subprocess.run(
        [sys.executable, "-c", CODE, capability, parts],
        cwd=ROOT,
        env=os.environ | limits,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout.split() == ["whole"], ended.stderr
