"""What Moestro detects on this machine, measured at once, and any problems; with memory and speeds as plain values."""

import platform
import sys
from pathlib import Path
from typing import Any

from app.services import probes
from app.start import installer
from app.store.home import DISTANCES, PACES, PRODUCTS
from core import __version__

GB = 1e9
FITTING = (
    "install Moestro again, with the program that you installed it with."
    if installer.INSTALLED
    else "run `python launch.py`, which installs what fits."
)


def examine(folder: Path) -> dict[str, Any]:
    """All findings as plain values: bytes, GB/s (10^9), None where the machine has no such thing."""
    from core.system.memory_limits import host_memory

    memory, gpus = host_memory(), probes.gpus()
    found = {
        "moestro": __version__,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": packages(),
        "cpu": probes.cpu(),
        "products": probes.products(folder / PRODUCTS),
        "distances": probes.distances(folder / DISTANCES),
        "paces": probes.paces(folder / PACES),
        "memory": {"total_bytes": memory.total, "free_bytes": memory.available},
        "gpus": gpus,
        "kernels": probes.kernels() if any(gpu["usable"] for gpu in gpus) else None,
        "attention": probes.attention(),
        "link": probes.link(),
        "disk": probes.disk(folder),
        "data_dir": str(folder),
    }
    return found | {"problems": problems(found)}


def packages() -> list[dict[str, Any]]:
    """Every requirement, its installed version ("" = none), and whether Moestro supports that version."""
    rows = []
    for requirement in installer.requirements("ui"):
        name = installer.name_of(requirement)
        version = installer.installed(name)
        rows.append(
            {
                "name": name,
                "wanted": requirement.removeprefix(name),
                "version": version,
                "fits": installer.fits(version, requirement),
            }
        )
    return rows


def problems(found: dict[str, Any]) -> list[str]:
    """What to fix, as display text."""
    wrong = [
        f"{p['name']} {p['version']} is not {p['wanted']}: {FITTING}"
        for p in found["packages"]
        if p["version"] and not p["fits"]
    ]
    if any(not gpu["usable"] for gpu in found["gpus"]):
        wrong.append(f"There is an NVIDIA GPU, but it cannot be used: {probes.why_no_gpu()}.")
    if any(gpu["usable"] for gpu in found["gpus"]):
        wrong += probes.remarks()
    if problem := found["disk"].get("problem"):
        wrong.append(f"The data directory cannot be written: {problem}. Let MOESTRO_HOME name another.")
    return wrong


def report(found: dict[str, Any]) -> str:
    """The findings as text."""
    return "\n".join(f"{name:14} {text}" for name, text in rows(found))


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The findings as (name, text)."""
    cpu, memory, link, disk = found["cpu"], found["memory"], found["link"], found["disk"]
    lines = [
        ("Moestro", found["moestro"]),
        ("System", found["system"]),
        ("Python", f"{found['python']}  {found['executable']}"),
    ]
    lines += [
        (p["name"], f"{p['version'] or 'not installed'}{'' if p['fits'] else '  (wanted: ' + p['wanted'] + ')'}")
        for p in found["packages"]
    ]
    lines += [
        ("CPU", f"{cpu['name']}, {cpu['cores'] or '?'} cores, {cpu['threads']} threads"),
        ("CPU vectors", f"torch uses {cpu['torch_uses']}; has {' '.join(cpu['flags']) or 'no known flags'}"),
        *(("Products", product(one)) for one in found["products"]),
        *(("Arithmetic", distance(one)) for one in found["distances"]),
        ("Memory", f"{memory['free_bytes'] / GB:.1f} GB free of {memory['total_bytes'] / GB:.1f} GB"),
    ]
    lines += [("GPU", describe(gpu)) for gpu in found["gpus"]] or [("GPU", "none: experts are cached in main memory")]
    if found.get("kernels"):
        lines.append(("Kernels", f"launched by {found['kernels']}"))
        lines.append(("Arithmetic", "on the GPU auto takes the reference; fast, by name, was never measured on one"))
    if found.get("attention"):
        lines.append(("Attention", f"of decoded tokens by {found['attention']} kernels"))
    read = f"read {disk['read_gbps']:.2g} GB/s{' (cached)' if disk['cached'] else ''}" if disk["read_gbps"] else ""
    speeds = f"{read}, write {disk['write_gbps']:.2g} GB/s" if read else "not measured"
    lines += [
        ("Link", f"{link['gbps']:.2g} GB/s, {link['kind']}"),
        *(("Simulated PCIe", pace(one)) for one in found["paces"]),
        ("Disk", f"{speeds}, {disk['free_bytes'] / GB:.0f} GB free in {disk['path']}"),
        ("Data", found["data_dir"]),
    ]
    if "browser" in found:  # that the dashboard's tests would use
        without = "none: `launch.py test` gets one if it can, or skips the browser tests"
        lines.append(("Browser", found["browser"] or without))
    return [*lines, *(("Problem", text) for text in found["problems"])]


def product(one: dict[str, Any]) -> str:
    """The ways of one product for a number of rows, on one line."""
    times = ", ".join(f"{way} {ms:.2f}" for way, ms in one["ms"].items())
    return f"{one['kind']}, {one['rows']} rows: {times} ms; {one['taken']} is taken"


def distance(one: dict[str, Any]) -> str:
    """How far the fast arithmetic is from the reference for one model in its formats, on one line."""
    taken = "the reference" if one["objection"] else "fast"
    return f"fast, {one['model']} {one['format']}, dense {one['dense']}, {one['dtype']}: {one['text']}; auto: {taken}"


def pace(one: dict[str, Any]) -> str:
    """The demo model's emulated link in one format and arithmetic, on one line."""
    of = f"{one['model']} {one['format']}, {one['arithmetic']}"
    return f"{one['gbps']:.2g} GB/s for {of}, whose layers take {one['layer_ms']:.3g} ms: kept, EMULATED"


def describe(gpu: dict[str, Any]) -> str:
    """One GPU on one line."""
    text = f"{gpu['name']}, {gpu['free_bytes'] / GB:.1f} GB free of {gpu['total_bytes'] / GB:.1f} GB"
    if pcie := gpu.get("pcie"):
        text += (
            f", PCIe {pcie['generation']} x{pcie['width']} now, at most {pcie['generation_max']} x{pcie['width_max']}"
        )
    return text + ("" if gpu["usable"] else " (this torch cannot use it)")
