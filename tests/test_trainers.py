"""Real runs in the trainers people use: Hugging Face Trainer, PEFT, Lightning, accelerate, torchtitan's protocol."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import accelerate
import lightning
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import Trainer, TrainerCallback, TrainingArguments

import gnmr_fx
from gnmr_fx.errors import (
    AlreadyInstrumentedError,
    BudgetError,
    ConfigError,
    GnmrWarning,
    MissingStateError,
    StateMismatchError,
    UnknownRecipeError,
)
from gnmr_fx.integrations import hf
from gnmr_fx.integrations.jsonl import read_log
from gnmr_fx.integrations.lightning import GnmrCallback as LightningCallback
from gnmr_fx.integrations.torchtitan import GnmrConverter
from tests.loops import CONFIG, chain, noisy, readable_kernels
from tests.models import VOCAB, llama, lora
from tests.test_integrations import read_tensorboard
from tests.test_resume import differing

STEPS, SAVED_AT = 8, 4
OPTIONS: dict[str, Any] = {"recipe": "saved-int2-int8", "max_active": 2, "config": CONFIG}


@pytest.fixture(autouse=True, scope="module")
def _readable_kernels() -> Any:
    with readable_kernels():
        yield


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random sequences that can be learned by heart."""

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, VOCAB, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class Net(nn.Module):
    """A model that the Trainer takes, of which nothing is captured: instrumented in milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.out = nn.Embedding(VOCAB, 32), chain(3, 32), nn.Linear(32, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.out(self.layers(self.embed(input_ids)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def model() -> nn.Module:
    torch.manual_seed(0)
    return llama(layers=1).model


def is_bare(module: nn.Module) -> bool:
    return not any("gnmr" in name or name == "forward" for m in module.modules() for name in vars(m))


# Hugging Face Trainer ------------------------------------------------------------------------------------------------


def trainer_of(folder: Path, callbacks: list[Any], module: nn.Module | None = None, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        **{
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "save_steps": SAVED_AT,
            "logging_steps": 2,
            "use_cpu": True,
            "disable_tqdm": True,
            "report_to": "none",
            **options,
        },
    )
    return Trainer(model() if module is None else module, arguments, train_dataset=Tokens(), callbacks=callbacks)


def test_trainer_logs_saves_and_resumes_exactly(tmp_path, capsys):
    whole = tmp_path / "whole"
    callback = hf.GnmrCallback(**OPTIONS, jsonl=whole / "gnmr.jsonl", tensorboard=whole / "tb")
    trainer = trainer_of(whole, [callback])
    trainer.train()
    controller = callback.controller
    assert controller is gnmr_fx.controller(trainer.model)
    assert controller.step_count == STEPS  # one per optimizer step, of two micro-batches each
    assert controller.stats["switches"]
    end = [trainer.model.state_dict(), trainer.optimizer.state_dict(), controller.state_dict()]

    log = read_log(whole / "gnmr.jsonl")
    assert log.report() == gnmr_fx.report(trainer.model)
    logged = {line["step"]: line for line in trainer.state.log_history if "loss" in line}
    assert sorted(logged) == [2, 4, 6, 8]
    for line in log.steps[1::2]:
        for name in ("active_units", "budget_use", "highest_gnmr", "bytes_saved", "bytes_recovered"):
            assert logged[line["step"]][f"gnmr_fx/{name}"] == line[name]
    assert "gnmr_fx/active_units" in capsys.readouterr().out  # what the Trainer prints has them as well
    events = read_tensorboard(whole / "tb").Scalars("gnmr_fx/active_units")
    assert [(event.step, event.value) for event in events] == [
        (line["step"], line["active_units"]) for line in log.steps
    ]

    resumed = tmp_path / "resumed"
    shutil.copytree(whole / f"checkpoint-{SAVED_AT}", resumed / f"checkpoint-{SAVED_AT}")
    shutil.copy(whole / "gnmr.jsonl", resumed / "gnmr.jsonl")
    torch.manual_seed(1)  # the checkpoint brings all there is
    again = trainer_of(resumed, [hf.GnmrCallback(**OPTIONS, jsonl=resumed / "gnmr.jsonl")])
    again.train(resume_from_checkpoint=True)
    now = [again.model.state_dict(), again.optimizer.state_dict(), gnmr_fx.controller(again.model).state_dict()]
    assert differing(now, end) == []
    lines = [read_log(folder / "gnmr.jsonl").steps for folder in (whole, resumed)]
    assert [[line["active"], line["events"]] for line in lines[0]] == [[x["active"], x["events"]] for x in lines[1]]


def test_a_lost_controller_state_is_an_error_or_a_new_start(tmp_path):
    trainer_of(tmp_path, [hf.GnmrCallback(**OPTIONS)], Net(), max_steps=SAVED_AT).train()
    checkpoint = tmp_path / f"checkpoint-{SAVED_AT}"

    def resume(**options: Any) -> Trainer:
        trainer = trainer_of(tmp_path, [hf.GnmrCallback(**{**OPTIONS, **options})], Net(), max_steps=SAVED_AT + 1)
        trainer.train(resume_from_checkpoint=True)
        return trainer

    with pytest.raises(StateMismatchError, match="of this model's 3 units"):
        resume(exclude=["out"])
    (checkpoint / hf.STATE_FILE).write_bytes(b"no such thing")
    with pytest.raises(StateMismatchError, match="does not load"):
        resume()
    (checkpoint / hf.STATE_FILE).unlink()
    with pytest.raises(MissingStateError, match=hf.STATE_FILE):
        resume()
    assert gnmr_fx.controller(resume(missing_state="start").model).step_count == 1


def test_a_checkpoint_elsewhere_has_to_be_named(tmp_path):
    trainer_of(tmp_path / "old", [hf.GnmrCallback(**OPTIONS)], Net(), max_steps=SAVED_AT).train()
    checkpoint = tmp_path / "old" / f"checkpoint-{SAVED_AT}"
    # Another run's checkpoint of that step is not taken for the one that is resumed from.
    trainer_of(tmp_path / "new", [hf.GnmrCallback(**OPTIONS)], Net(), max_steps=SAVED_AT, learning_rate=1e-3).train()
    options = {"max_steps": SAVED_AT + 1}
    trainer = trainer_of(tmp_path / "new", [hf.GnmrCallback(**OPTIONS)], Net(), **options)
    with pytest.raises(MissingStateError, match="resume_from="):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    for given in ({"resume_from_checkpoint": str(checkpoint)}, {}):
        callback = hf.GnmrCallback(**OPTIONS, resume_from=None if given else checkpoint)
        trainer = trainer_of(tmp_path / "new", [callback], Net(), **options, **given)
        trainer.train(resume_from_checkpoint=str(checkpoint))
        assert callback.controller.step_count == SAVED_AT + 1


class Tracker(TrainerCallback):
    """Stands for wandb: a callback of ``report_to``, which the Trainer calls before those of the user."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen.append(dict(logs))


