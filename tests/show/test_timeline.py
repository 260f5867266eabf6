"""The page of an estimated step fills its window."""

from ds_memo.show.timeline import as_html
from ds_memo.solve.timeline import TimelineSpan
from ds_memo.swap.stream_protocol import COMPUTE


def test_the_page_fills_the_window():
    page = as_html([TimelineSpan(COMPUTE, "forward", 0, 0.0, 1.0)], "a step")
    assert "height:100vh" in page.replace(" ", "") and '"height":420' not in page
