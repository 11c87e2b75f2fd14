"""`doctor`: reports what Moestro detects on this machine, and any problems."""

import argparse
import json
import sys
import time
from pathlib import Path

from app.cli import browser
from app.services.examination import examine, report
from app.start import installer
from app.store.home import data_dir
from core.system.paths import expanded

GB = 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--pack",
        type=expanded,
        metavar="DIR",
        help="verify every byte of this expert pack instead, and report what is damaged",
    )
    parser.add_argument(
        "--mend",
        action="store_true",
        help="replace an installed torch that cannot use this machine's GPU by one that can",
    )


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when a problem slows Moestro down on this machine, or a pack is damaged, else 0."""
    if args.pack is not None:
        return check_pack(args.pack, args.json)
    if args.mend and not mend():
        return 1
    found = {**examine(data_dir()), "browser": next(browser.candidates(), None)}
    print(json.dumps(found, indent=2) if args.json else report(found))
    return 1 if found["problems"] else 0


def mend() -> bool:
    """Replace torch, while no part of it is imported yet. False when that was not possible; the installer says why."""
    if installer.replace_torch():
        return True
    print("torch was not replaced; the reason stands above.", file=sys.stderr)
    return False


def check_pack(pack: Path, as_json: bool) -> int:
    """Verify every byte of a pack against its checksums."""
    from app.cli.terminal import Bar
    from core.memory.pack import verify
    from core.profile.buddies import problem

    bar, start = Bar(), time.perf_counter()
    found = verify(pack, lambda file, done, total: bar.show(file, done / max(total, 1), done, total))
    bar.end()
    seconds, manifest = time.perf_counter() - start, found.manifest
    if manifest is not None and (wrong := problem(pack, manifest.model_hash)):
        found = found._replace(problems=(*found.problems, wrong))
    if as_json:
        facts = (
            {
                "format": manifest.format,
                "experts": manifest.total,
                "source": dict(manifest.source),
                "exact": dict(manifest.exact),
            }
            if manifest
            else {}
        )
        print(
            json.dumps(
                {
                    "pack": str(pack),
                    "bytes": found.bytes,
                    "seconds": round(seconds, 3),
                    **facts,
                    "problems": found.problems,
                },
                indent=2,
            )
        )
    else:
        print("\n".join(found.problems) or f"{pack} is whole: {found.bytes / GB:.2f} GB read in {seconds:.1f} s.")
    return 1 if found.problems else 0