def test_attached_it_comes_before_the_trackers(tmp_path):
    tracker = Tracker()
    trainer = trainer_of(tmp_path, [tracker], Net(), max_steps=2)
    callback = hf.GnmrCallback(**OPTIONS).attach(trainer)
    trainer.train()
    assert tracker.seen[0]["gnmr_fx/budget"] == 2
    assert trainer.callback_handler.callbacks[0] is callback


def test_behind_the_trackers_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    trainer = trainer_of(tmp_path, [hf.GnmrCallback(**OPTIONS)], Net(), max_steps=1, report_to="tensorboard")
    with pytest.warns(GnmrWarning, match="attach"):
        trainer.train()


def test_the_trainers_own_tensorboard_gets_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    trainer = trainer_of(tmp_path, [], Net(), max_steps=2, report_to="tensorboard")
    hf.GnmrCallback(**OPTIONS).attach(trainer)
    trainer.train()
    found = read_tensorboard(tmp_path / "tb")
    assert [event.value for event in found.Scalars("train/gnmr_fx/budget")] == [2]


@pytest.mark.parametrize(
    "options",
    [
        {"torch_compile": True, "torch_compile_backend": "aot_eager"},
        {"bf16": True},
        {"activation_checkpointing": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_whatever_the_trainer_does_to_the_model(tmp_path, options):
    callback = hf.GnmrCallback(**OPTIONS, uninstrument=True, jsonl=tmp_path / "gnmr.jsonl")
    trainer = trainer_of(tmp_path, [callback], max_steps=6, save_strategy="no", **options)
    trainer.train()
    log = read_log(tmp_path / "gnmr.jsonl")
    assert len(log.steps) == 6
    assert log.report().stats["recovered"]
    assert all(line["bytes_saved"] > 0 for line in log.steps)
    assert all(getattr(m, "_gnmr_controller", None) is None for m in trainer.model.modules())


@pytest.mark.slow
def test_everything_stored_under_the_trainers_torch_compile(tmp_path):
    """By Inductor's partitioner; and accelerate wraps the model before the callback instruments it."""
    scope = gnmr_fx.AllSaved(min_bytes=64)
    callback = hf.GnmrCallback(**OPTIONS, scope=scope, jsonl=tmp_path / "gnmr.jsonl")
    options = {"torch_compile": True, "torch_compile_backend": "inductor", "gradient_accumulation_steps": 1}
    trainer = trainer_of(tmp_path, [callback], max_steps=6, save_strategy="no", **options)
    trainer.train()
    rows = gnmr_fx.table(trainer.model).units
    assert {activation["role"] for row in rows for activation in row.activations} >= {"query", "key", "output"}
    assert not any("stored here" in note for row in rows for note in row.notes)
    assert read_log(tmp_path / "gnmr.jsonl").report().stats["recovered"]


def test_an_instrumented_model_is_used_as_it_is(tmp_path):
    module = gnmr_fx.instrument(Net(), "saved-int4-int8", max_active=1, config=CONFIG)
    callback = hf.GnmrCallback(**OPTIONS, uninstrument=True)
    trainer_of(tmp_path, [callback], module, max_steps=2, save_strategy="no").train()
    assert gnmr_fx.controller(module).recipe is gnmr_fx.RECIPES["saved-int4-int8"]
    assert gnmr_fx.controller(module).step_count == 2
    trainer_of(tmp_path, [callback], module, max_steps=2, save_strategy="no").train()
    assert gnmr_fx.controller(module).step_count == 4


def test_peft_in_the_trainer(tmp_path):
    torch.manual_seed(0)
    module = lora().model
    callback = hf.GnmrCallback(**OPTIONS, jsonl=tmp_path / "gnmr.jsonl")
    trainer_of(tmp_path, [callback], module).train()
    names = {unit.name for unit in callback.controller.units if unit.trainable}
    assert len(names) == 4
    assert all("lora_" in name for name in names)
    report = read_log(tmp_path / "gnmr.jsonl").report()
    assert report.steps == STEPS
    assert {event.unit for event in report.events} <= names
    assert report.events
    torch.manual_seed(0)
    again = hf.GnmrCallback(**OPTIONS)
    shutil.rmtree(tmp_path / f"checkpoint-{STEPS}")
    resumed = trainer_of(tmp_path, [again], lora().model)
    resumed.train(resume_from_checkpoint=True)
    assert differing(again.controller.state_dict(), callback.controller.state_dict()) == []
    assert differing(resumed.model.state_dict(), module.state_dict()) == []


@pytest.mark.parametrize("make", [hf.GnmrCallback, LightningCallback])
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"recipe": "int5"}, UnknownRecipeError),
        ({"max_active": -1}, BudgetError),
        ({"scope": "everything"}, ConfigError),
        ({"config": {"alpha": 3}}, ConfigError),
        ({"missing_state": "ignore"}, ConfigError),
    ],
)
def test_bad_options_are_refused_at_once(make, options, error):
    with pytest.raises(error):
        make(**options)


