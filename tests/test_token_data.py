"""The data module splits a corpus, feeds Lightning's loops and resumes them exactly."""

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from zero_strategy.data import ByteTokenizer, TokenDataModule, TokenFile, write_token_file
from zero_strategy.data.loader import Windows
from zero_strategy.data.module import split

SEQ_LEN = 4


class Numbers:
    """Token i of a document is i, so a row says which one it is."""

    vocab_size = 1000

    def encode(self, text):
        return np.arange(len(text), dtype=np.uint16)


class Records(pl.LightningModule):
    """Remembers the rows it was trained on."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.rows, self.val_rows = [], []

    def training_step(self, batch, _):
        assert batch.shape[1] == SEQ_LEN + 1
        self.rows.append((batch[:, 0] // SEQ_LEN).tolist())
        return self.weight.square().sum()

    def validation_step(self, batch, _):
        self.val_rows.append((batch[:, 0] // SEQ_LEN).tolist())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveEachStep(pl.Callback):
    """Saves where ModelCheckpoint does."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, *_):
        trainer.save_checkpoint(self.folder / f"step={trainer.global_step}.ckpt")


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "numbers.tok"
    write_token_file(path, ["x" * 203], Numbers())  # 45 rows to train on, 4 to validate
    return path


def fit(corpus, *, max_steps, batch_size=4, ckpt_path=None, data=None, **options):
    module = Records()
    data = data or TokenDataModule(
        corpus,
        seq_len=SEQ_LEN,
        batch_size=batch_size,
        seed=3,
        num_workers=options.pop("workers", 0),
    )
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "check_val_every_n_epoch": None,
        "val_check_interval": 7,
    }
    trainer = pl.Trainer(max_steps=max_steps, max_epochs=-1, **(defaults | options))
    trainer.fit(module, data, ckpt_path=ckpt_path, weights_only=False)
    return module, trainer, data


def flat(rows):
    return [row for batch in rows for row in batch]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
