"""Every rival of the GPU benchmarks computes what stock computes; one that did not would make the comparison void."""

import dataclasses

import pytest
import torch

from benchmarks import paper_memo, workloads
from benchmarks.noise import distance
from benchmarks.rivals import RIVALS, Budget, Installed
from benchmarks.timing import Trainer
from tests.everyday import everyday

CPU = torch.device("cpu")
FP32 = 1e-5
"""Share of the norm: a GEMM that is split by rows may sum in another order."""


@pytest.fixture(scope="module")
def stock():
    """Model, trainer and stock's gradients per workload."""
    made = {}

    def of(name):
        if name not in made:
            shape = dataclasses.replace(workloads.shapes(CPU)[name], layers=4)
            trainer = Trainer(workloads.build(shape, CPU), workloads.batch(shape, shape.lengths[0], CPU))
            made[name] = shape, trainer, *trainer.gradients(Installed())
        return made[name]

    return of


def budget(shape, **more):
    return Budget(CPU, 1 << 27, ranks=shape.ranks, bandwidth=1e9, layer_forward_s=1e-3, **more)


@pytest.mark.parametrize("workload", everyday(["gpt7b", "llama8b", "ulysses8"], ["llama8b"]))
@pytest.mark.parametrize("name", RIVALS)
def test_gradients_are_those_of_stock(name, workload, stock, tmp_path):
    shape, trainer, loss, want = stock(workload)
    with RIVALS[name].on(trainer.model, budget(shape, cache_dir=str(tmp_path))) as installed:
        for _ in range(2):
            got_loss, got = trainer.gradients(installed)
            assert torch.equal(got_loss, loss)
            assert max(distance(got, want).values()) <= FP32
    again_loss, again = trainer.gradients(Installed())  # it is taken off without a trace
    assert torch.equal(again_loss, loss) and max(distance(again, want).values()) == 0


@pytest.mark.parametrize("workload", ["gpt7b", "llama8b", "ulysses8"])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_papers_memo_at_every_alpha(alpha, workload, stock):
    shape, trainer, loss, want = stock(workload)
    rival = dataclasses.replace(RIVALS["paper"], settings={"alpha": alpha})
    with rival.on(trainer.model, budget(shape)) as installed:
        got_loss, got = trainer.gradients(installed)
    assert torch.equal(got_loss, loss)
    assert max(distance(got, want).values()) <= FP32


def test_the_papers_memo_stores_sixteen_units_of_a_gpt_layer(stock, monkeypatch):
    """MEMO, section 2: input 1, ln1 1, q k v 3, attention 1, second norm's input 1, ln2 1, fc1 4, gelu 4; and the log-sum-exp."""
    monkeypatch.setattr(paper_memo, "SMALL", 1024)  # the tiny model's log-sum-exp is smaller than what stays by default
    shape, trainer, _, _ = stock("gpt7b")
    rows, size = shape.lengths[0], shape.size
    unit = rows * size.hidden * 4
    stored = {}
    for alpha in (0.0, 1.0):
        with dataclasses.replace(RIVALS["paper"], settings={"alpha": alpha}).on(trainer.model, budget(shape)) as installed:
            trainer.gradients(installed)
            stored[alpha] = installed.report()["bytes_to_host"] / (shape.layers - 2)
    logsumexp = rows * size.heads * 4
    assert stored[1.0] == 16 * unit + logsumexp
    assert stored[0.0] == 2 * unit + logsumexp


def test_a_replay_that_is_wrong_shows(stock, monkeypatch):
    """The negative control: rows of the layer input that the replay starts from are shifted by one."""
    shape, trainer, _, want = stock("gpt7b")
    back = paper_memo.Rows.back
    monkeypatch.setattr(paper_memo.Rows, "back", lambda rows, tensor: back(rows, tensor.roll(1, 0)))
    with dataclasses.replace(RIVALS["paper"], settings={"alpha": 0.3}).on(trainer.model, budget(shape)) as installed:
        _, got = trainer.gradients(installed)
    assert max(distance(got, want).values()) > 100 * FP32


def test_the_paper_solves_its_own_alpha(stock):
    shape, trainer, _, _ = stock("gpt7b")

    def alpha(**measured):
        with RIVALS["paper"].on(trainer.model, dataclasses.replace(budget(shape), **measured)) as installed:
            trainer.gradients(installed)
            return installed.report()["alpha"]

    assert alpha(bandwidth=1e12) == 1.0
    assert alpha(bandwidth=1.0) == 0.0
    assert 0 < alpha(bandwidth=5e7) < 1  # 16 units of 6 KiB in a millisecond would take twice that


def test_attention_is_where_the_ranks_heads_meet():
    x = torch.randn(1, 16, 6, 4)
    there = workloads.heads_to_ranks(x, 8)
    assert there.shape == (1, 2, 48, 4)
    assert torch.equal(workloads.ranks_to_heads(there, 8), x.transpose(1, 2))


def test_the_papers_memo_with_planned_addresses():
    """Planned after two steps alike, then followed; the gradients stay stock's. At 512 tokens: small requests are not planned."""
    shape = dataclasses.replace(workloads.shapes(CPU)["gpt7b"], layers=4)
    trainer = Trainer(workloads.build(shape, CPU), workloads.batch(shape, 512, CPU))
    loss, want = trainer.gradients(Installed())
    rival = RIVALS["paper, planned"]
    with rival.on(trainer.model, budget(shape)) as installed:
        for _ in range(rival.warm_up):
            trainer.step(installed)
        before = installed.report()["plan"]
        got_loss, got = trainer.gradients(installed)
        plan = installed.report()["plan"]
    assert before["plans"] == 1 and 0 < before["lower_bound"] <= before["peak"] <= plan["arena"]
    assert plan["hits"] - before["hits"] > 10 * len(trainer.model.gpt_neox.layers)
    assert torch.equal(got_loss, loss) and max(distance(got, want).values()) <= FP32
