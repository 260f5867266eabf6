"""The documentation matches the code: every message, key, link and command."""

from __future__ import annotations

import ast
import importlib.util
import json
import pkgutil
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args
from urllib.parse import unquote

import pytest
from pydantic import BaseModel

from benchmarks import picture
from ds_memo.cli.main import VERBS
from ds_memo.config import MemoConfig
from ds_memo.estimate.question import METHODS
from tests import support
from tests.messages import NO_CURE, messages, says_what_to_do

REPO = Path(__file__).parents[1]
PAGES = sorted(
    [*REPO.glob("*.md"), *REPO.glob("docs/*.md"), *REPO.glob("*/README.md"), *REPO.glob(".github/**/*.md")],
)


def test_every_message_says_what_was_seen_and_what_to_do():
    texts = {text: path for path, text in messages()}
    silent = [f"{path}: {text}" for text, path in texts.items() if text not in NO_CURE and not says_what_to_do(text)]
    assert not silent, "no cure, nothing expected, nor how the run goes on:\n" + "\n".join(silent)
    short = [text for text in texts if len(re.findall(r"\w+", text)) < 3 and text not in NO_CURE]
    assert not short, "too short to say what was seen"
    assert set(NO_CURE) <= texts.keys()
    assert not [text for text in NO_CURE if says_what_to_do(text)]


def test_messages_in_troubleshooting_exist():
    """A symptom that quotes a message has its words."""
    quoted = re.findall(r"`((?:\w+ ){3}[^`]+)`", (REPO / "docs/troubleshooting.md").read_text())
    texts = [text.replace('"', "") for _, text in messages()]
    source = "".join(path.read_text() for path in (REPO / "ds_memo").rglob("*.py"))
    gone = [words for words in quoted if not any(has(words, text) for text in texts) and words not in source]
    assert len(quoted) > 10
    assert not gone, gone


def has(words: str, template: str) -> bool:
    """Return True if a message has these words: the parts in this order, and anything for each `…`."""
    parts = [re.escape(part.strip()) for part in words.replace('"', "").split("…")]
    return re.search(".*".join(parts), template) is not None


def fields(model: type[BaseModel], prefix: str = "") -> dict[str, object]:
    """Return key and default of each field that is no section."""
    found: dict[str, object] = {}
    for name, field in model.model_fields.items():
        sections = [
            of for of in (field.annotation, *get_args(field.annotation)) if isinstance(of, type) and issubclass(of, BaseModel)
        ]
        if sections:
            found |= fields(sections[0], f"{prefix}{name}.")
        else:
            found[prefix + name] = None if field.is_required() else field.default
    return found


def test_the_configuration_table_has_every_field_with_its_default():
    text = (REPO / "docs" / "config.md").read_text()
    table = {key: default for key, default in re.findall(r"^\| `([\w.]+)` \| [^|]+ \| ([^|]+) \|", text, re.MULTILINE)}
    expected = fields(MemoConfig)
    assert table.keys() == expected.keys()
    for key, default in expected.items():
        shown = {None: "absent", True: "`true`", False: "`false`"}[default] if isinstance(default, bool | None) else None
        shown = shown or (f'`"{default}"`' if isinstance(default, str) else f"`{default:g}`")
        assert table[key].strip() == shown, key


