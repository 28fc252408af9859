"""Makes README.md the home page of the documentation; a hook of mkdocs.yml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parent.parent / "README.md"


def home_page() -> str:
    """README.md with links as they are from within docs/."""
    return README.read_text(encoding="utf-8").replace("](docs/", "](")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """What mkdocs makes a page of; it calls this for every one."""
    return home_page() if page.file.src_uri == "index.md" else markdown


def on_serve(server: Any, **_: Any) -> None:
    """Has `scripts/docs serve` look after README.md, too."""
    server.watch(str(README))
