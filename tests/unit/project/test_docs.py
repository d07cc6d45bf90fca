"""The manual: what follows from the code is up to date, links lead somewhere, and no removed flag is named."""

import ast
import pkgutil
import re
import runpy
from pathlib import Path

import pytest

from sglang_ext_bench.__main__ import main as bench
from sglang_ext_bench.pages import manual

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PATCHES = ROOT / "patches/sglang-0.5.17"
SITE = runpy.run_path(str(DOCS / "site/hooks.py"))
PAGES = [*(ROOT / page for page in SITE["PAGES"]), *sorted(DOCS.rglob("*.md"))]
# Pages that name files and classes.
OF_CODE = [
    *(DOCS / "architecture.md", DOCS / "glossary.md", PATCHES / "README.md"),
    *sorted((DOCS / "internals").glob("*.md")), *sorted((DOCS / "guides").glob("*.md")), *sorted((DOCS / "results").glob("*.md")),
]  # fmt: skip
# Written in a change of its own; a link to it is allowed until it is there.
REMOVED = ("--kv-schedule", "--kv-ngram-tokens", "--kv-bench-lock-step")
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")
CODE = re.compile(r"^```.*?^```|^ {4}.*?$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def name(path):
    return str(path.relative_to(ROOT))


def anchors(text):
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(path, text):
    for target, anchor in LINK.findall(CODE.sub("", text)):
        found = (path.parent / target).resolve() if target else path
        if not found.exists():
            yield target
        elif anchor and found.suffix == ".md" and anchor not in anchors(found.read_text()):
            yield f"{target}#{anchor}"


def test_pages_that_follow_from_the_code_are_up_to_date():
    late = [name(path) for path in manual.outdated_pages(DOCS)]
    assert not late, f"{late}: run sglang-ext-bench manual"


def test_a_page_that_differs_or_is_missing_is_written_anew_and_keeps_what_is_written_by_hand(tmp_path, capsys):
    (tmp_path / "flags.md").write_text(f"{manual.BEGIN}\nBy hand.\n{manual.END}\n")
    assert bench(["manual", "--docs", str(tmp_path), "--check"]) == 1
    assert "flags.md is out of date" in capsys.readouterr().out and not (tmp_path / "compatibility.md").exists()
    assert bench(["manual", "--docs", str(tmp_path)]) == 0
    assert bench(["manual", "--docs", str(tmp_path), "--check"]) == 0
    written = (tmp_path / "flags.md").read_text()
    assert f"{manual.BEGIN}\n\nBy hand.\n\n{manual.END}" in written and "### `--kv-mode`" in written


def test_one_mark_without_the_other_is_refused():
    with pytest.raises(ValueError, match="must be between both"):
        manual.handwritten_part(f"{manual.BEGIN}\ntext")


def test_each_flag_and_each_refusal_has_its_place():
    flags, compatibility = manual.flags_page(""), manual.compatibility_page("")
    assert all(f"### `{flag.option}`" in flags for flag in manual.FLAGS)
    assert flags.count("efused with") >= sum(len(flag.conflicts) for flag in manual.FLAGS if flag.name != "kv_mode")
    words = " ".join(compatibility.split())
    for refusal in manual.REFUSALS:
        assert refusal.option in words.replace("`", "")
        assert all(f"`{manual.option(part)}`" in words for part in refusal.dependent_fields)


def test_readme_is_short_and_names_the_test_command():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert max(map(len, lines)) <= 120
    assert any(line.strip().startswith("make test") for line in lines)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_each_relative_link_leads_somewhere(page):
    assert not list(dead_links(page, page.read_text()))


def test_a_link_to_nothing_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n[a](#a-page) [b](#nowhere) [c](missing.md) [d](https://example.org/x) `[e](code.md)`\n")
    assert list(dead_links(page, page.read_text())) == ["#nowhere", "missing.md"]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name)
def test_no_page_names_a_flag_that_is_gone(page):
    assert not [flag for flag in REMOVED if flag in page.read_text()]


NAMED = re.compile(r"`((?:[\w-]+/)*\w+\.py)(?::([\w.]+))?`")


@pytest.mark.parametrize("page", OF_CODE, ids=name)
def test_each_file_and_name_of_the_code_that_is_named_exists(page):
    package = ROOT / "sglang_ext"
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    files |= {path.relative_to(ROOT).as_posix(): path for folder in ("sglang_ext", "tests", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")}
    wrong = []
    for file, inside in NAMED.findall(page.read_text()):
        if file.startswith("srt/"):
            continue
        # A name without a folder stands for one that was named with it before.
        found = [path for key, path in files.items() if key == file or ("/" not in file and key.endswith(f"/{file}"))]
        if not found or (inside and not any(re.search(rf"\b{inside.split('.')[-1]}\b", path.read_text()) for path in found)):
            wrong.append(f"{file}:{inside}")
    assert not wrong, ", ".join(wrong)


def defined_names():
    """Each class of the package and the benchmarks, and its methods, fields and attributes as ``Class.name``."""
    found = set()
    for path in [*(ROOT / "sglang_ext").rglob("*.py"), *(ROOT / "benchmarks/sglang_ext_bench").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                fields = [each.target.id for each in node.body if isinstance(each, ast.AnnAssign)]
                methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
                attributes = [each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)]
                found |= {node.name, *(f"{node.name}.{each}" for each in (*fields, *methods, *attributes))}
    return found


def test_each_method_of_a_class_of_ours_that_a_page_names_exists():
    names = defined_names()
    wrong = []
    for page in OF_CODE:
        for owner, member in re.findall(r"`(?:[\w/]+\.py:)?([A-Z]\w+)\.(\w+)`", page.read_text()):
            if owner in names and f"{owner}.{member}" not in names:
                wrong.append(f"{name(page)}: {owner}.{member}")
    assert not wrong, ", ".join(wrong)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name)
def test_each_module_and_what_is_named_in_it_can_be_imported(page):
    for dotted in sorted(set(re.findall(r"\bsglang_ext(?:\.[A-Za-z_]\w*)+", page.read_text()))):
        pkgutil.resolve_name(dotted)


def test_each_page_is_in_the_navigation_of_the_site_once():
    listed = re.findall(r"^ +- [^:]+: (\S+)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(SITE["site_path"](name(page)) for page in PAGES)


@pytest.mark.parametrize(
    ("page", "link", "in_site"),
    [
        ("docs/guides/a.md", "[b](../flags.md#mode)", "[b](../flags.md#mode)"),
        ("docs/a.md", "[b](../README.md)", "[b](index.md)"),
        ("README.md", "[`b`](docs/guides/b.md)", "[`b`](guides/b.md)"),
        ("docs/results/a.md", "![b](../../benchmarks/results/longcot.png)", "![b](../files/benchmarks/results/longcot.png)"),
        ("patches/sglang-0.5.17/README.md", "[b](../../LICENSE)", "[b](files/LICENSE)"),
        ("docs/a.md", "[tests](../tests)", "tests"),
        ("docs/a.md", "`[b](../README.md)` [c](#c) [d](https://example.org)", "`[b](../README.md)` [c](#c) [d](https://example.org)"),
    ],
)
def test_links_to_files_outside_docs_lead_to_their_place_in_the_site(page, link, in_site):
    assert SITE["rewrite_links"](link, page) == in_site


def test_the_diagrams_are_those_that_the_script_draws():
    script = runpy.run_path(str(DOCS / "site/diagrams.py"))
    late = [file for file, draw in script["DIAGRAMS"].items() if (DOCS / "diagrams" / file).read_text() != draw()]
    assert not late, f"{late}: run python docs/site/diagrams.py"


def test_what_is_inside_a_list_is_indented_by_four_spaces_in_the_site():
    found = SITE["indent_lists"]("1. a\n\n   b\n   - c\n     d\n\n- e\n  - f\n\ntext\n\n    code\n")
    assert found == "1. a\n\n    b\n    - c\n      d\n\n- e\n    - f\n\ntext\n\n    code\n"
