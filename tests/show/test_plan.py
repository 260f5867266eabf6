import builtins
import json
import re
import struct
from pathlib import Path

import pytest

from ds_memo.cli import main as cli
from ds_memo.plan import plan_to_json, plan_trace, read_trace
from ds_memo.show.plan import SKELETAL, TRANSIENT, MissingPackage, as_html, as_png

TRACE = Path(__file__).resolve().parents[1] / "data" / "requests" / "gpt_none_L2_s128k.txt"


@pytest.fixture(scope="module")
def plan():
    return plan_trace(read_trace(TRACE))


def pixels_of(path: Path, colour: str, tolerance: float = 0.01) -> int:
    """Count the pixels that have nearly this colour."""
    image = pytest.importorskip("matplotlib.image").imread(path)
    wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return int((abs(image[:, :, :3] - wanted).max(axis=-1) < tolerance).sum())


def test_png_tells_skeletal_and_transient_apart(plan, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "plan.json").write_text(plan_to_json(plan))
    assert cli.main(["show", str(tmp_path / "plan.json")]) == 0
    picture = tmp_path / "plan.png"
    width, height = struct.unpack(">II", picture.read_bytes()[16:24])
    assert width > 1000 and height > 500
    assert pixels_of(picture, SKELETAL) > 50_000 and pixels_of(picture, TRANSIENT) > 5_000
    assert pixels_of(picture, "#dc143c", 0.15) > 300  # crimson: the lower bound


def test_html_holds_every_slot_and_both_lines(plan):
    pytest.importorskip("plotly")
    text = as_html(plan)
    assert "<html>" in text and "https://cdn.plot.ly" not in re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    from plotly.io import from_json

    start = text.rindex("Plotly.newPlot(")
    body = text[text.index("[", start) :]
    data, _ = json.JSONDecoder().raw_decode(body)
    names = [trace["name"] for trace in data]
    assert names[0].startswith("skeletal") and names[1].startswith("transient")
    assert names[2].startswith("peak") and names[3].startswith("lower bound")
    assert len(data[0]["customdata"]) + len(data[1]["customdata"]) == len(plan.slots)
    assert from_json(json.dumps({"data": data}))


@pytest.mark.parametrize("draw, package", [(as_png, "matplotlib"), (as_html, "plotly")])
def test_a_missing_package_is_named(plan, monkeypatch, draw, package):
    real = builtins.__import__

    def fake(name, *args, **kwargs):
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fake)
    with pytest.raises(MissingPackage, match=package):
        draw(plan)
