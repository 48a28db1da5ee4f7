"""Other people's models, small and with random weights: whose rows are right, what is refused and why, what it costs.

`make zoos` runs one model for each model type of `transformers` that can be built from a shrunk config, and, where they
are installed, models of timm and diffusers. The rows of each are compared with a loop over the samples through the
plain model. A whole run writes benchmarks/zoos.json, and the tables that the documentation shows: a first backward
decides whether the rows are right, and the ratio is that of a step in eval mode, on one thread.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import expanded_nn as enn

RESULTS = Path(__file__).parent / "zoos.json"
PAGE = Path(__file__).parent / "results" / "zoos.md"
SAMPLES, POSITIONS, WORDS = 3, 5, 40
SECONDS = 120  # for each model
TOLERANCE = 1e-6
# what a config calls it -> what it becomes, the first pattern that fits the name
SIZES: tuple[tuple[str, Any], ...] = (
    (r"vocab_size|num_embeddings$", WORDS),
    (r"(pad|bos|cls|mask|sep|unk)_token_id|decoder_start_token_id", 1),
    (r"eos_token_id", 2),
    (r"(num_)?(attention_|encoder_attention_|decoder_attention_|self_|cross_)?(heads|n_head|n_heads|head)$", 2),
    (r"(num|n)_(kv|key_value)_heads|num_key_value_heads|n_head_kv|n_kv_head", 2),
    (r"num_conv_pos_embedding_groups", 2),
    (r"(num_|n_)?(hidden_|encoder_|decoder_)?(layers?|blocks|num_layers|n_layer)$|^depth$", 2),
    (r"(moe_|shared_expert_)?intermediate_(size|dim)|ffn_dim|d_ff|n_inner|mlp_dim|feedforward", 16),
    (r"head_dim|d_kv|d_head", 4),
    (r"^(hidden_size|d_model|n_embd|embed_dim|dim|hidden_dim|word_embed_proj_dim|projection_dim|embedding_size)$", 8),
    (r"(encoder|decoder|text|vision|out)_hidden_size|feature_size|hidden_sizes_dim", 8),
    (r"max_position_embeddings|n_positions|max_seq|seq_length|max_(source|target)_positions", 64),
    (r"image_size|img_size", 32),
    (r"num_(local_|routed_)?experts$|n_routed_experts", 4),
    (r"num_experts_per_tok|top_k|moe_k", 2),
    (r"drop(out|_path|_rate|_prob)?|.*_dropout(_rate|_prob)?|(attn|resid|embd|.*)_pdrop|layerdrop", 0.0),
)

LISTS: dict[str, Callable[[int], int]] = {
    **dict.fromkeys(("depths", "num_blocks", "depth"), lambda k: 1),
    **dict.fromkeys(("num_heads", "num_attention_heads"), lambda k: 2),
    **dict.fromkeys(("hidden_sizes", "embed_dim", "encoder_hidden_sizes"), lambda k: 8 * 2**k),
}


class Case(NamedTuple):
    """A model, plain and in float64, and the arguments of its forward for so many samples."""

    model: nn.Module
    inputs: dict[str, Tensor]


def shrunk(config: Any) -> Any:
    """The config with small sizes, and those within it."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            shrunk(value)
            continue
        if isinstance(value, list | tuple) and name in LISTS:
            setattr(config, name, [LISTS[name](k) for k in range(len(value))])
        fitting = [size for pattern, size in SIZES if re.search(pattern, name)]
        if fitting and isinstance(value, int | float) and not isinstance(value, bool) and value:
            try:
                setattr(config, name, min(value, fitting[0]))
            except Exception:  # a name that the class computes
                continue
    if isinstance(getattr(config, "layer_types", None), list):
        config.layer_types = config.layer_types[:2]
    config.use_cache, config._experts_implementation = False, "eager"  # another one knows no float64
    return config


def of_transformers(model_type: str) -> Case:
    auto: Any = import_module("transformers.models.auto.modeling_auto")
    config = shrunk(import_module("transformers").CONFIG_MAPPING[model_type]())
    heads = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION")
    tables = [getattr(auto, f"MODEL_FOR_{head}_MAPPING") for head in heads] + [auto.MODEL_MAPPING]
    model_class = next(table[type(config)] for table in tables if type(config) in table)
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    model = model_class(config)
    return Case(model, _inputs(model, config))


