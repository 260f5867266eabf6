"""mkdocs hook: pages of the repository that lie outside docs/ are part of the site, and links to them lead there.

Notes are written as GitHub shows them (`> [!NOTE]`), so that pages read well in both places.
"""

from __future__ import annotations

import posixpath
import re
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

REPO = Path(__file__).parents[1]
OUTSIDE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "ds_configs/README.md")
_NOTE = re.compile(r"^> \[!(NOTE|WARNING)\]\n((?:>.*\n?)+)", re.MULTILINE)
_TITLE = re.compile(r"\*\*(.+)\*\*\n\n")
_LINK = re.compile(r"(?<!`)(!?)\[([^\]]*)\]\(([^)\s:]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and the pictures in them. A page of the site has the path that it has in the repository, or in docs/."""
    for path in filter(lambda path: (REPO / path).is_file(), OUTSIDE):
        pictures = (target for mark, _, target in _LINK.findall((REPO / path).read_text()) if mark)
        for inside in (path, *(posixpath.normpath(posixpath.join(posixpath.dirname(path), picture)) for picture in pictures)):
            if not inside.startswith("docs/"):
                files.append(File.generated(config, inside, abs_src_path=str(REPO / inside)))
    destinations = Counter(file.dest_uri for file in files)
    if twice := [file.src_uri for file in files if destinations[file.dest_uri] > 1]:  # mkdocs would write one over the other
        raise PluginError(f"pages with one address: {', '.join(twice)}")
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links and notes of the repository into those of the site. A file that the site lacks is named without a link."""
    uri = page.file.src_uri
    folder = posixpath.dirname(uri if uri in OUTSIDE else f"docs/{uri}")

    def link(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        path, _, anchor = target.partition("#")
        if not path:
            return found.group()
        path = posixpath.normpath(posixpath.join(folder, path)).removeprefix("docs/")
        if files.get_file_from_path(path) is None and (REPO / path).exists():
            return text
        relative = posixpath.relpath(path, posixpath.dirname(uri) or ".")
        return f"{mark}[{text}]({relative}{'#' if anchor else ''}{anchor})"

    return _LINK.sub(link, _NOTE.sub(_admonition, markdown))


def _admonition(note: re.Match[str]) -> str:
    kind, quoted = note.groups()
    text = re.sub(r"^> ?", "", quoted, flags=re.MULTILINE)
    title = _TITLE.match(text)
    text = text[title.end() :] if title else text
    heading = f' "{title[1]}"' if title else ""
    return f"!!! {kind.lower()}{heading}\n\n{textwrap.indent(text, '    ')}"
