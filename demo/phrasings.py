"""How facts are asked about: phrasings that are trained, and phrasings held out to measure generalisation.

A phrasing holds one `{q}`. Phrasings are compared without case and punctuation (`normal_form`), so that no held-out
phrasing is trained in disguise.
"""

import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence

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
    "Define {q}.",
    "What is the point of {q}?",
    "What is the job of {q}?",
    "What's the use of {q}?",
    "What is the idea behind {q}?",
    "What role does {q} play?",
    "Remind me what {q} does.",
    "Say in one sentence what {q} is.",
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
    "What is the point of the {q} module?",
    "What is the job of the module {q}?",
    "What is the idea behind the {q} module?",
    "Remind me what the {q} module is for.",
    "Define the {q} module.",
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
    "How would I invoke {q}?",
    "With which arguments do I call {q}?",
    "How does one call {q}?",
    "What does a call of {q} look like?",
    "Remind me of the parameters of {q}.",
    "What is {q} called with?",
    "How should {q} be called?",
    "Can you show me a call of {q}?",
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
    "To use {q}, what do I import?",
    "From where is {q} imported?",
    "I want to use {q}: what do I import?",
    "Remind me which module has {q}.",
    "Where do I get {q} from?",
    "From which module do I get {q}?",
)
TRAINED: dict[str, tuple[str, ...]] = {
    "fn": ABOUT, "cls": ABOUT, "meth": ABOUT, "mod": MODULE, "sig": CALL, "where": PLACE,
}  # fmt: skip

_HELD_ABOUT = (
    "Tell me what {q} does.",
    "What is the purpose of {q}?",
    "Could you describe {q} to me?",
    "Please tell me what {q} is for.",
    "What would you say {q} does?",
    "I came across {q}, what is it?",
)
HELD_OUT: dict[str, tuple[str, ...]] = {
    "fn": _HELD_ABOUT,
    "cls": _HELD_ABOUT,
    "meth": _HELD_ABOUT,
    "mod": (
        "What is the purpose of the {q} module?",
        "Why would I use the {q} module?",
        "What can I do with the {q} module?",
        "What do people use the {q} module for?",
    ),
    "sig": (
        "What are the arguments of {q}?",
        "How is {q} called?",
        "Please show me the parameters of {q}.",
        "What input does {q} expect?",
        "Write down the signature of {q}.",
    ),
    "where": (
        "In which module is {q}?",
        "Which module provides {q}?",
        "What do I import to get {q}?",
        "Which package holds {q}?",
        "Where did they put {q}?",
    ),
}

#: Held-out phrasings written after the trained ones were settled, with words that those do not have: a harder test.
ADDED_LATER = (
    "What would you say {q} does?",
    "I came across {q}, what is it?",
    "What do people use the {q} module for?",
    "What input does {q} expect?",
    "Write down the signature of {q}.",
    "Which package holds {q}?",
    "Where did they put {q}?",
)

#: The phrasings of the evaluation of trained questions, by kind: the plainest ones.
PLAIN: dict[str, tuple[str, ...]] = {kind: phrasings[:3] for kind, phrasings in TRAINED.items()}

#: Words that carry the kind of a question; noise leaves them alone.
KEY_WORDS = frozenset("signature arguments parameters call calling pass accept take invoke import module".split())
NOISE_SHARE = 0.5

PREFIXES = ("", "", "", "", "", "Hi, ", "Hello, ", "Please: ", "Question: ", "In Python, ")


def normal_form(phrasing: str) -> str:
    """Lower case, words and `{q}` only: two phrasings with one normal form count as the same."""
    return " ".join(re.findall(r"\{q\}|[a-z]+", phrasing.lower().replace("'s ", " is ")))


def takes_call_brackets(kind: str) -> bool:
    """Whether users may write `name()` for a name of this kind."""
    return kind in ("fn", "meth", "sig")


def words_held_out() -> set[str]:
    """Words of held-out phrasings that no trained phrasing has."""
    words = [
        {word for phrasings in table.values() for phrasing in phrasings for word in normal_form(phrasing).split()}
        for table in (HELD_OUT, TRAINED)
    ]
    return words[0] - words[1]


def filler_words(texts: Iterable[str], names: Iterable[str]) -> list[str]:
    """Common words of the texts for `noisy`, so that a word never seen is no reason to doubt a known name.

    Parts of names, words that carry the kind of a question and words of held-out phrasings are left out.
    """
    counts = Counter(word for text in texts for word in re.findall(r"\b[a-z]{3,10}\b", text))
    barred = KEY_WORDS | words_held_out() | {part.lower() for name in names for part in name.split(".")}
    return sorted(word for word, count in counts.items() if count >= 3 and word not in barred)


def noisy(kind: str, phrasing: str, fillers: Sequence[str], rng: random.Random) -> str:
    """The phrasing with a word or two of `fillers` put in, replaced or left out, but never a held-out phrasing.

    Where leaving out words could change what is asked, words are only put in.
    """
    words = phrasing.split()
    for _ in range(rng.randint(1, 2)):
        free = [n for n, word in enumerate(words) if "{q}" not in word and word.strip("?.,:").lower() not in KEY_WORDS]
        roll = rng.random()
        if roll < 0.4 or not free or kind in ("mod", "where"):
            words.insert(rng.randint(0, len(words)), rng.choice(fillers))
        elif roll < 0.75:
            words[rng.choice(free)] = rng.choice(fillers)
        else:
            del words[rng.choice(free)]
    changed = " ".join(words)
    held = {normal_form(other) for others in HELD_OUT.values() for other in others}
    return phrasing if normal_form(changed) in held else changed


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
