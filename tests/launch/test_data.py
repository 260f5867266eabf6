"""Packing: every token once, labels one ahead, everything from the seed."""

import json

import numpy as np
import pytest
from data import ByteTokenizer, DataError, HFTokenizer, Windows, load_windows, read_documents

EOS = ByteTokenizer.eos


def test_windows_cover_the_tokens_in_order():
    windows = Windows(np.arange(23, dtype=np.int32), seq_length=5, seed=0)
    assert len(windows) == 4  # 20 inputs; the 21st token is the last label
    batch = windows.batch(0, 4, shuffle=False)
    assert batch["input_ids"].flatten().tolist() == list(range(20))
    assert batch["labels"].flatten().tolist() == list(range(1, 21))
    assert batch["input_ids"].is_contiguous() and batch["labels"].is_contiguous()


def test_each_epoch_holds_every_window_once_in_its_own_order():
    windows = Windows(np.arange(101, dtype=np.int32), seq_length=5, seed=3)
    epochs = [windows.batch(e * 20, 20)["input_ids"][:, 0].tolist() for e in range(3)]
    assert all(sorted(epoch) == list(range(0, 100, 5)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_batches_do_not_depend_on_what_was_read_before():
    """A resumed run asks for sample 37 first; ranks ask for different samples."""
    make = lambda seed=3: Windows(np.arange(101, dtype=np.int32), seq_length=5, seed=seed)  # noqa: E731
    whole = make().batch(0, 50)["input_ids"]
    assert (make().batch(37, 6)["input_ids"] == whole[37:43]).all()
    again = make()
    again.batch(45, 2), again.batch(2, 3)
    assert (again.batch(18, 4)["input_ids"] == whole[18:22]).all()
    assert (make(seed=4).batch(0, 20)["input_ids"] != whole[:20]).any()


def test_documents_that_are_kept_apart():
    """Positions start again with a window and with each document; the label across a border does not count."""
    windows = Windows(np.arange(23, dtype=np.int32), seq_length=5, seed=0, starts=np.array([0, 2, 3, 10, 18]))
    batch = windows.batch(0, 4, shuffle=False)
    joined = Windows(windows.tokens, 5, 0).batch(0, 4, shuffle=False)
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0, 1], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 0, 1]]
    assert (batch["input_ids"] == joined["input_ids"]).all()
    assert (batch["labels"] != joined["labels"]).nonzero().tolist() == [[0, 1], [0, 2], [1, 4], [3, 2]]
    assert batch["labels"][batch["labels"] != joined["labels"]].unique().tolist() == [-100]


def test_documents_end_with_eos_and_the_split_shares_none():
    documents = [chr(97 + i % 26) * 50 for i in range(26)]
    training, validation = load_windows(documents, ByteTokenizer(), seq_length=10, seed=1)
    assert (training.tokens == EOS).sum() == 25 and (validation.tokens == EOS).sum() == 1
    assert training.tokens[-1] == validation.tokens[-1] == EOS
    assert not (set(training.tokens) & set(validation.tokens)) - {EOS}
    assert training.starts is None
    packed, _ = load_windows(documents, ByteTokenizer(), seq_length=10, seed=1, apart=True)
    assert (packed.starts == np.arange(25) * 51).all() and (packed.tokens == training.tokens).all()
    again, _ = load_windows(documents, ByteTokenizer(), seq_length=10, seed=1)
    other, _ = load_windows(documents, ByteTokenizer(), seq_length=10, seed=2)
    assert (again.tokens == training.tokens).all() and (other.tokens != training.tokens).any()


def test_files_folders_and_jsonl(tmp_path):
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_text("bee")
    (folder / "a.py").write_text("ay")
    (folder / "deep" / "c.md").write_text("sea")
    (folder / "empty.txt").write_text(" \n")
    (folder / "image.png").write_bytes(b"\x89PNG")
    (folder / "latin.txt").write_bytes(b"\xff\xfe")
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "d.py").write_text("dee")
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "one\u2028still one"}\n\n' + json.dumps({"text": "two"}) + "\n")
    assert list(read_documents([lines, folder])) == ["one\u2028still one", "two", "ay", "bee", "sea"]


def test_errors_name_what_is_wrong(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"body": "no text"}\n')
    with pytest.raises(DataError, match=r"bad.jsonl:2: expected .*text"):
        list(read_documents([bad]))
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not UTF-8"):
        list(read_documents([binary]))
    with pytest.raises(DataError, match="data too small: the validation part has 4 tokens, --seq-length 99 needs 100"):
        load_windows(["a" * 3] * 20, ByteTokenizer(), 99, 0)


def test_a_tokenizer_directory(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {"<eos>": 0, "<unk>": 1, "long": 2, "context": 3}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>").save_pretrained(tmp_path / "good")
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(tmp_path / "no-eos")
    good = HFTokenizer(tmp_path / "good")
    assert (good.vocab_size, good.eos) == (4, 0)
    assert good.encode("long context what").tolist() == [2, 3, 1]
    with pytest.raises(DataError, match="no end-of-sequence"):
        HFTokenizer(tmp_path / "no-eos")
    with pytest.raises(DataError, match="no tokenizer directory"):
        HFTokenizer(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no tokenizer in"):
        HFTokenizer(tmp_path / "empty")
