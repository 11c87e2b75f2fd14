"""How facts are asked about: phrasings that are trained, and phrasings held out to measure generalisation.

A phrasing holds one `{q}`. Phrasings are compared without case and punctuation (`normal_form`), so that no held-out
phrasing is trained in disguise.
"""

from __future__ import annotations

import random
import re

ABOUT = (
    "What does {q} do?",
    "What is {q}?",
    "What is {q} for?",
    "What's {q} for?",
    "What's {q}?",
    "Explain {q}.",
    "Describe {q}.",
    "Tell me about {q}.",
    "How do I use {q}?",
    "When would I use {q}?",
    "Can you explain {q}?",
    "Please explain {q} to me.",
    "I want to know what {q} does.",
    "Do you know what {q} does?",
    "What does {q} do in Python?",
    "What does the Python function {q} do?",
    "What is {q} used for?",
    "Help me understand {q}.",
    "Summarise {q}.",
    "Give me a short description of {q}.",
    "What does calling {q} do?",
    "Why use {q}?",
    "{q}",
    "{q}?",
)
MODULE = (
    "What is the {q} module for?",
    "What does the module {q} do?",
    "What does the {q} module do?",
    "Describe the {q} module.",
    "What is {q}?",
    "What's {q}?",
    "What is the module {q}?",
    "Tell me about the {q} module.",
    "Tell me about {q}.",
    "Explain the {q} module.",
    "Can you explain the module {q}?",
    "What is the {q} module used for?",
    "What is in the {q} module?",
    "When would I use the {q} module?",
    "How do I use the {q} module?",
    "Why import {q}?",
    "Give me a short description of the {q} module.",
    "Help me understand the {q} module.",
    "{q} module",
    "import {q}",
)
CALL = (
    "What is the signature of {q}?",
    "What's the signature of {q}?",
    "How do I call {q}?",
    "How can I call {q}?",
    "Which arguments does {q} take?",
    "What arguments does {q} take?",
    "What parameters does {q} have?",
    "Which parameters does {q} accept?",
    "Show me the signature of {q}.",
    "Tell me the arguments of {q}.",
    "Show the parameters of {q}.",
    "What do I pass to {q}?",
    "What can I pass to {q}?",
    "Give me the signature of {q}.",
    "List the arguments of {q}.",
    "I need the signature of {q}.",
    "signature of {q}",
    "{q} signature",
    "{q} arguments",
    "{q} parameters",
)
PLACE = (
    "Which module has {q}?",
    "What module has {q}?",
    "What module is {q} in?",
    "Which module is {q} in?",
    "Where do I find {q}?",
    "Where can I find {q}?",
    "Where is {q}?",
    "Where is {q} defined?",
    "How do I import {q}?",
    "Where do I import {q} from?",
    "Which module do I import for {q}?",
    "What must I import for {q}?",
    "Tell me which module has {q}.",
    "Which module contains {q}?",
    "Where does {q} live?",
    "Which import do I need for {q}?",
    "{q} is in which module?",
    "module of {q}",
)
TRAINED: dict[str, tuple[str, ...]] = {
    "fn": ABOUT, "cls": ABOUT, "meth": ABOUT, "mod": MODULE, "sig": CALL, "where": PLACE,
}  # fmt: skip

_HELD_ABOUT = (
    "Tell me what {q} does.",
    "What is the purpose of {q}?",
    "Could you describe {q} to me?",
    "Please tell me what {q} is for.",
)
HELD_OUT: dict[str, tuple[str, ...]] = {
    "fn": _HELD_ABOUT,
    "cls": _HELD_ABOUT,
    "meth": _HELD_ABOUT,
    "mod": (
        "What is the purpose of the {q} module?",
        "Why would I use the {q} module?",
        "What can I do with the {q} module?",
    ),
    "sig": ("What are the arguments of {q}?", "How is {q} called?", "Please show me the parameters of {q}."),
    "where": ("In which module is {q}?", "Which module provides {q}?", "What do I import to get {q}?"),
}

#: The phrasings of the evaluation of trained questions, by kind: the plainest ones.
PLAIN: dict[str, tuple[str, ...]] = {kind: phrasings[:3] for kind, phrasings in TRAINED.items()}

PREFIXES = ("", "", "", "", "", "Hi, ", "Hello, ", "Please: ", "Question: ", "In Python, ")


def normal_form(phrasing: str) -> str:
    """Lower case, words and `{q}` only: two phrasings with one normal form count as the same."""
    return " ".join(re.findall(r"\{q\}|[a-z]+", phrasing.lower().replace("'s ", " is ")))


def takes_call_brackets(kind: str) -> bool:
    """Whether users may write `name()` for a name of this kind."""
    return kind in ("fn", "meth", "sig")


def styled(kind: str, phrasing: str, name: str, rng: random.Random) -> str:
    """The question in one of the styles users write: sloppy case and punctuation, brackets, back-ticks, a greeting."""
    roll = rng.random()
    if roll < 0.12 and takes_call_brackets(kind):
        name += "()"
    elif roll < 0.20:
        name = f"`{name}`"
    if rng.random() < 0.25:
        phrasing = phrasing[0].lower() + phrasing[1:]
        if rng.random() < 0.6:
            phrasing = phrasing.rstrip("?.")
    elif rng.random() < 0.10:
        phrasing = phrasing.rstrip("?.")
    prefix = rng.choice(PREFIXES) if rng.random() < 0.25 else ""
    if prefix and phrasing[0] != "{":
        phrasing = prefix + phrasing[0].lower() + phrasing[1:]
    return phrasing.replace("{q}", name)
