"""Facts about the standard library, read from the docstrings and signatures of the running Python.

A fact is one answer to one kind of question: what a function, class, method or module is for ("fn", "cls", "meth",
"mod"), how a callable is called ("sig"), which module has a name ("where"). Facts come in the order of `popularity`.
"""

import importlib
import inspect
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

from .popularity import BUILTIN_TYPES, FIRST_NAMES, METHODS_OF, MODULES, MORE_MODULES

OWN_WORDS = Path(__file__).with_name("descriptions.json")
MAX_ANSWER_CHARS = 160
MAX_SIGNATURE_CHARS = 100
SIGNATURE_MODULES = 34
"""So many of the best-known modules also give facts about calls and places."""
#: First sentences unusable as answers: bare headings, signatures, truncated or machine-made text.
UNUSABLE = re.compile(r"^(alias for|>|\(|@|[\w.]+\(|\w+_\w+:)|->|^\w+ = |:\.?$|i\.e\.$|\\|\.\.$|Tm_sec", re.IGNORECASE)
#: Rarely asked names, left out to limit the number of facts.
OBSCURE = re.compile(
    r"^os\.(W[A-Z]|sched_|spawn|exec[lv]|posix_|pidfd|eventfd|p?writev|p?readv|[sg]etres|[sg]ete[ug]id"
    r"|[sg]etre|setp|getp[gr]"
    r"|setx|getx|listx|removex|login_tty|openpty|forkpty|fpathconf|confstr|tc[gs]et|splice|copy_file|waitid|initgr"
    r"|makedev|major|minor|mkfifo|mknod|lchown|chroot|lockf|device_enc|statvfs|fstatvfs"
    r"|register_at|getgroup|setg|setsid|getsid|setuid)"
    r"|^asyncio\..*(Watcher|watcher|Policy|policy|Transport|Protocol|Sendfile|LimitOver)|^sys\.(get|set)_(coro|async)"
    r"|^operator\.i(add|and|concat|floordiv|lshift|matmul|mod|mul|or|pow|rshift|sub|truediv|xor)$"
    r"|^(copyright|credits|license)$|(^|\.)_|^typing\.(Supports|ByteString|get_over|clear_over)"
    r"|^os\.(get(pgid|pgrp|sid|priority|loadavg|random|xattr|uid|euid|gid|egid|ppid|login|cwdb|envb)|set|tc|fd|fs?async"
    r"|fch|fpath|fsync|fstat|ftrunc|dup|wait|nice|pipe2|pread|pwrite|posix|sendfile|sync|ttyname|umask|unsetenv|putenv"
    r"|lseek|lstat|isatty|killpg|l?chown|closerange|abort|ctermid|device|fork|plock|pathconf|sysconf|times|uname|writev"
    r"|readv|initgroups|strerror|truncate|blocking|utime|fwalk|renames|removedirs|getgroups|get_(inher|block|exec))"
    r"|^os\.path\.(same|lexists|splitdrive|commonprefix|normcase|ismount|supports)|^sys\.(set|call_|audit|add|unraise|is_fin"
    r"|get(alloc|dlopen|switch|trace|profile|filesystemencode|refcount|asyncgen)|displayhook|breakpointhook|exception$)"
    r"|^typing\.(Async|Await|Corou|Concat|ParamSpec|TypeVarTuple|Unpack|Contain|Collection|Chain|Reversible|Match|Pattern"
    r"|Mapping|Mutable|Abstract|Text|BinaryIO|IO$|TextIO|Sized|ItemsView|KeysView|ValuesView|MappingView|NewType|assert"
    r"|clear|dataclass_t|get_|is_typed|no_type|reveal|ForwardRef|Hashable|OrderedDict|Default|Deque|FrozenSet|Counter)"
    r"|^logging\.(Buffering|Logger(Ad)|Log|Percent|Str|Null|make|get(L.*C|LogR|Han|LevelN)|set|capture|add|raise|Filterer)"
    r"|^threading\.(get(trace|profile)|set|ExceptHook|excepthook|TIMEOUT|stack|get_native|_)|^shutil\.(un?register|get_(ar|un)"
    r"|chown|copymode|copystat|copyfileobj|Special|Exec|ReadE|Registry)|^argparse\.(Meta|Raw|Bool|Argument(Def|Type|Err)|Act)"
    r"|^csv\.(unix|get_d|unregister|register|list_d|field|Dialect|excel)|^math\.(nextafter|ulp|frexp|ldexp|modf|erfc?|lgamma"
    r"|expm1|log1p|cbrt|exp2|remainder|a?(sin|cos|tan)h)|^time\.(clock_|pthread|thread_time|tzset|get_clock|.*_ns)"
    r"|^random\.(gamma|vonmises|pareto|weibull|lognorm|beta|trian|getstate|setstate|randbytes|SystemR)|^re\.purge"
    r"|^dataclasses\.(Frozen|InitVar|KW|make)|^enum\.(pickle|EnumT|EnumM|EnumC|Flag[A-Z]|global|show|verify|EnumType|_|member"
    r"|nonm|Reprenum)|^contextlib\.(Abstract|Async|Context|aclosing|async)|^functools\.(WRAPPER|update|partialm)"
    r"|^inspect\.(walktree|Block|ArgInfo|EndOf|classify|indentsize)|^os\.\w+_result$|^re\.(template|RegexFlag)|readfp"
)
CALL_FACTS = 480
PLACE_FACTS = 300


