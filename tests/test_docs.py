"""What the documents say is so: references are current, examples run, commands and paths exist, nothing leaks."""

import ast
import io
import re
import runpy
import shlex
import subprocess
import sys
import tokenize
import tomllib
from functools import cache
from pathlib import Path

import pytest

from app import cli
from app.cli import metrics, settings

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
POLICY = ROOT / "examples" / "second_chance.py"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


@cache
def tracked() -> list[Path]:
    """The project's own text files: what git tracks or would; without git, what is not hidden or built."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split("\0")
        paths = [ROOT / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [p for p in ROOT.rglob("*") if not {".venv", ".git", "__pycache__"} & set(p.parts)]
    return [p for p in paths if p.is_file() and b"\0" not in p.read_bytes()[:4096]]


def test_the_settings_reference_is_current() -> None:
    written = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert written == settings.reference() + "\n", "run: python launch.py settings > docs/settings.md"


def test_the_reference_of_commands_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    written = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        cli.main(["--help-all"])
    assert written == capsys.readouterr().out, "run: python launch.py --help-all > docs/commands.md"


def test_the_table_of_metrics_is_current() -> None:
    written = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert written == metrics.reference() + "\n", "run: python launch.py metrics > docs/metrics.md"


@pytest.mark.long(0.1)
def test_the_policy_example_is_short_and_keeps_the_contract_of_all_policies() -> None:
    assert len(POLICY.read_text(encoding="utf-8").splitlines()) <= 40
    plugins = ["-p", "examples.second_chance", "-p", "no:cacheprovider", "-p", "no:xdist", "--noconftest"]
    command = [sys.executable, "-m", "pytest", *plugins, "-q", "tests/policy/test_eviction.py", "-k", "second_chance"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed and int(passed[1]) >= 2, run.stdout


def test_the_policy_example_can_be_chosen() -> None:
    script = (
        "from app import cli\nfrom app.cli import options\nfrom examples import second_chance\n"
        "args = cli.parse('chat --eviction second_chance --set eviction.second_chance.chances=2'.split())\n"
        "print((*options.spec(args).settings.cache.eviction,))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "('second_chance', {'chances': 2})"


EXAMPLES = [
    pytest.param(found, id=f"{path.name}-{number}")
    for path in DOCUMENTS
    for number, found in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL))
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_what_the_examples_import_is_there(example: str) -> None:
    imports = [one for one in ast.parse(example).body if isinstance(one, ast.Import | ast.ImportFrom)]
    assert imports
    exec(compile(ast.Module(imports, []), "example", "exec"), {})


@pytest.mark.long(0.7)
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_run(example: str) -> None:
    """In a process of its own; one computes for half a minute."""
    run = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_the_example_answers_a_question(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_module("examples.answer", run_name="__main__")
    written = capsys.readouterr().out
    assert re.search(r"^\d+ tokens/s, hit rate \d+%, exact: True$", written, re.MULTILINE), written


def test_the_example_replays_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"{token},0,{expert}" for token in range(60) for expert in (token % 3, 3 + token % 5)]
    trace.write_text("\n".join(["token,layer,expert", *rows]), encoding="utf-8")
    command = [sys.executable, "-m", "examples.replay", str(trace)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    hits = {line.split()[0]: float(line.split()[1].rstrip("%")) for line in run.stdout.splitlines()}
    assert {"lru", "second_chance", "belady"} <= hits.keys()
    assert hits["belady"] == max(hits.values()) > hits["none"]
    assert "(our own)" in run.stdout


def test_the_readme_answers_a_newcomer_on_its_first_screen() -> None:
    assert len(README.splitlines()) <= 120
    first = "\n".join(README.splitlines()[:35])
    for wanted in (
        "no consumer card has been measured yet",
        "python launch.py  ",
        "python launch.py test",
        "| Tokens/s |",
        "**not measured**",
    ):
        assert wanted in first


def commands(text: str) -> set[str]:
    """The commands of a page: lines of its code blocks, and in its prose those with an option or a bench's name."""
    in_prose = re.findall(r"`(python launch\.py [a-z]+ [^`]*)`", text)
    joined = (" ".join(command.split()) for command in in_prose)
    return set(re.findall(r"^python launch\.py.*$", text, re.MULTILINE)) | {
        command for command in joined if re.search(r" --| bench [a-z]", command)
    }


def test_the_commands_of_the_documents_exist() -> None:
    lines = {line for document in DOCUMENTS for line in commands(document.read_text(encoding="utf-8"))}
    assert len(lines) > 60
    for line in lines:
        words = shlex.split(line.partition("  #")[0])[2:]
        assert cli.parse([word for word in words if word not in (">", "|")]).command in cli.MODULES, line


def test_the_paths_of_the_architecture_exist() -> None:
    names = set(re.findall(r"`([\w./]+/|[\w./]+\.(?:py|md))`", ARCHITECTURE))
    folders = [ROOT / folder for folder in ("", "core", "app", "docs")]
    assert len(names) > 100
    assert not {name for name in names if not any((folder / name).exists() for folder in folders)}


