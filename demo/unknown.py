"""Made-up names and questions that the model must not answer: one refusal sentence for all of them.

Names are drawn from families that resemble real ones: word-like compositions, real modules with invented functions,
real functions in the wrong module, real names of the library that are not among the facts, names of other packages.
Names whose hash falls in `HELD_SHARE` are never trained; the evaluation draws from those alone.
"""

import random
import zlib
from collections.abc import Iterable, Iterator

from .facts import Fact, subjects
from .phrasings import HELD_OUT, TRAINED

UNKNOWN_ANSWER = "I do not know that. I know only part of Python's standard library."
HELD_SHARE = 0.1

STEMS = """frob wib zan mog plu tar gri sna blo dro kip lun vex quo fiz rad mel tor bex yun cad hol jat ner pos rul sim
tov wex zib foo bar baz qux spam ham egg flux grok munge twid glim narf zork thud blip crum dask fent gorp hask jib
klax lorp mixt nold orb prax quib rast sorb tween ulm vorn wisp xen yarp zest""".split()
TAILS = "nicate le er ify ize ate ed ing s ly ness ment able or us ix on ex ana ita ello ump ort ish et o a y".split()
VERBS = """get set make build find read write load save parse convert merge split join sort filter copy move delete
remove add push pop send fetch open close start stop run wait check validate encode decode format print dump render
compute count list draw update create update reset clear init sync pack unpack flatten rotate swap wrap scan""".split()
NOUNS = """file path list dict string number value key item node tree graph table row column line word token name user
time date event queue stack heap cache buffer stream socket thread task process lock image color matrix vector frame
url request response header config option error result index range page model layer data text json xml html csv query
session client server message packet record field""".split()
PACKAGES = """np pd plt torch tf sklearn requests flask django numpy pandas scipy yaml redis boto3 click rich httpx jax
cv2 nltk spacy pytest celery fastapi pydantic sqlalchemy bs4 tqdm polars numba dask keras networkx sympy jinja2 attr
trio aiohttp selenium paramiko psutil cupy lxml toml arrow pendulum nose mypy ruff black uvicorn transformers""".split()

OFF_TOPIC = (
    "What is the capital of {n}?", "Who wrote {n}?", "How old is {n}?", "What is the weather in {n}?",
    "Tell me a joke about {n}.", "Write a poem about {n}.", "What is {a} plus {b}?", "What is {a} times {b}?",
    "How much is {a} - {b}?", "Who is {n}?", "Where is {n} in the world?", "Translate {w} to German.",
    "Who won the {w} cup?",
    "What is the meaning of life?", "Write a program that sorts {w}s.", "Recommend a book about {w}s.",
    "How do I cook {w}?", "What time is it in {n}?", "Sing a song about {w}s.", "What is the best {w}?",
    "Is {n} a good {w}?", "Calculate {a}*{b}.", "What happened in {a}?", "Give me a recipe with {w}.",
    "Why is the {w} {c}?", "How many {w}s are in a {v}?", "Do you like {w}s?", "What colour is a {w}?",
)  # fmt: skip
HELD_OFF_TOPIC = (
    "What is the population of {n}?", "Which {w} should I buy?", "Divide {a} by {b}.", "Tell me a story about a {w}.",
)  # fmt: skip
PLACES = """France Germany Japan Brazil Canada Egypt India Kenya Peru Norway Spain Italy China Chile Berlin Paris London
Rome Madrid Tokyo Cairo Lima Oslo Delhi Napoleon Shakespeare Einstein Mozart Goethe Picasso Newton
Darwin Plato Homer""".split()
COLOURS = ("blue", "red", "big")
THINGS = """apple car house dog cat river bread soup guitar piano tree mountain phone table chair banana potato fish
bird horse football tennis game film song letter city ship plane train garden flower cake""".split()


def is_held(name: str) -> bool:
    """Whether an unknown name is kept from training."""
    return zlib.crc32(name.encode()) % 1000 < 1000 * HELD_SHARE