@dataclass(frozen=True)
class Fact:
    """One answer; `name` is what is asked about, `aliases` are other unambiguous ways to name it."""

    kind: str
    name: str
    answer: str
    rank: int
    aliases: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Unique over all facts."""
        return f"{self.kind}:{self.name}"


@dataclass(frozen=True)
class Subject:
    """A documented object of the library under the name users type."""

    name: str
    kind: str
    module: str
    value: Any


@cache
def own_words() -> dict[str, dict[str, str]]:
    """Hand-written answers, by kind ("about", "module", "signature") and name."""
    loaded: dict[str, dict[str, str]] = json.loads(OWN_WORDS.read_text(encoding="utf-8"))
    return loaded


def first_sentence(doc: str) -> str | None:
    """The first sentence of a docstring after its signature line, or None where it is unusable as an answer."""
    parts = inspect.cleandoc(doc).strip().split("\n\n")
    lead = parts[0]
    while re.match(r"^[\w.]+\(.*\)(\s*->.*)?$", lead.split("\n")[0]):
        rest = "\n".join(lead.split("\n")[1:]).strip()
        if not rest:
            parts = parts[1:]
        lead = (rest or (parts[0] if parts else "")).lstrip("- ").strip()
    lead = re.sub(r"^[\w.]+\([^)]*\)\s*(->\s*[\w\[\], .]+?)?\s*(--|:)\s*", "", " ".join(lead.split()))
    match = re.match(r"^(.*?[.!?])(\s+[A-Z(].*)?$", lead)
    text = clean(match.group(1) if match else lead)
    fits = 8 <= len(text) <= MAX_ANSWER_CHARS and text.isascii() and text.isprintable()
    return text if fits and not UNUSABLE.search(text) else None


def clean(text: str) -> str:
    """Plain sentence: one kind of back-tick, a capital, a full stop."""
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text.replace("``", "`")).strip()
    text = text[0].upper() + text[1:] if text and text[0].isalpha() and " " in text else text
    return text if text.endswith((".", "!", "?")) else text + "."


def signature(subject: Subject) -> str | None:
    """The call signature as text, or None where that is unknown, long, or depends on the machine."""
    if subject.name in own_words()["signature"]:
        return own_words()["signature"][subject.name]
    try:
        text = re.sub(r"^\((self|cls)(, /)?(, )?", "(", str(inspect.signature(subject.value)))
    except (ValueError, TypeError):
        return None
    limit = MAX_ANSWER_CHARS if subject.name in FIRST_NAMES else MAX_SIGNATURE_CHARS
    if len(subject.name + text) > limit or text.startswith("(*args, **k") or not text.isascii():
        return None
    if re.search(r"0x|<|\(\)[^$]|\d{6}|, _\w+|->|'/|\.{3}", text):
        return None
    return subject.name + text


def public_names(module: ModuleType) -> list[str]:
    """What the module offers: `__all__`, or its public names that are its own."""
    listed = getattr(module, "__all__", None)
    if listed:
        return list(listed)
    own = (module.__name__, "_" + module.__name__, "builtins", None, "posix", "_io")
    return [n for n in dir(module) if n[0] != "_" and getattr(getattr(module, n), "__module__", None) in own]


def resolve(name: str) -> Subject | None:
    """The subject a dotted name means, or None: built-ins first, then the longest importable module."""
    import builtins

    parts = name.split(".")
    if hasattr(builtins, parts[0]):
        module, value, rest = "", getattr(builtins, parts[0]), parts[1:]
    else:
        for cut in range(len(parts) - 1, 0, -1):
            try:
                value = importlib.import_module(".".join(parts[:cut]))
            except ImportError:
                continue
            module, rest = ".".join(parts[:cut]), parts[cut:]
            break
        else:
            return None
    owner = value
    for part in rest:
        owner, value = value, inspect.getattr_static(value, part, None) or getattr(value, part, None)
        value = getattr(owner, part, None)
    if value is None or inspect.ismodule(value):
        return None
    if inspect.isclass(owner) and owner is not value:
        kind = "meth"
    else:
        kind = "cls" if inspect.isclass(value) else "fn"
    return Subject(name, kind, module, value)


def methods(class_name: str) -> Iterator[str]:
    """Names of the public methods of a class that it documents itself or inherits from its own module."""
    subject = resolve(class_name)
    assert subject is not None, class_name
    for name in dir(subject.value):
        value = getattr(subject.value, name, None)
        if name[0] != "_" and (inspect.isroutine(value) or inspect.isdatadescriptor(value)):
            yield f"{class_name}.{name}"


def subject_names() -> Iterator[str]:
    """All candidate dotted names, most wanted first, with repeats."""
    import builtins

    yield from FIRST_NAMES
    yield from (n for n in dir(builtins) if n[0] != "_" and n[0].islower())
    for kind in BUILTIN_TYPES[:4]:
        yield from methods(kind)
    yield from (f"{module}.{n}" for module in MODULES[:12] for n in public_names(importlib.import_module(module)))
    for class_name in METHODS_OF[:12]:
        yield from methods(class_name)
    yield from (n for n in dir(builtins) if n[0].isupper())
    yield from (f"{module}.{n}" for module in MODULES[12:40] for n in public_names(importlib.import_module(module)))
    for kind in BUILTIN_TYPES[4:]:
        yield from methods(kind)
    yield from (f"{module}.{n}" for module in MODULES[40:] for n in public_names(importlib.import_module(module)))
    for class_name in METHODS_OF[12:]:
        yield from methods(class_name)


def subjects() -> list[Subject]:
    """The library's documented callables, each once, under its most wanted name."""
    chosen: dict[str, Subject] = {}
    seen: set[int] = set()
    for name in subject_names():
        subject = None if name in chosen or OBSCURE.search(name) else resolve(name)
        if subject is None or subject.kind == "fn" and not callable(subject.value):
            continue
        if id(subject.value) in seen and name not in FIRST_NAMES:
            continue
        if isinstance(getattr(subject.value, "__doc__", None), str) or name in own_words()["about"]:
            seen.add(id(subject.value))
            chosen[name] = subject
    return list(chosen.values())


