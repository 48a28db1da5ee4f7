"""The Trainer of transformers, with peft."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import expanded_nn as enn
from by_hand import LIMIT, LR, assert_same_updates, assert_same_weights, by_hand
from oracle import Call
from processes import run_scenarios, torchrun

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")
import transformers as hf
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments

pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing.*is deprecated:FutureWarning")
SAMPLES, POSITIONS, WORDS = 8, 5, 17


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config).double()


def words() -> list[dict[str, Tensor]]:
    """Texts, the first words of some without labels, and a column that the model does not take."""
    ids = torch.randint(3, WORDS, (SAMPLES, POSITIONS), generator=torch.Generator().manual_seed(0))
    labels = ids.where(torch.arange(POSITIONS) >= (torch.arange(SAMPLES) % 3).unsqueeze(1), -100)
    return [{"input_ids": ids[i], "labels": labels[i], "index": torch.tensor(i)} for i in range(SAMPLES)]


def own_losses(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The sum of the samples' own losses, each the mean over the sample's own words."""
    losses = F.cross_entropy(outputs.logits[:, :-1].mT, labels[:, 1:], reduction="none")
    return (losses.sum(1) / (labels[:, 1:] != -100).sum(1)).sum()


class ClippingTrainer(Trainer):
    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        enn.clip_grad_sample_norms_(model, LIMIT)
        return loss


class AddUp(TrainerCallback):
    """The clipped sums of all processes, which DistributedDataParallel has not seen."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)


def arguments(path: Path, **settings: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(path), per_device_train_batch_size=2, num_train_epochs=1, report_to="none", use_cpu=True,
        train_sampling_strategy="sequential", max_grad_norm=0, disable_tqdm=True,
        lr_scheduler_type="constant", average_tokens_across_devices=False, **{"save_strategy": "no", **settings},
    )  # fmt: skip


def trainer(model: nn.Module, path: Path, kind: type[Trainer] = ClippingTrainer, **settings: Any) -> Trainer:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    return kind(
        model,
        arguments(path, **settings),
        train_dataset=words(),
        eval_dataset=words(),
        compute_loss_func=own_losses,
        optimizers=(optimizer, None),
    )


def objective(model: Any, call: Call, first: int = 0) -> Tensor:
    return own_losses(model(call.kwargs["input_ids"]), call.kwargs["labels"])


def steps(batches_a_step: int = 1) -> list[list[Call]]:
    data = words()
    batches = [
        Call((), {name: torch.stack([sample[name] for sample in data[i : i + 2]]) for name in ("input_ids", "labels")})
        for i in range(0, SAMPLES, 2)
    ]
    return [batches[i : i + batches_a_step] for i in range(0, len(batches), batches_a_step)]


def test_training(tmp_path: Path) -> None:
    plain = llama()
    model = enn.convert(plain).per_sample(loss_reduction="sum", accumulate_grad=False)
    trainer(model, tmp_path).train()
    assert_same_weights(model, by_hand(plain, steps(), objective))


def converted(plain: nn.Module) -> nn.Module:
    return enn.convert(plain).per_sample(loss_reduction="sum", accumulate_grad=False)


def test_accumulation(tmp_path: Path) -> None:
    plain = llama()
    model = converted(plain)
    trainer(model, tmp_path, gradient_accumulation_steps=2).train()
    assert_same_weights(model, by_hand(plain, steps(2), objective))


DRAWN: list[list[int]] = [[0, 3], [], [1, 2, 4], [5], []]


class PoissonTrainer(ClippingTrainer):
    """Batches of any size, as Poisson sampling draws them; the model does not run on an empty one."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        collate = self.data_collator
        return DataLoader(words(), batch_sampler=DRAWN, collate_fn=lambda texts: collate(texts) if texts else {})

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if inputs:
            return super().training_step(model, inputs, num_items_in_batch)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return torch.zeros(())


def test_batches_of_poisson_sampling(tmp_path: Path) -> None:
    plain = llama()
    model = converted(plain)
    client = trainer(model, tmp_path, PoissonTrainer)
    client.train()
    assert client.state.global_step == len(DRAWN)  # each takes its step, for the noise's sake
    data = words()
    drawn = [
        [Call((), {name: torch.stack([data[i][name] for i in batch]) for name in ("input_ids", "labels")})]
        for batch in DRAWN
        if batch
    ]
    assert_same_weights(model, by_hand(plain, drawn, objective))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant: bool, tmp_path: Path) -> None:
    plain = llama()
    model = converted(plain)
    trainer(
        model, tmp_path, activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": use_reentrant}
    ).train()
    assert_same_weights(model, by_hand(plain, steps(), objective))


def test_evaluation(tmp_path: Path) -> None:
    plain = llama()
    expected = trainer(plain, tmp_path, Trainer).evaluate()["eval_loss"]
    for model in (enn.convert(plain), converted(plain)):
        client = trainer(model, tmp_path)
        assert client.evaluate()["eval_loss"] == expected
        assert client.predict(words()).predictions.shape == (SAMPLES, POSITIONS, WORDS)
    client = trainer(model, tmp_path, eval_strategy="steps", eval_steps=1)
    client.train()
    assert [log["step"] for log in client.state.log_history if "eval_loss" in log] == [1, 2, 3, 4]
    assert_same_weights(model, by_hand(plain, steps(), objective))


def test_save_and_resume(tmp_path: Path) -> None:
    plain = llama()
    model, resumed = converted(plain), converted(plain)
    trainer(model, tmp_path, save_strategy="steps", save_steps=2).train()
    trainer(resumed, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    expected = by_hand(plain, steps(), objective)
    assert_same_weights(model, expected)
    assert_same_weights(resumed, expected)
    assert_same_weights(type(plain).from_pretrained(tmp_path / "checkpoint-4", dtype=torch.float64), expected)


@pytest.mark.parametrize("order", ["peft first", "convert first"])
def test_lora(order: str, tmp_path: Path) -> None:
    settings = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "embed_tokens"], init_lora_weights=False)
    torch.manual_seed(1)
    plain = get_peft_model(llama(), settings).double()
    if order == "peft first":
        model = converted(plain)
    else:
        torch.manual_seed(1)
        model = converted(get_peft_model(enn.convert(llama()), settings).double())
    trainer(model, tmp_path).train()
    assert_same_weights(model, by_hand(plain, steps(), objective))


def test_with_the_mode_off(tmp_path: Path) -> None:
    plain = llama()
    model = enn.convert(plain)
    for module in (plain, model):
        trainer(module, tmp_path, Trainer).train()
    assert_same_weights(model, plain, 0)


def test_bf16(tmp_path: Path) -> None:
    plain = llama()
    model = converted(plain).float()
    trainer(model, tmp_path, bf16=True).train()
    assert_same_updates(model, by_hand(plain, steps(), objective), plain, 2e-2)


def two_processes(rank: int, world: int) -> None:
    for settings in ({}, {"gradient_accumulation_steps": 2}):
        plain = llama()
        model = converted(plain)
        client = trainer(model, Path(sys.argv[1]), **settings)
        client.add_callback(AddUp)
        client.train()
        assert isinstance(client.model_wrapped, DistributedDataParallel)
        assert_same_weights(
            model, by_hand(plain, steps(world * settings.get("gradient_accumulation_steps", 1)), objective)
        )


@pytest.mark.slow
def test_in_two_processes(tmp_path: Path) -> None:
    assert torchrun(__file__, 2, str(tmp_path)).count("passed two_processes") == 2


if __name__ == "__main__":
    run_scenarios([two_processes])
