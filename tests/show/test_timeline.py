"""The page of a simulated step fills its window."""

from types import SimpleNamespace

from ds_memo.show.timeline import as_html
from ds_memo.swap.stream_protocol import COMPUTE


def test_the_page_fills_the_window():
    page = as_html([SimpleNamespace(stream=COMPUTE, kind="forward", name="layer 0", layer=0, begin=0.0, end=1.0)], "a step")
    assert "height:100vh" in page.replace(" ", "") and '"height":420' not in page