def module_facts() -> Iterator[tuple[str, str, str, str]]:
    """("mod", name, module, answer) of every module whose purpose fits one sentence."""
    for name in (*MODULES, *MORE_MODULES):
        doc = importlib.import_module(name).__doc__
        answer = own_words()["module"].get(name) or first_sentence(doc or "")
        if answer:
            yield "mod", name, name, answer


def raw_facts() -> Iterator[tuple[str, str, str, str]]:
    """(kind, name, module, answer), most wanted first: purposes, then signatures and modules of well-known names."""
    known = subjects()
    about = [(s, own_words()["about"].get(s.name) or first_sentence(s.value.__doc__ or "")) for s in known]
    described = [(s, answer) for s, answer in about if answer]
    well_known = [s for s, _ in described if s.name in FIRST_NAMES or s.module in ("", *MODULES[:SIGNATURE_MODULES])]
    owners = Counter(s.name.rpartition(".")[2] for s in known)
    ordered = sorted(well_known, key=lambda s: s.kind == "meth")
    calls = [("sig", s.name, s.module, text) for s in ordered if (text := signature(s))]
    places = []
    for subject in well_known:
        name = subject.name.rpartition(".")[2]
        if subject.kind == "meth" or owners[name] > 1 and subject.name not in FIRST_NAMES or len(name) < 3:
            continue
        where = f"{name} is in the {subject.module} module." if subject.module else f"{name} is built in."
        if not subject.module and name[0].isupper():
            continue
        places.append(("where", name, subject.module, where))
    head = [(s.kind, s.name, s.module, answer) for s, answer in described]
    for row in zip_longest(head, module_facts(), calls[:CALL_FACTS], places[:PLACE_FACTS]):
        yield from (fact for fact in row if fact is not None)


