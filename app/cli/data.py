"""`data`: the database of chats and figures: its location, its integrity, and its backups."""

import argparse

from app.store.home import data_dir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="check the whole database, however long that takes")
    what.add_argument("--backup", action="store_true", help="make a copy now; the last two are kept")
    what.add_argument(
        "--restore",
        action="store_true",
        help="restore the newest intact copy; the present database is kept under another name",
    )
    what.add_argument(
        "--move-aside", action="store_true", help="rename the database, so that the next start begins with an empty one"
    )


def run(args: argparse.Namespace) -> int:
    from app.store import Store
    from app.store.backup import Backups, move_aside, restore
    from app.store.check import NAME, backups, damaged, find_damage

    folder = data_dir()
    if args.move_aside:
        aside = move_aside(folder)
        print(
            f"It is kept as {aside}. The next start begins with an empty database."
            if aside
            else f"{folder} has no database."
        )
    elif args.restore:
        copy, aside = restore(folder)
        print(f"The copy {copy.name} is in place." + (f" What was there is kept as {aside}." if aside else ""))
    elif args.backup:
        store = Store(folder)
        try:
            print(f"Copied to {Backups(store.db).make()}")
        finally:
            store.close()
    else:
        path = folder / NAME
        print(f"Your data: {folder}\nDatabase: {f'{path.stat().st_size:,} bytes' if path.exists() else 'none yet'}")
        print("Copies: " + (", ".join(copy.name for copy in backups(folder)) or "none yet"))
        if args.check:
            if damage := find_damage(path):
                print(damaged(path, damage))
                return 1
            print("The database is intact.")
    return 0