def _inputs(model: Any, config: Any) -> dict[str, Tensor]:
    words = torch.randint(3, WORDS, (SAMPLES, POSITIONS))
    texts = getattr(config, "text_config", config)
    size = getattr(getattr(config, "vision_config", config), "image_size", 32)
    height, width = (size, size) if isinstance(size, int) else size
    channels = getattr(getattr(config, "vision_config", config), "num_channels", 3)
    known = {
        "input_ids": words,
        "pixel_values": torch.randn(SAMPLES, channels, height, width),
        "input_values": torch.randn(SAMPLES, 2000),
        "input_features": torch.randn(SAMPLES, getattr(config, "num_mel_bins", 80), 128),
        "decoder_input_ids": words.flip(1),
    }
    inputs = {model.main_input_name: known[model.main_input_name]}
    takes = signature(model.forward).parameters
    if getattr(texts, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        inputs["decoder_input_ids"] = known["decoder_input_ids"]
    if "input_ids" in takes and "pixel_values" in takes and not hasattr(config, "vision_config"):
        inputs["input_ids"] = words
    elif hasattr(config, "text_config") and "input_ids" in takes and "pixel_values" in takes and "clip" in str(config):
        inputs |= {"input_ids": words, "pixel_values": known["pixel_values"]}
    return inputs


def of_timm(name: str) -> Case:
    timm = import_module("timm")
    model = timm.create_model(name, pretrained=False, num_classes=4)
    size = model.default_cfg.get("input_size", (3, 224, 224))
    return Case(model, {"x": torch.randn(SAMPLES, *size)})


DIFFUSERS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Tensor]]]] = {
    "UNet2DModel": (
        {"sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
        | {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        lambda: {"sample": torch.randn(SAMPLES, 3, 8, 8), "timestep": torch.arange(SAMPLES) * 7},
    ),
    "AutoencoderKL": (
        {"block_out_channels": (8,), "norm_num_groups": 4, "sample_size": 8},
        lambda: {"sample": torch.randn(SAMPLES, 3, 8, 8)},
    ),
}


def of_diffusers(name: str) -> Case:
    settings, inputs = DIFFUSERS[name]
    return Case(getattr(import_module("diffusers"), name)(**settings), inputs())


ZOOS: dict[str, Callable[[str], Case]] = {"transformers": of_transformers, "timm": of_timm, "diffusers": of_diffusers}


def names_of(zoo: str) -> list[str]:
    """The models of a zoo that is installed."""
    if find_spec(zoo) is None:
        return []
    if zoo == "transformers":
        return sorted(import_module("transformers").CONFIG_MAPPING)
    if zoo == "timm":
        timm = import_module("timm")
        smallest = {}
        for name in timm.list_models():
            smallest.setdefault(timm.model_entrypoint(name).__module__, name)
        return sorted(smallest.values())
    return list(DIFFUSERS)


def losses(output: Any) -> Tensor:  # (B,)
    """Each sample's own loss: nonlinear, of the first floating result that has one row a sample."""
    found = [each for each in _tensors(output) if each.is_floating_point() and each.dim() > 1 and each.requires_grad]
    result = found[0].double()
    coefficients = torch.linspace(-1, 1, result[0].numel(), dtype=torch.float64).view_as(result[0])
    return (coefficients * result.sin()).flatten(1).sum(1)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def judged(case: Case) -> dict[str, Any]:
    """What becomes of a model: `right`, `wrong`, `refused`, `fails`; `mixes` if no loop can run it."""
    model = case.model.double().eval()
    plain = deepcopy(model)  # which runs first, and may keep what cannot be copied
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in case.inputs.items()}
    batch = losses(plain(**inputs))
    if len(batch) != SAMPLES:
        return {"verdict": "unfit", "why": "no result with one row a sample"}
    named = {name: parameter for name, parameter in plain.named_parameters() if parameter.requires_grad}
    expected: dict[str, list[Tensor]] = {name: [] for name in named}
    for i in range(SAMPLES):
        loss = losses(plain(**{name: x[i : i + 1] for name, x in inputs.items()}))
        if len(loss) != 1 or abs(float(loss.detach() - batch[i].detach())) > 1e-6 * (1 + abs(float(loss.detach()))):
            return {"verdict": "unfit", "why": "a sample alone gives another result than in the batch"}
        grads = torch.autograd.grad(loss.sum(), list(named.values()), allow_unused=True, materialize_grads=True)
        for name, grad in zip(named, grads, strict=True):
            expected[name].append(grad)
    size = float(torch.cat([torch.stack(rows).flatten() for rows in expected.values()]).norm())
    if not 0 < size < float("inf"):
        return {"verdict": "unfit", "why": "its gradient is zero, or not finite"}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            model = enn.convert(model).per_sample(loss_reduction="sum")
            losses(model(**inputs)).sum().backward()
        except enn.PerSampleError as error:
            return {"verdict": "refused", "why": str(error)}
        except Exception as error:
            return {"verdict": "fails", "why": f"{type(error).__name__}: {error}"[:600]}
    slow = [str(each.message) for each in said if each.category.__name__ == "PerSampleWarning"]
    worst, where = 0.0, ""
    for name, parameter in model.named_parameters():
        if name not in named:
            continue
        rows = parameter.grad_sample
        rows = torch.zeros(SAMPLES, *parameter.shape).double() if rows is None else rows.detach()
        wanted = torch.stack(expected[name])
        error = float((rows - wanted).norm()) / max(float(wanted.norm()), 1e-3 * size)
        worst, where = max((worst, where), (error, name))
    if not worst < TOLERANCE:
        return {"verdict": "wrong", "why": f"{where}: {worst:.1e}"}
    ratio, milliseconds = _ratio(plain, model, inputs)
    return {
        "verdict": "right",
        "escalated": slow,
        "ratio": round(ratio, 2),
        "plain ms": round(milliseconds, 1),
        "parameters": sum(each.numel() for each in named.values()),
    }


def _ratio(plain: nn.Module, model: nn.Module, inputs: dict[str, Tensor]) -> tuple[float, float]:
    """The time of a step beside the plain one's, the least of some turns, and the plain one's."""
    least = [float("inf")] * 2
    for _ in range(5):
        for k, each in enumerate((plain, model)):
            each.zero_grad()
            start = time.perf_counter()
            losses(each(**inputs)).sum().backward()
            least[k] = min(least[k], time.perf_counter() - start)
    return least[1] / least[0], 1000 * least[0]


def _run(zoo: str, name: str, answer: Any) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    try:
        case = ZOOS[zoo](name)
        if sum(each.numel() for each in case.model.parameters()) > 30_000_000:
            answer.send({"verdict": "unfit", "why": "too large: the config was not shrunk"})
            return
        answer.send(judged(case))
    except Exception as error:
        answer.send({"verdict": "unfit", "why": f"{type(error).__name__}: {error}"[:300]})


def run(zoo: str, name: str) -> dict[str, Any]:
    """The verdict on one model, in a process of its own."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(zoo, name, there))
    process.start()
    there.close()
    try:
        verdict = here.recv() if here.poll(SECONDS) else {"verdict": "unfit", "why": f"takes over {SECONDS} s"}
    except EOFError:
        verdict = {"verdict": "unfit", "why": "its process has died"}
    process.kill()
    process.join()
    return {"zoo": zoo, "name": name, **verdict}


REASONS = {
    "a folded batch": "folded batch|other rows",
    "vmap cannot follow": "vmap cannot follow",
    "a result without one row a sample": "for one sample its forward returns",
    "an index without a batch dimension": "index|no batch dimension",
    "another result on the batch": "on the whole batch its forward gives another result",
    "a shared result taken apart": "shared by all|has one row, but was computed",
    "used outside of its module": "outside of its module",
    "keeps tensors": "keeps tensors|writes what belongs",
}


def reason(why: str) -> str:
    return next((reason for reason, pattern in REASONS.items() if re.search(pattern, why)), "something else")


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """The counts, as Markdown."""
    lines = ["| zoo | run | right | of these sample by sample | refused | fails | wrong | median ratio |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for zoo in dict.fromkeys(row["zoo"] for row in rows):
        fit = [row for row in rows if row["zoo"] == zoo and row["verdict"] != "unfit"]
        count = Counter(row["verdict"] for row in fit)
        ratios = [row["ratio"] for row in fit if "ratio" in row]
        median = f"{statistics.median(ratios):.2f}" if ratios else ""
        escalated = sum(bool(row.get("escalated")) for row in fit)
        lines.append(
            f"| {zoo} | {len(fit)} | {count['right']} | {escalated} | {count['refused']} | {count['fails']} | "
            f"{count['wrong']} | {median} |"
        )
    refused = Counter(reason(row["why"]) for row in rows if row["verdict"] in ("refused", "fails"))
    lines += ["", *(f"- {why}: {number}" for why, number in refused.most_common())]
    return "\n".join(lines)


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The counts, and a line for each model, as Markdown."""
    lines = [
        "# Other people's models",
        "",
        "Small models with random weights, one for a model type, unedited: whose rows agree with a loop over the "
        "samples, what is refused and why, and the time of a step as a multiple of the plain one's. In models this "
        "small that is mostly Python; real ones come closer to 1. Measured by `make zoos`.",
        "",
        summary(rows),
        "",
        "| model | rows | step | goes sample by sample, or why not |",
        "|---|---|---:|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["zoo"], row["name"])):
        if row["verdict"] != "unfit":
            said = row.get("why") or " ".join(each.partition(": runs sample by sample")[0] for each in row["escalated"])
            ratio = f"{row['ratio']:.1f}" if "ratio" in row else ""
            said = said.replace("|", "/").replace("\n", " ")
            said = f"`{said[:157]}…`" if len(said) > 160 else f"`{said}`" if said else ""
            lines.append(f"| {row['name']} | {row['verdict']} | {ratio} | {said} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoos", description=__doc__)
    parser.add_argument("names", nargs="*", help="models, all by default; a part of the run only prints")
    parser.add_argument("--zoo", choices=ZOOS, action="append", help="these zoos only")
    parser.add_argument("--out", type=Path, default=None, help="another file for the results, model by model")
    options = parser.parse_args()
    rows = []
    for zoo in options.zoo or ZOOS:
        names = names_of(zoo)
        if names:
            import_module(zoo)
        for name in options.names or names:
            row = run(zoo, name)
            rows.append(row)
            told = row.get("why") or f"ratio {row['ratio']}, {len(row['escalated'])} warnings"
            print(f"{zoo} {name}: {row['verdict']}; {told}", flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(summary(rows))
    if not (options.names or options.zoo):
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