def select_facts(limit: int) -> list[Fact]:
    """The first `limit` facts, each name of a kind once, with its aliases."""
    chosen: dict[tuple[str, str], tuple[str, str, str, str]] = {}
    for fact in raw_facts():
        chosen.setdefault(fact[:2], fact)
    taken = list(chosen.values())[:limit]
    names = {name for kind, name, _, _ in taken if kind != "where"} | set(MODULES) | set(MORE_MODULES)
    owners = Counter(s.name.rpartition(".")[2] for s in subjects())
    facts: list[Fact] = []
    for rank, (kind, name, module, answer) in enumerate(taken):
        aliases = short_names(kind, name, module, owners)
        facts.append(Fact(kind, name, answer, rank, tuple(a for a in aliases if a not in names or kind == "where")))
    return without_shared_aliases(facts)


def short_names(kind: str, name: str, module: str, owners: Counter[str]) -> Iterator[str]:
    """Shorter names users may write for a subject: without its module, or for a place, with it."""
    parts = name.split(".")
    depth = len(parts) - (len(module.split(".")) if module else 0)
    if kind == "where" and module:
        yield f"{module}.{name}"
    if kind in ("where", "mod") or len(parts) == 1:
        return
    if depth == 2 and module:
        yield ".".join(parts[-2:])
    if len(parts[-1]) > 2 and (owners[parts[-1]] == 1 and depth == 1 or name in FIRST_NAMES):
        yield parts[-1]


def without_shared_aliases(facts: list[Fact]) -> list[Fact]:
    """The facts, each alias kept by one owner only: a built-in type's method, else the most wanted name."""
    owner: dict[tuple[str, str], str] = {}
    for fact in sorted(facts, key=claim):
        for alias in fact.aliases:
            owner.setdefault((question_group(fact), alias), fact.key)
    return [
        replace(fact, aliases=tuple(a for a in fact.aliases if owner[question_group(fact), a] == fact.key))
        for fact in facts
    ]


def claim(fact: Fact) -> tuple[bool, bool, int]:
    """Sort key: smallest for the fact with the strongest claim to a short name."""
    return fact.name.split(".")[0] not in BUILTIN_TYPES, fact.name not in FIRST_NAMES, fact.rank


def question_group(fact: Fact) -> str:
    """The group of a kind. Kinds of one group share phrasings, so a name must mean one fact of the group."""
    return fact.kind if fact.kind in ("sig", "where") else "about"