class TestResume:
    def saved(self, corpus, tmp_path, steps, **options):
        saver = SaveEachStep(tmp_path)
        module, *_ = fit(corpus, max_steps=steps, callbacks=[saver], **options)
        return module.rows

    # 11 batches a pass: within the first and second pass, beside a validation (every 7), at the end
    @pytest.mark.parametrize("step", [1, 5, 7, 10, 11, 12, 14, 22, 25])
    def test_rows_after_a_resume_equal_the_uninterrupted_run(self, corpus, tmp_path, step):
        whole, *_ = fit(corpus, max_steps=30)
        first = self.saved(corpus, tmp_path, step)
        rest, *_ = fit(corpus, max_steps=30, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert first + rest.rows == whole.rows

    @pytest.mark.parametrize("batch_size", [1, 2, 8, 12])
    def test_rows_stay_in_order_at_another_global_batch(self, corpus, tmp_path, batch_size):
        whole, *_ = fit(corpus, max_steps=60)
        first = self.saved(corpus, tmp_path, 6)
        steps = 6 + 120 // batch_size
        rest, *_ = fit(
            corpus,
            max_steps=steps,
            batch_size=batch_size,
            val_check_interval=3,
            ckpt_path=tmp_path / "step=6.ckpt",
        )
        assert flat(first) + flat(rest.rows) == flat(whole.rows)[: 24 + 120]

    def test_accumulated_micro_batches_resume_at_the_next_one(self, corpus, tmp_path):
        whole, *_ = fit(corpus, max_steps=10, accumulate_grad_batches=3)
        first = self.saved(corpus, tmp_path, 4, accumulate_grad_batches=3)
        rest, *_ = fit(
            corpus,
            max_steps=10,
            accumulate_grad_batches=3,
            ckpt_path=tmp_path / "step=4.ckpt",
        )
        assert first + rest.rows == whole.rows

    def test_a_state_saved_after_fit_keeps_the_position(self, corpus, tmp_path):
        whole, *_ = fit(corpus, max_steps=30)
        first, trainer, _ = fit(corpus, max_steps=9)
        trainer.save_checkpoint(tmp_path / "late.ckpt")
        rest, *_ = fit(corpus, max_steps=30, ckpt_path=tmp_path / "late.ckpt")
        assert first.rows + rest.rows == whole.rows

    def test_worker_processes_change_neither_order_nor_position(self, corpus, tmp_path):
        whole, *_ = fit(corpus, max_steps=15)
        first = self.saved(corpus, tmp_path, 5, workers=2)
        rest, *_ = fit(corpus, max_steps=15, workers=2, ckpt_path=tmp_path / "step=5.ckpt")
        assert first + rest.rows == whole.rows

    def test_limited_passes_go_on_instead_of_repeating(self, corpus):
        module, *_ = fit(corpus, max_steps=11, limit_train_batches=2, val_check_interval=None)
        assert len(set(flat(module.rows))) == 44

    def test_a_second_fit_starts_the_order_anew(self, corpus):
        first, _, data = fit(corpus, max_steps=5)
        second, *_ = fit(corpus, max_steps=5, data=data)
        assert first.rows == second.rows

    def test_other_data_is_refused_at_resume(self, corpus, tmp_path):
        self.saved(corpus, tmp_path, 2)
        other = TokenDataModule(corpus, seq_len=SEQ_LEN, batch_size=4, seed=4)
        with pytest.raises(ValueError, match=r"checkpoint\.data\.seed = 3: must be 4"):
            fit(corpus, max_steps=4, data=other, ckpt_path=tmp_path / "step=2.ckpt")

    def test_validation_sees_the_end_of_the_corpus_in_order(self, corpus):
        module, *_ = fit(corpus, max_steps=7, num_sanity_val_steps=0)
        assert flat(module.val_rows) == [45, 46, 47, 48]


def test_rows_overlap_by_the_one_token_that_is_only_an_input():
    rows = Windows(np.arange(12, dtype=np.uint16), 3)
    assert [row.tolist() for row in (rows[i] for i in range(len(rows)))] == [
        [0, 1, 2, 3],
        [3, 4, 5, 6],
        [6, 7, 8, 9],
    ]
    assert rows[0].dtype == torch.int64


@pytest.mark.parametrize(("length", "expected"), [(0, 0), (1, 0), (3, 0), (4, 1), (7, 2)])
def test_row_count_never_reaches_past_the_end(length, expected):
    assert len(Windows(np.zeros(length, np.uint16), 3)) == expected


def test_split_never_cuts_a_document_in_two():
    tokens = TokenFile.from_documents(["a" * 9, "b" * 29, "c" * 9, "d" * 4], ByteTokenizer())
    train, val = split(tokens, 0.2)
    assert ByteTokenizer().decode(train) == "a" * 9 + "b" * 29
    assert ByteTokenizer().decode(val) == "c" * 9 + "d" * 4


def test_split_of_one_document_leaves_its_end_for_validation():
    tokens = TokenFile.from_documents(["abcdefghi"], ByteTokenizer())
    train, val = split(tokens, 0.3)
    assert (len(train), ByteTokenizer().decode(val)) == (7, "ghi")


def test_builtin_corpus_needs_no_file():
    data = TokenDataModule("builtin", seq_len=64, batch_size=2)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch.shape == (2, 65)
    assert data.tokens.num_bytes == len(data.tokens.ids) - 1


def test_too_long_rows_and_too_large_batches_are_refused(corpus):
    with pytest.raises(ValueError, match=r"data\.seq_len = 40: must be shorter than the val"):
        TokenDataModule(corpus, seq_len=40, batch_size=1).setup("fit")
    with pytest.raises(ValueError, match=r"data\.batch_size = 46: must leave .* at most 45\."):
        TokenDataModule(corpus, seq_len=SEQ_LEN, batch_size=46).setup("fit")


def test_an_unknown_corpus_is_refused_with_the_names(tmp_path):
    with pytest.raises(ValueError, match=r"data\.corpus = 'bultin': must be builtin, stdlib or"):
        TokenDataModule("bultin", seq_len=4, batch_size=1).setup("fit")