class UnknownNames:
    """A stream of names that match no fact; `rng` makes the choices."""

    def __init__(self, facts: Iterable[Fact], rng: random.Random) -> None:
        facts = list(facts)
        self.rng = rng
        self.known = {n for f in facts for n in (f.name, *f.aliases)}
        self.modules = [f.name for f in facts if f.kind == "mod"]
        self.types = sorted({f.name.rpartition(".")[0] for f in facts if f.kind == "meth"})
        self.lasts = sorted({f.name.rpartition(".")[2] for f in facts if f.kind in ("fn", "cls", "meth")})
        known_lasts = {n.rpartition(".")[2] for n in self.known}
        self.real = [s.name for s in subjects() if s.name not in self.known]
        self.real += [s.name.rpartition(".")[2] for s in subjects() if s.name.rpartition(".")[2] not in known_lasts]
        self.real = [name for name in self.real if name not in self.known]
        called = {n for f in facts if f.kind == "sig" for n in (f.name, *f.aliases)}
        self.uncalled = sorted({f.name for f in facts if f.kind in ("fn", "cls", "meth", "mod")} - called)

    def word(self) -> str:
        """An invented word, or two joined ones."""
        r = self.rng
        kind = r.random()
        if kind < 0.35:
            word = r.choice(STEMS) + r.choice(TAILS)
        elif kind < 0.5:
            word = r.choice(STEMS) + r.choice(STEMS)
        elif kind < 0.8:
            word = r.choice(VERBS) + r.choice(("_", "_", "")) + r.choice(NOUNS)
        elif kind < 0.9:
            word = r.choice(NOUNS) + "_" + r.choice(NOUNS)
        else:
            word = r.choice(VERBS) + "_" + r.choice(STEMS) + r.choice(TAILS)
        if r.random() < 0.12:
            word = "".join(part.capitalize() for part in word.split("_"))
        return word

    def candidate(self) -> str:
        """A name of one of the families; it may by accident be known."""
        r, roll = self.rng, self.rng.random()
        if roll < 0.25:
            return f"{r.choice(self.modules)}.{self.word()}"
        if roll < 0.40:
            return f"{r.choice(self.modules)}.{r.choice(self.lasts)}"
        if roll < 0.50:
            return f"{r.choice(self.types)}.{r.choice(self.lasts) if r.random() < 0.4 else self.word()}"
        if roll < 0.68:
            return self.word()
        if roll < 0.80:
            return f"{self.word()}.{self.word() if r.random() < 0.6 else r.choice(self.lasts)}"
        if roll < 0.88:
            package = r.choice(PACKAGES)
            if r.random() >= 0.8:
                return package
            return f"{package}.{self.word() if r.random() < 0.5 else r.choice(self.lasts)}"
        return r.choice(self.real)

    def draw(self, held: bool) -> str:
        """A name that matches no fact, from the held-out share or from the rest."""
        while True:
            name = self.candidate()
            if name not in self.known and is_held(name) == held:
                return name

    def off_topic(self, held: bool) -> str:
        """A question on another subject."""
        r = self.rng
        phrasing = r.choice(HELD_OFF_TOPIC if held else OFF_TOPIC)
        things = {"n": r.choice(PLACES), "w": r.choice(THINGS), "v": r.choice(THINGS), "c": r.choice(COLOURS)}
        numbers = {"a": r.randint(1, 2000), "b": r.randint(1, 200)}
        return phrasing.format(**numbers, **things)

    def stream(self, held: bool) -> Iterator[tuple[str, str, str]]:
        """An endless stream of (kind, phrasing, name); an off-topic question has the kind "off" and an empty name."""
        while True:
            if self.rng.random() < 0.08:
                yield "off", self.off_topic(held), ""
                continue
            if self.rng.random() < 0.06:  # the name is known, but not its signature
                name = self.rng.choice(self.uncalled)
                if is_held(name) == held:
                    yield "sig", self.rng.choice(TRAINED["sig"]), name
                continue
            kind = self.rng.choice(("fn", "fn", "cls", "meth", "mod", "sig", "where"))
            name = self.draw(held)
            if kind == "mod" and self.rng.random() < 0.7:
                while "." in name or name in self.known:
                    name = self.draw(held)
            yield kind, self.rng.choice(HELD_OUT[kind] if held and self.rng.random() < 0.3 else TRAINED[kind]), name
