"""Hooks of mkdocs. They let the same Markdown work on a code-hosting site and in the built site.

- Documents outside ``docs/`` (:data:`PAGES`) become pages. The README is the home page.
- Other files outside ``docs/`` that a document links to are copied to ``files/``. A link to a folder becomes its text.
- Lists are indented by 4 spaces, as Python-Markdown requires it.

The tests import this file without mkdocs.
"""

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# Documents outside docs/, and their names in the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/monitoring/README.md": "monitoring.md",
    "patches/sglang-0.5.17/README.md": "patches.md",
}
# Code is matched first, so that links in it are left alone.
LINK = re.compile(r"^```.*?^```|`[^`\n]*`|(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)", re.MULTILINE | re.DOTALL)
ITEM = re.compile(r"(?:[-*]|\d+\.) +")


def repository_path(site_path: str) -> str:
    """Path in the repository of a page of the site."""
    return next((path for path, name in PAGES.items() if name == site_path), f"docs/{site_path}")


def site_path(path: str) -> str:
    """Path in the site of a file of the repository."""
    return path.removeprefix("docs/") if path.startswith("docs/") else PAGES.get(path, f"files/{path}")


def link_target(page: str, link: str) -> str:
    """Path in the repository to which a relative link of a page leads."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def rewrite_links(markdown: str, page: str) -> str:
    """Point the relative links of a page to paths of the site.

    Args:
        markdown: Text of the page.
        page: Its path in the repository.
    """
    here = posixpath.dirname(site_path(page))

    def rewritten(match: re.Match[str]) -> str:
        if not match[3]:
            return match[0]
        target = link_target(page, match[3])
        if (ROOT / target).is_dir():
            return match[2]
        return f"{match[1]}[{match[2]}]({posixpath.relpath(site_path(target), here or '.')}{match[4] or ''})"

    return LINK.sub(rewritten, markdown)


def indent_lists(markdown: str) -> str:
    """Indent what is inside list items by 4 spaces instead of the width of the item's mark."""
    lines, shift, fenced = [], 0, False
    for line in markdown.split("\n"):
        item = ITEM.match(line)
        if not fenced and item:
            shift = max(0, 4 - len(item[0]))
        elif not fenced and line.strip() and not line.startswith(" "):
            shift = 0
        fenced ^= line.lstrip().startswith("```")
        lines.append(" " * shift + line if line.startswith("  ") else line)
    return "\n".join(lines)


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the documents outside ``docs/``, and the files to which documents link."""
    from mkdocs.structure.files import File

    for path, name in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text()))
    for page in files.documentation_pages():
        path = repository_path(page.src_uri)
        for match in LINK.finditer((ROOT / path).read_text()):
            target = link_target(path, match[3]) if match[3] else ""
            name = site_path(target)
            if name.startswith("files/") and (ROOT / target).is_file() and files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Rewrite the links and lists of a page."""
    return indent_lists(rewrite_links(markdown, repository_path(page.file.src_uri)))
