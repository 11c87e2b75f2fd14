"""Error texts for packs that cannot be read, with what to do."""

from pathlib import Path

from core.system.command import COMMAND

REPAIR = f"Delete this pack in the library (`{COMMAND} models --delete`), and import the model again."


def unusable(file: Path, how: str = "") -> str:
    """Error text for a damaged manifest: it does not tell which files are the pack's, so none are deleted by it."""
    return (
        f"{file} is damaged{how}. Import the model again, into another folder; then look through {file.parent} and "
        "remove what you do not need."
    )


def damaged(file: Path, how: str = "") -> str:
    """Error text for a pack file whose content has changed."""
    return f"{file} is damaged{how}. {REPAIR}"


def changed(file: Path, how: str = "") -> str:
    """Error text for a pack file that was written to while the pack was open."""
    return (
        f"{file} was changed while its model was loaded{how}. Unload the model and load it again. If it cannot be "
        f"loaded: {REPAIR[0].lower()}{REPAIR[1:]}"
    )


def unreadable(file: Path, error: OSError) -> str:
    """Error text for a read that the system refuses."""
    return f"{file} cannot be read: {error.strerror or error}. Check the disk and your permissions for this file."