def test_the_report_table_has_every_key():
    trees = [ast.parse((REPO / "ds_memo/runtime" / name).read_text()) for name in ("report.py", "handle.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    makes = [call for call in calls if ast.unparse(call.func) in ("Report", "account.report", "report.report")]
    keys = {word.arg for call in makes for word in call.keywords if word.arg}
    assert len(keys) > 15
    cells = re.findall(r"^\| (`[^|]+`) \|", (REPO / "docs/report.md").read_text(), re.MULTILINE)
    assert keys <= set(re.findall(r"`(\w+)`", " ".join(cells)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPO).as_posix())
def test_links_inside_the_repository(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    broken = [target for target in targets if target and not (page.parent / target).exists()]
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPO).as_posix())
def test_commands_exist(page):
    text = page.read_text()
    modules = set(re.findall(r"-m ((?:ds_memo|benchmarks)[\w.]*)", text))
    assert not [name for name in modules if importlib.util.find_spec(name.rstrip(".")) is None]
    files = set(
        re.findall(r"(?<![\w/])(?:tests|launch|benchmarks|ds_configs|ds_memo)/[\w/.-]+\.(?:sh|py|json|sbatch|md)\b", text)
    )
    assert not [name for name in files if not (REPO / name).exists() and not name.endswith("/NAME.json")]
    verbs = set(re.findall(r"(?:^    |`|^)ds-memo ([a-z]+)", text, re.MULTILINE))
    assert verbs <= VERBS.keys()


def test_names_of_the_package_exist():
    """Annotations of tests are never evaluated, and prose is not either. The changelog speaks of what is gone."""
    pages = {*PAGES, *(REPO / "tests").rglob("*.py")} - {REPO / "CHANGELOG.md"}
    texts = {page: page.read_text() for page in pages}
    named = {name: page for page, text in texts.items() for name in re.findall(r"(?<![\w/.-])ds_memo(?:\.[A-Za-z_]\w*)+", text)}
    assert not {name: page for name, page in named.items() if not name.endswith(".py") and not resolves(name)}


def resolves(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return name == "ds_memo.integrations.verl" and (REPO / "ds_memo/integrations/verl.py").exists()  # it imports verl
    return True


def test_rows_of_integrations_name_tests_that_exist():
    """Or say that no test holds them."""
    table = (REPO / "docs/integrations.md").read_text().partition("## Who trains with what")[2].partition("\n#")[0]
    held = [row.split(" | ")[-1].rstrip("| ") for row in re.findall(r"^\| .*", table, re.MULTILINE)[1:]]
    assert len(held) > 20
    named = {cell: re.findall(r"`(tests/[\w/.]+)::([\w:]+)`", cell) for cell in held}
    assert not [cell for cell, tests in named.items() if not tests and not re.match(r"\[by hand\]|not run$", cell)]
    assert not [test for tests in named.values() for test in tests if not is_test(*test)]
    assert not is_test("tests/test_docs.py", "test_gone") and not is_test("tests/gone.py", "test_gone")


def is_test(file: str, name: str) -> bool:
    """Return True if the file has this class, function, or method of a class (Class::test)."""
    node: ast.AST = ast.parse((REPO / file).read_text()) if (REPO / file).exists() else ast.Module([], [])
    for part in name.split("::"):
        node = next((each for each in ast.iter_child_nodes(node) if getattr(each, "name", None) == part), ast.Module([], []))
    return hasattr(node, "name")


def test_the_support_matrix_is_that_of_the_tests():
    assert support.PAGE.read_text() == support.page(), "python -m tests.support writes it anew"


DENIED = [
    re.compile(words, re.IGNORECASE)
    for words in (
        r"\bno (?:\w+ )?results? (?:of|from|on) (?:a |any )?GPUs?\b",
        r"\b(?:nothing|none of (?:it|this)) (?:has |was |is )?(?:ever )?(?:run|ran|tested|measured) on (?:a |any )?GPUs?\b",
        r"\bon (?:a |any )?GPUs? (?:everything|all of it|all) is untested\b",
        r"\bnever (?:run|ran|tested) on (?:a |any )?GPUs?\b",
        r"\b(?:hybrids?|convolutions|scans)\b[^.|]*\b(?:are|is) refused (?:on|with|by) (?:ranks|sequence)",
        r"\b(?:packed documents|ZeRO-[0-3]|NVMe|LoRA)\b[^.|]*\b(?:is|are) untested\b",
    )
]
"""Sentences that results or tests refute: GPUs' results stand in benchmarks/results, exact settings in tests/support.py."""


def test_pages_deny_no_result():
    results = [json.loads(path.read_text()) for path in (REPO / "benchmarks/results").glob("*cuda*.json")]
    assert any("NVIDIA" in json.dumps(result.get("environment", {})) for result in results)
    by_ranks = json.loads(support.FAMILIES.read_text())
    assert all(by_ranks[ranks]["qwen3_next"] == by_ranks[ranks]["nemotron_h"] == "exact" for ranks in ("2", "4"))
    texts = {page: " ".join(page.read_text().split()) for page in PAGES if page.name != "CHANGELOG.md"}
    found = [f"{page.name}: {hit[0]}" for page, text in texts.items() for words in DENIED for hit in words.finditer(text)]
    assert not found, "\n".join(found)
    assert DENIED[0].search("No result of a GPU exists") and DENIED[2].search("on a GPU everything is untested")


def test_pages_count_models_as_the_tests_do():
    verdicts = json.loads(support.FAMILIES.read_text())["2"].values()
    exact, alone = (sum(verdict == words for verdict in verdicts) for words in ("exact", ONE_DOCUMENT))
    text = " ".join(" ".join(page.read_text().split()) for page in PAGES if page.name != "CHANGELOG.md")
    assert {int(number) for number in re.findall(rf"(\d+) of {len(verdicts)} (?:causal|families)", text)} == {exact}
    assert f"{exact} are exact, {alone} exact with one document to a row, {len(verdicts) - exact - alone} are refused" in text


ONE_DOCUMENT = "exact with one document to a row; more are refused"


def test_families_that_pages_refuse_are_not_exact():
    """The table of what ranks refuse in docs/parallel.md names no family that the sweep finds exact."""
    verdicts = json.loads(support.FAMILIES.read_text())["2"]
    exact = {re.sub(r"\W|_", "", name) for name, verdict in verdicts.items() if verdict == "exact"}
    table = (REPO / "docs/parallel.md").read_text().partition("| refused | reason | families |")[2].partition("\n\n")[0]
    named = {re.sub(r"\W|_", "", name.lower()) for name in re.findall(r"[A-Z][\w.-]+", table)}
    assert len(named) > 15
    assert not named & exact


def test_the_readme_is_short():
    lines = (REPO / "README.md").read_text().splitlines()
    assert len(lines) <= 110
    text = re.sub(r"```.*?```|^    .*?$|^\|.*?$|^#.*?$|^!.*?$", "\n\n", "\n".join(lines), flags=re.DOTALL | re.MULTILINE)
    sentences = re.split(r"(?<=[.:?])\s|\n\n|\n- ", re.sub(r"\]\([^)]*\)", "", text))
    assert not [sentence for sentence in sentences if len(sentence.split()) > 25]
    cells = [cell for line in lines if line.startswith("|") for cell in re.sub(r"\]\([^)]*\)", "", line).split("|")]
    assert not [cell for cell in cells if len(cell.split()) > 20]


def test_the_readme_shows_the_result_files():
    """Its picture and its measured numbers are those of committed results."""
    assert picture.PICTURE.read_text() == picture.picture(), "python -m benchmarks.picture draws it anew"
    claims = json.loads((REPO / "benchmarks/results/capacity-alst-cuda.json").read_text())["claims"]
    length, step = (f"{claim['value']:.2f}" for claim in claims)
    text = (REPO / "README.md").read_text()
    assert f"{length} times the length of ALST's recipe" in text and f"a step takes {step} of ALST's" in text


STARTERS = re.compile(r"(What|How|Whether|Why|Of|If|By|But|Over|Where|Lately|As|It)\b")
"""Words that a function's docstring must not begin with: it says what the function does, "Return…", "Move…"."""


def test_the_estimators_picture_shows_todays_methods():
    """Matplotlib writes each word of an SVG beside its outline."""
    words = re.findall(r"<!-- (.+?) -->", (REPO / "docs" / "estimate.svg").read_text())
    command = "--model ds_configs/models/gpt-7b.json --hardware a800 --gpus 8 --compare --sweep 16K:2M -o docs/estimate.svg"
    assert {word for word in words if re.fullmatch("[a-z_]+", word)} == set(METHODS), f"ds-memo estimate {command}"


def test_docstrings_of_functions_begin_with_a_verb():
    found = []
    for path in [*(REPO / "ds_memo").rglob("*.py"), *(REPO / "ops").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None
            if text and STARTERS.match(text):
                found.append(f"{path.relative_to(REPO)}:{node.lineno} {text.splitlines()[0]}")
    assert not found, "\n".join(found)


class Page(HTMLParser):
    """Links and anchors of a page of the site."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if target := given.get("href" if tag == "a" else "src" if tag == "img" else ""):
            self.links.append(target)


def lost_links(site: Path) -> list[str]:
    """Return the links inside a built site that lead to no page, or to no anchor of it."""
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    lost = []
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = unquote(link).partition("#")
            if ":" in target or target.startswith("//"):
                continue
            there = path if not target else (path.parent / target).resolve()
            there = there / "index.html" if there.is_dir() else there
            if not there.is_file() or (anchor and there in pages and anchor not in pages[there].anchors):
                lost.append(f"{path.relative_to(site)}: {link}")
    return lost


@pytest.mark.slow
def test_the_site_builds_and_all_its_links_lead_somewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.parent.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("index.html")}
    assert {".", "api", "benchmarks", "config", "troubleshooting"} <= pages
    assert lost_links(tmp_path / "site") == []


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    (tmp_path / "a").mkdir()
    links = '<a href="../b/">1</a><a href="#there">2</a><a href="#here">3</a>'
    (tmp_path / "a" / "index.html").write_text(f'<h2 id="here">x</h2>{links}')
    (tmp_path / "index.html").write_text('<a href="a/#here">1</a><a href="a/#gone">2</a><a href="https://example.org/x">3</a>')
    assert sorted(lost_links(tmp_path)) == ["a/index.html: #there", "a/index.html: ../b/", "index.html: a/#gone"]


def test_pages_with_one_address_end_the_build():
    """mkdocs writes one over the other and says nothing, --strict or not."""
    files, errors = (pytest.importorskip(f"mkdocs.{name}") for name in ("structure.files", "exceptions"))
    spec = importlib.util.spec_from_file_location("site_pages", REPO / "docs" / "site_pages.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    hook.OUTSIDE = ()
    two = [files.File(name, None, "/site", use_directory_urls=True) for name in ("guide.md", "guide/README.md")]
    with pytest.raises(errors.PluginError, match=r"pages with one address: guide\.md, guide/README\.md"):
        hook.on_files(two, None)
    assert hook.on_files(two[:1], None) == two[:1]