# Lightning -----------------------------------------------------------------------------------------------------------


class Lit(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = model()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(
    folder: Path, callback: LightningCallback, module: Lit, ckpt: Path | None = None, epochs: int = 2, steps: int = -1
) -> Any:
    from lightning.pytorch.callbacks import ModelCheckpoint

    torch.manual_seed(0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        max_steps=steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=CSVLogger(folder, name="", version=""),
        callbacks=[callback, ModelCheckpoint(folder, "{step}", every_n_epochs=1, save_top_k=-1)],
    )
    half = Subset(
        Tokens(), range(4 * SAVED_AT)
    )  # Lightning resumes at the start of an epoch, as this loader has no state
    trainer.fit(module, DataLoader(half, batch_size=2), ckpt_path=ckpt)
    return trainer


def test_lightning_logs_saves_and_resumes_exactly(tmp_path):
    callback = LightningCallback(
        **OPTIONS, submodule="model", jsonl=tmp_path / "gnmr.jsonl", tensorboard=tmp_path / "tb"
    )
    module = Lit()
    fit(tmp_path, callback, module)
    controller = gnmr_fx.controller(module.model)
    assert controller is callback.controller
    assert controller.step_count == STEPS
    assert controller.stats["switches"]
    assert any(row.shares_input_with for row in gnmr_fx.table(module.model).units)
    log = read_log(tmp_path / "gnmr.jsonl")
    assert log.report() == gnmr_fx.report(module.model)
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("gnmr_fx/active_units")
    assert [float(row.split(",")[column]) for row in rows[1:]] == [line["active_units"] for line in log.steps]
    assert len(read_tensorboard(tmp_path / "tb").Scalars("gnmr_fx/highest_gnmr")) == STEPS

    again, resumed = LightningCallback(**OPTIONS, submodule="model"), Lit()
    fit(tmp_path / "resumed", again, resumed, tmp_path / f"step={SAVED_AT}.ckpt")
    assert differing(again.controller.state_dict(), controller.state_dict()) == []
    assert differing(resumed.state_dict(), module.state_dict()) == []


def test_lightning_without_a_state_in_the_checkpoint(tmp_path):
    fit(tmp_path, LightningCallback(**OPTIONS), Lit(), epochs=1)
    at = tmp_path / f"step={SAVED_AT}.ckpt"
    with pytest.raises(StateMismatchError):
        fit(tmp_path / "b", LightningCallback(**OPTIONS, submodule="model", exclude=["*.up_proj"]), Lit(), at)
    saved = torch.load(at, weights_only=True)
    assert saved["callbacks"].pop("GnmrCallback")["controller"]["units"]
    torch.save(saved, at)
    with pytest.raises(MissingStateError, match="missing_state='start'"):
        fit(tmp_path / "c", LightningCallback(**OPTIONS), Lit(), at)
    callback = LightningCallback(**OPTIONS, missing_state="start")
    fit(tmp_path / "d", callback, Lit(), at, epochs=2)
    assert callback.controller.step_count == SAVED_AT


def test_lightning_uninstruments_if_asked_and_knows_its_submodules(tmp_path):
    module = Lit()
    fit(tmp_path, LightningCallback(**OPTIONS, uninstrument=True), module, steps=1)
    assert is_bare(module.model)
    with pytest.raises(ConfigError, match="submodule"):
        fit(tmp_path / "b", LightningCallback(submodule="nothing"), module, steps=1)
    gnmr_fx.instrument(module.model.model.layers, config=CONFIG)
    callback = LightningCallback(**OPTIONS)
    fit(tmp_path / "c", callback, module, steps=1)
    assert callback.controller is gnmr_fx.controller(module.model.model.layers)


def test_two_instrumented_parts_are_one_too_many(tmp_path):
    both = nn.ModuleList([gnmr_fx.instrument(chain()), gnmr_fx.instrument(chain())])
    with pytest.raises(AlreadyInstrumentedError, match="found 2"):
        hf.Setup().apply(both)


# accelerate: nothing needed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["instrument first", "prepare first"])
def test_accelerate_needs_nothing(order):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    module = model()
    if order == "instrument first":
        gnmr_fx.instrument(module, OPTIONS["recipe"], max_active=2, config=CONFIG)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    prepared, optimizer, data = accelerator.prepare(module, optimizer, DataLoader(Tokens(), batch_size=2))
    if order == "prepare first":
        gnmr_fx.instrument(prepared, OPTIONS["recipe"], max_active=2, config=CONFIG)
    for batch in data:
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    controller = gnmr_fx.controller(accelerator.unwrap_model(prepared))
    assert controller.step_count == len(data) // 2 == STEPS
    assert controller.stats["switches"]


def test_accelerates_checkpoints_take_the_controller(tmp_path):
    """``register_for_checkpointing``, since the controller has ``state_dict`` and ``load_state_dict``."""

    def run(steps: int, resume: bool = False) -> Any:
        accelerator = accelerate.Accelerator(cpu=True)
        module = gnmr_fx.instrument(model(), OPTIONS["recipe"], max_active=2, config=CONFIG)
        module, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
        accelerator.register_for_checkpointing(gnmr_fx.controller(module))
        start = 0
        if resume:
            accelerator.load_state(str(tmp_path))
            start = gnmr_fx.controller(module).step_count
        data = list(DataLoader(Tokens(), batch_size=2))
        for step in range(start, steps):
            accelerator.backward(module(**data[step]).loss)
            optimizer.step()
            optimizer.zero_grad()
            if not resume and step + 1 == SAVED_AT:
                accelerator.save_state(str(tmp_path))
        return module.state_dict(), gnmr_fx.controller(module).state_dict()

    assert differing(run(STEPS, resume=False), run(STEPS, resume=True)) == []


# torchtitan: its protocol, as torchtitan/protocols/model_converter.py has it ------------------------------------------


class OptimizersContainer(torch.optim.Optimizer):
    """An optimizer of optimizers, whose hooks run after theirs: as in torchtitan/components/optimizer.py."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([p for o in optimizers for group in o.param_groups for p in group["params"]], {})

    def step(self) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def test_torchtitans_protocol(tmp_path):
    config = GnmrConverter.Config(**OPTIONS, jsonl=tmp_path / "gnmr.jsonl")
    converter = config.build(parallel_dims=None, model_compile_enabled=False)
    assert converter.key_filter() is converter.state_dict_transform() is converter.format_adapter() is None
    with pytest.raises(ConfigError, match="before convert"):
        _ = converter.controller
    with torch.device("meta"):
        module = chain(4)
    assert converter.convert(module) is None
    module.to_empty(device="cpu")
    torch.manual_seed(0)
    for layer in module:
        layer.reset_parameters()
    optimizer = OptimizersContainer([torch.optim.AdamW(module.parameters(), lr=1e-3)])
    optimizer.register_step_post_hook(
        lambda *_: converter.post_optimizer_hook([module])
    )  # as torchtitan's trainer does
    for x in noisy(12):
        module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    log = read_log(tmp_path / "gnmr.jsonl")
    assert [line["step"] for line in log.steps] == list(range(1, 13))
    assert log.report() == gnmr_fx.report(module)
    assert converter.controller.stats["switches"]
    with pytest.raises(ConfigError, match="pipeline"):
        converter.post_optimizer_hook([chain()])


def test_torchtitans_pipelines_are_refused():
    class Dims:
        pp_enabled = True

    with pytest.raises(ConfigError, match="pipeline"):
        GnmrConverter.Config().build(parallel_dims=Dims(), model_compile_enabled=True)