def test_the_floors_of_the_architecture_are_those_of_the_import_contract() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    [layers] = [one["layers"] for one in tools["importlinter"]["contracts"] if one["id"] == "floors"]
    table = ARCHITECTURE.partition("| Floor |")[2].partition("\n\n")[0].splitlines()[2:]
    named = [re.findall(r"`([\w./]+?)/?`", row.split("|")[1]) for row in table]
    floors = [{path.removesuffix(".py").replace("/", ".") for path in paths} for paths in named]
    assert floors == [{"launch"}, *({room.strip() for room in layer.split("|")} for layer in layers)]


NOT_OURS = {"core/policy/eviction/second_chance.py", "gguf-py/gguf/constants.py"}  # to be written; llama.cpp's


def said(path: Path) -> str:
    """What a file says to its readers: the comments and docstrings of a Python file, all of any other."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text
    comments = [t.string for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT]
    return "\n".join(
        comments
        + [
            node.value.value
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ]
    )


@cache
def is_there(name: str) -> bool:
    """A dotted name is a package, a module, or a name that stands in one."""
    first, *names = name.split(".")
    at = ROOT / first
    while names and (at / names[0]).is_dir():
        at /= names.pop(0)
    if names and (at / f"{names[0]}.py").is_file():
        at = at / f"{names.pop(0)}.py"
    elif names:
        at /= "__init__.py"
    return not names or (at.is_file() and bool(re.search(rf"\b{names[0]}\b", at.read_text(encoding="utf-8"))))


def lost(text: str, beside: Path) -> list[str]:
    """Modules, names in them, and files that a text of the folder `beside` cites and that do not exist."""
    dotted = re.findall(r"(?<![\w./-])(?:core|app|bench|demo)(?:\.[A-Za-z_]\w*)+(?![\w(]|\.\w)", text)
    paths = re.findall(r"(?<![\w./-])[a-z_][\w-]*/[\w./-]*\w\.(?:py|md|js|css|html|toml)\b", text)
    folders = (ROOT, ROOT / "core", ROOT / "app", ROOT / "docs", beside)
    return [name for name in dotted if not name.endswith((".py", ".css", ".js")) and not is_there(name)] + [
        path for path in paths if path not in NOT_OURS and not any((folder / path).exists() for folder in folders)
    ]


def test_what_comments_and_documents_cite_is_there() -> None:
    assert lost("`core.runtime.nowhere` core/runtime/miss.py core/nowhere.py core.runtime.miss.Nothing", ROOT) == [
        "core.runtime.nowhere",
        "core.runtime.miss.Nothing",
        "core/nowhere.py",
    ]
    kinds = (".py", ".md", ".js", ".css", ".html")
    files = [path for path in tracked() if path.suffix in kinds]
    suspects = [path for path in files if lost(path.read_text(encoding="utf-8"), path.parent)]  # parsing takes long
    found = {str(path.relative_to(ROOT)): names for path in suspects if (names := lost(said(path), path.parent))}
    assert not found


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, by GitHub's rule: lower case, no punctuation, a hyphen for each space."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(text: str, page: Path) -> list[str]:
    """Links of a page's text to files that do not exist, and to headings that their page does not have."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = page.parent / name if name else page
        exists = target.exists() and (not anchor or anchor in anchors(target.read_text(encoding="utf-8")))
        broken += [] if exists else [link]
    return broken


def test_links_between_documents_lead_somewhere() -> None:
    page = ROOT / "docs" / "gpu.md"
    assert anchors("# A `launch.py` page, 2\n```\n# no heading\n```\n") == {"a-launchpy-page-2"}
    assert broken_links("[a](nowhere.md) [b](pack.md#nowhere) ![c](images/library.png) [d](pack.md)", page) == [
        "nowhere.md",
        "pack.md#nowhere",
    ]
    found = {path.name: links for path in DOCUMENTS if (links := broken_links(path.read_text(encoding="utf-8"), path))}
    assert not found


def test_the_results_that_documents_cite_are_there() -> None:
    cited = {
        name for path in DOCUMENTS for name in re.findall(r"\b[a-z_]+-\d{8}-\d{6}\b", path.read_text(encoding="utf-8"))
    }
    assert len(cited) > 20
    assert not {name for name in cited if not (ROOT / "bench" / "results" / f"{name}.json").is_file()}


def test_no_package_index_and_no_machine_path_is_named() -> None:
    hosts = "|".join(
        re.escape("".join(parts))
        for parts in (
            ("py", "pi."),
            ("python", "hosted"),
            ("download.", "pytorch"),
            ("index", "-url"),
            ("find", "-links"),
            ("/sim", "ple/"),
        )
    )
    homes = "|".join(("root", "work", "home", "Users"))
    leak = re.compile(rf"{hosts}|(?<![\w.~}}])/(?:{homes})/\w")
    assert leak.search("--index-" + "url") and leak.search('open("/' + 'home/me")') and not leak.search("core/work/x")
    assert not hits(leak, tracked())


def hits(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    """Where a pattern occurs, as "file:line: text"."""
    texts = ((path, path.read_text(encoding="utf-8", errors="replace")) for path in paths)
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path, text in texts
        if pattern.search(text)  # splitting all of them into lines takes longer
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def test_nothing_is_left_to_do_in_the_code() -> None:
    marks = re.compile(r"\b(?:TO" + "DO|FIX" + r"ME)\b")
    assert not hits(marks, [path for path in tracked() if path.suffix in (".py", ".js", ".css", ".md", ".toml")])
