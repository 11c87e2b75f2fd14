"""`import`: converts a model to an expert pack, once; the pack opens in seconds and may be larger than memory."""

import argparse
import json
import sys
import time
from pathlib import Path

from app.cli import options
from app.cli.terminal import Bar, clock
from app.store.home import data_dir
from app.store.private import data_folder
from core.errors import MoestroError
from core.settings.formats import FORMATS
from core.system.paths import expanded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SRC", help='a model directory, a GGUF file, "demo", or a hub id (org/name, org/name:Q4_K_M)'
    )
    parser.add_argument(
        "--format",
        default="auto",
        choices=("auto", *FORMATS),
        metavar="NAME",
        help=f"format of the experts (default: auto, as they are): {', '.join(FORMATS)}",
    )
    parser.add_argument(
        "--blocks",
        type=int,
        default=1,
        metavar="N",
        help="store every expert in N equal blocks, so that a part of it can be read alone when the model is loaded "
        "with as many (default: 1, whole)",
    )
    parser.add_argument(
        "--no-head",
        action="store_true",
        help="leave out the head that predicts further tokens (MTP), which drafts can use, where the model has one",
    )
    parser.add_argument(
        "--out",
        type=expanded,
        metavar="DIR",
        help="the new directory (default: packs/NAME-FORMAT in the data directory)",
    )
    parser.add_argument("--download", action="store_true", help="fetch the model from the hub if it is not here")
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from core.importing import ImportForecast, import_model
    from core.memory.pack import check

    chosen: list[Path] = [args.out] if args.out else []
    plans: list[ImportForecast] = []

    def planned(forecast: ImportForecast) -> None:
        plans.append(forecast)
        bar.end()  # of a download
        print("\n".join(forecast.lines()), file=sys.stderr)

    def default(name: str, format: str) -> Path:
        data_folder(data_dir())
        chosen[:] = [data_dir() / "packs" / f"{name}-{format}"]
        return chosen[0]

    bar, start = Bar(), time.perf_counter()
    try:
        pack = import_model(
            args.source,
            args.out or default,
            format=args.format,
            blocks=args.blocks,
            head=not args.no_head,
            progress=bar.show,
            download=args.download or agreed(args.source),
            planned=planned,
        )
    except KeyboardInterrupt:
        bar.end()
        left = chosen[0].with_name(f"{chosen[0].name}.partial") if chosen else None
        kept = f"What is finished is kept in {left}. " if left and left.exists() else ""
        print(f"Stopped. {kept}Run the same command to continue.", file=sys.stderr)
        return 130
    except MoestroError:
        bar.end()
        raise
    bar.end()
    manifest, seconds = check(pack), time.perf_counter() - start
    if args.json:
        made = {"pack": str(pack), "format": manifest.format, "bytes": manifest.bytes, "experts": manifest.total}
        conversions = [conversion._asdict() for plan in plans for conversion in plan.conversions]
        made |= {"source": dict(manifest.source), "exact": dict(manifest.exact), "conversions": conversions}
        made |= {"head_bytes": sum(plan.head_bytes for plan in plans)}
        made |= {"left_out": [one._asdict() for plan in plans for one in plan.left_out]}
        print(json.dumps(made | {"seconds": round(seconds, 3)}))
        return 0
    print(
        f"{pack}\n{manifest.total} experts as {manifest.format}, {manifest.bytes / 1e9:.2f} GB, from "
        f"{manifest.source['label']}, in {clock(seconds)}"
    )
    print("\n".join(f"  {part}: {how}" for part, how in manifest.exact.items()))
    if "stored" in manifest.source:
        print(f"  The file has {manifest.source['stored']}")
    return 0


def agreed(source: str) -> bool:
    """Ask for confirmation before a download; False without an interactive terminal."""
    from core.importing import HubModel, look, missing

    model = missing(source)
    if not isinstance(model, HubModel) or not sys.stdin.isatty() or not sys.stderr.isatty():
        return False
    size = sum(file.bytes for file in look(model))
    print(f"{model} is not on this machine. Download {size / 1e9:.2f} GB? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
