"""Other people's models, small and with random weights: whose rows are right, what is refused and why, what it costs.

`make zoos` runs one model for each model type of `transformers` that can be built from a shrunk config, and, where they
are installed, the smallest model of each file of timm and torchvision, and some of diffusers and MONAI. The rows of
each are compared with a loop over the samples through the plain model, at a small size and in float64. The ratio is
that of a step in eval mode, on one thread, in float32, where `transformers` has a larger size: there Python is not all
the cost. Where the ratio is above 1.6 even so, these models are timed at a third size, too, which is nearer to that of
real ones. A whole run writes benchmarks/zoos.json, and the tables that the documentation shows.
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
from contextlib import suppress
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, signature
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import expanded_nn as enn

RESULTS = Path(__file__).parent / "zoos.json"
PAGE = Path(__file__).parent / "results" / "zoos.md"
SECONDS = 120  # for each model
TOLERANCE = 1e-6
LONG = 20  # ms of a plain step: what is shorter is mostly Python
SLOW = 1.6  # plain steps: what takes more is timed at a larger size, too


class Size(NamedTuple):
    """How large a model is, and its batch."""

    samples: int = 3
    positions: int = 5
    words: int = 40
    width: int = 8
    image: int = 32
    sound: int = 2000


SMALL, LARGE, WIDE = Size(), Size(8, 64, 500, 64, 64, 8000), Size(8, 128, 500, 256, 64, 8000)


def sizes(size: Size) -> tuple[tuple[str, Any], ...]:
    """What a config calls it -> what it becomes, the first pattern that fits the name."""
    width = size.width
    return (
        (r"vocab_size|num_embeddings$", size.words),
        (r"(pad|bos|cls|mask|sep|unk)_token_id|decoder_start_token_id", 1),
        (r"eos_token_id", 2),
        (r"(num_)?(attention_|encoder_attention_|decoder_attention_|self_|cross_)?(heads|n_head|n_heads|head)$", 2),
        (r"(num|n)_(kv|key_value)_heads|num_key_value_heads|n_head_kv|n_kv_head", 2),
        (r"num_conv_pos_embedding_groups", 2),
        (r"(num_|n_)?(hidden_|encoder_|decoder_)?(layers?|blocks|num_layers|n_layer)$|^depth$", 2),
        (r"(moe_|shared_expert_)?intermediate_(size|dim)|ffn_dim|d_ff|n_inner|mlp_dim|feedforward", 2 * width),
        (r"head_dim|d_kv|d_head", width // 2),
        (
            r"^(hidden_size|d_model|n_embd|embed_dim|dim|hidden_dim|word_embed_proj_dim|projection_dim|embedding_size)$",
            width,
        ),
        (r"(encoder|decoder|text|vision|out)_hidden_size|feature_size|hidden_sizes_dim", width),
        (
            r"max_position_embeddings|n_positions|max_seq|seq_length|max_(source|target)_positions",
            64 * (1 + size.positions // 64),
        ),
        (r"image_size|img_size", size.image),
        (r"num_(local_|routed_)?experts$|n_routed_experts", 4),
        (r"num_experts_per_tok|top_k|moe_k", 2),
        (r"drop(out|_path|_rate|_prob)?|.*_dropout(_rate|_prob)?|(attn|resid|embd|.*)_pdrop|layerdrop", 0.0),
    )


def lists(size: Size) -> dict[str, Callable[[int], int]]:
    return {
        **dict.fromkeys(("depths", "num_blocks", "depth"), lambda k: 1),
        **dict.fromkeys(("num_heads", "num_attention_heads"), lambda k: 2),
        **dict.fromkeys(("hidden_sizes", "embed_dim", "encoder_hidden_sizes"), lambda k: size.width * 2**k),
        "deepstack_visual_indexes": lambda k: k,
    }


class Case(NamedTuple):
    """A model, plain, and the arguments of its forward for so many samples."""

    model: nn.Module
    inputs: dict[str, Tensor]

    def as_type(self, dtype: torch.dtype) -> Case:
        inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in self.inputs.items()}
        return Case(self.model.to(dtype).eval(), inputs)


def shrunk(config: Any, size: Size) -> Any:
    """The config with small sizes, and those within it."""
    patterns, of_lists = sizes(size), lists(size)
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            shrunk(value, size)
            continue
        if isinstance(value, list | tuple) and name in of_lists:
            setattr(config, name, [of_lists[name](k) for k in range(len(value))])
        fitting = [number for pattern, number in patterns if re.search(pattern, name)]
        if fitting and isinstance(value, int | float) and not isinstance(value, bool) and value:
            try:
                setattr(config, name, min(value, fitting[0]))
            except Exception:  # a name that the class computes
                continue
    if isinstance(getattr(config, "layer_types", None), list):
        config.layer_types = config.layer_types[:2]
    config.use_cache, config._experts_implementation = False, "eager"  # another one knows no float64
    return config


def of_transformers(model_type: str, size: Size) -> Case:
    auto: Any = import_module("transformers.models.auto.modeling_auto")
    config = shrunk(import_module("transformers").CONFIG_MAPPING[model_type](), size)
    heads = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION")
    tables = [getattr(auto, f"MODEL_FOR_{head}_MAPPING") for head in heads] + [auto.MODEL_MAPPING]
    model_class = next((table[type(config)] for table in tables if type(config) in table), None)
    if model_class is None:
        raise LookupError("it is a part of another model")
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    model = model_class(config)
    return Case(model, _inputs(model, config, size))


def of_images_and_texts(model_type: str, size: Size) -> Case:
    """Texts with two images each; all images come in one argument, for models like Qwen-VL as grids of patches."""
    auto: Any = import_module("transformers.models.auto.modeling_auto")
    config = shrunk(import_module("transformers").CONFIG_MAPPING[model_type](), size)
    special = {"image": 1, "vision_start": 2, "vision_end": 3, "video": 4, "image_start": 2, "image_end": 3}
    ids = {f"{name}_token_{kind}": size.words - k for name, k in special.items() for kind in ("id", "index")}
    for each, name in product((config, getattr(config, "text_config", config)), ids):
        if hasattr(each, name):
            setattr(each, name, ids[name])
    _share_out(config, size)
    model = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config).eval()
    images = _images(model, config.vision_config, size)
    with torch.no_grad():
        seen = model.model.get_image_features(**images, return_dict=True)
    features = tree_leaves(getattr(seen, "pooler_output", seen))
    of_each = sum(feature.numel() for feature in features) // (features[0].shape[-1] * 2 * size.samples)
    words = torch.randint(3, size.words - 5, (size.samples, 8 + 2 * (of_each + 2)))
    for first in 2, 4 + of_each:
        words[:, first - 1], words[:, first : first + of_each] = ids["vision_start_token_id"], ids["image_token_id"]
    inputs = {"input_ids": words, "attention_mask": torch.ones_like(words), **images}
    if "mm_token_type_ids" in signature(type(model).forward).parameters:
        inputs["mm_token_type_ids"] = (words == ids["image_token_id"]).long()
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = torch.randint(3, size.words - 5, (size.samples, size.positions))
    return Case(model, inputs)


def _share_out(config: Any, size: Size) -> None:
    """Makes the parts of rotary positions, for time, height and width, as wide together as half a head."""
    for each in (config, getattr(config, "text_config", config)):
        if hasattr(each, "rope_parameters"):
            half = (getattr(each, "head_dim", None) or size.width // 2) // 2
            sections = [half - 2 * (half // 3), half // 3, half // 3]
            each.rope_parameters = {**(each.rope_parameters or {}), "mrope_section": sections}


def _images(model: Any, config: Any, size: Size) -> dict[str, Tensor]:
    """Two images for each text, as the model takes them."""
    count, channels = 2 * size.samples, getattr(config, "num_channels", getattr(config, "in_channels", 3))
    asked = signature(model.model.get_image_features).parameters
    if "image_grid_thw" in asked:
        numbers = channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
        return {"pixel_values": torch.randn(16 * count, numbers), "image_grid_thw": torch.tensor([[1, 4, 4]] * count)}
    pixels = getattr(config, "image_size", size.image)
    height, width = (pixels, pixels) if isinstance(pixels, int) else pixels
    images = {"pixel_values": torch.randn(count, channels, height, width)}
    if "image_sizes" in asked and asked["image_sizes"].default is Parameter.empty:
        images["image_sizes"] = torch.tensor([[height, width]] * count)
    return images


def _inputs(model: Any, config: Any, size: Size) -> dict[str, Tensor]:
    samples = size.samples
    texts = getattr(config, "text_config", config)
    known_words = min(size.words, getattr(texts, "vocab_size", None) or size.words)
    words = torch.randint(3, known_words, (samples, size.positions))
    image = getattr(getattr(config, "vision_config", config), "image_size", size.image)
    height, width = (image, image) if isinstance(image, int) else image
    channels = getattr(getattr(config, "vision_config", config), "num_channels", 3)
    known = {
        "input_ids": words,
        "pixel_values": torch.randn(samples, channels, height, width),
        "input_values": torch.randn(samples, size.sound),
        "input_features": torch.randn(samples, getattr(config, "num_mel_bins", 80), 128),
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


def of_images(build: Callable[..., nn.Module], native: int) -> Case:
    """A model of images, on the smallest ones that it takes."""
    for size in (64, 96, 128, native):
        for settings in ({"img_size": size}, {"image_size": size}, {}):
            try:
                model = build(**settings).eval()
                with torch.no_grad():
                    model(torch.randn(1, 3, size, size))
            except (TypeError, RuntimeError, AssertionError, ValueError):
                continue
            return Case(model, {"x": torch.randn(SMALL.samples, 3, size, size)})
    raise LookupError("it takes no images of these sizes")


def of_timm(name: str, size: Size) -> Case:
    timm = import_module("timm")
    native = timm.get_pretrained_cfg(name).input_size[-1]
    return of_images(lambda **settings: timm.create_model(name, num_classes=4, **settings), native)


def of_torchvision(name: str, size: Size) -> Case:
    models = import_module("torchvision.models")
    return of_images(lambda **settings: models.get_model(name, weights=None, num_classes=4, **settings), 224)


DIFFUSERS: dict[str, tuple[dict[str, Any], Callable[[int], dict[str, Tensor]]]] = {
    "UNet2DModel": (
        {"sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
        | {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        lambda samples: {"sample": torch.randn(samples, 3, 8, 8), "timestep": torch.arange(samples) * 7},
    ),
    "AutoencoderKL": (
        {"block_out_channels": (8,), "norm_num_groups": 4, "sample_size": 8},
        lambda samples: {"sample": torch.randn(samples, 3, 8, 8)},
    ),
    "UNet2DConditionModel": (
        {"sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
        | {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "cross_attention_dim": 12}
        | {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "attention_head_dim": 4},
        lambda samples: {
            "sample": torch.randn(samples, 4, 8, 8),
            "timestep": torch.arange(samples) * 7,
            "encoder_hidden_states": torch.randn(samples, 5, 12),
        },
    ),
    "DiTTransformer2DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 8}
        | {"norm_num_groups": 4, "num_embeds_ada_norm": 10},
        lambda samples: {
            "hidden_states": torch.randn(samples, 4, 8, 8),
            "timestep": torch.arange(samples) * 7,
            "class_labels": torch.arange(samples) + 1,
        },
    ),
    "SD3Transformer2DModel": (
        {"sample_size": 8, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2, "in_channels": 4}
        | {"joint_attention_dim": 12, "caption_projection_dim": 16, "pooled_projection_dim": 6, "out_channels": 4}
        | {"pos_embed_max_size": 8},
        lambda samples: {
            "hidden_states": torch.randn(samples, 4, 8, 8),
            "encoder_hidden_states": torch.randn(samples, 5, 12),
            "pooled_projections": torch.randn(samples, 6),
            "timestep": torch.arange(samples) * 7,
        },
    ),
}


def of_diffusers(name: str, size: Size) -> Case:
    settings, inputs = DIFFUSERS[name]
    return Case(getattr(import_module("diffusers"), name)(**settings), inputs(size.samples))


CHANNELS, PATCHES = {"in_channels": 1, "out_channels": 2}, {"hidden_size": 48, "mlp_dim": 96, "num_heads": 2}
MONAI: dict[str, dict[str, Any]] = {  # for images of 64 x 64, in one channel
    "AttentionUnet": {"channels": (8, 16), "strides": (2,), **CHANNELS},
    "DynUNet": {"kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2), **CHANNELS},
    "SegResNet": {"init_filters": 8, **CHANNELS},
    "SwinUNETR": {"feature_size": 24, **CHANNELS},
    "UNETR": {"img_size": 64, "feature_size": 8, **PATCHES, **CHANNELS},
    "UNet": {"channels": (8, 16, 32), "strides": (2, 2), "num_res_units": 1, **CHANNELS},
    "ViT": {"in_channels": 1, "img_size": 64, "patch_size": 16, "num_layers": 2, "classification": True, **PATCHES},
}


def of_monai(name: str, size: Size) -> Case:
    model = getattr(import_module("monai.networks.nets"), name)(spatial_dims=2, **MONAI[name])
    return Case(model, {next(iter(signature(model.forward).parameters)): torch.randn(size.samples, 1, 64, 64)})


ZOOS: dict[str, Callable[[str, Size], Case]] = {
    "transformers": of_transformers,
    "images and texts": of_images_and_texts,
    "timm": of_timm,
    "torchvision": of_torchvision,
    "diffusers": of_diffusers,
    "monai": of_monai,
}


def names_of(zoo: str) -> list[str]:
    """The models of a zoo that is installed."""
    if zoo == "images and texts":
        auto: Any = import_module("transformers.models.auto.modeling_auto")
        known: Any = import_module("transformers").CONFIG_MAPPING
        return sorted(name for name in known if known[name] in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    if find_spec(zoo) is None:
        return []
    if zoo == "transformers":
        return sorted(import_module("transformers").CONFIG_MAPPING)
    if zoo == "timm":
        timm = import_module("timm")
        entries = {name: timm.model_entrypoint(name) for name in timm.list_models()}
        return _smallest({name: entry.__module__ for name, entry in entries.items()}, entries)
    if zoo == "torchvision":
        models = import_module("torchvision.models")
        entries = {name: models.get_model_builder(name) for name in models.list_models(module=models)}
        return _smallest({name: entry.__module__ for name, entry in entries.items()}, entries)
    return list(DIFFUSERS if zoo == "diffusers" else MONAI)


def _smallest(groups: dict[str, str], entries: dict[str, Callable[[], nn.Module]]) -> list[str]:
    """The smallest model of each group."""
    found: dict[str, tuple[int, str]] = {}
    for name, group in groups.items():
        with torch.device("meta"):
            try:
                size = sum(each.numel() for each in entries[name]().parameters())
            except Exception:  # it cannot be built so
                continue
        found[group] = min(found.get(group, (size, name)), (size, name))
    return sorted(name for _, name in found.values())


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


def of_sample(x: Tensor, i: int, copies: int = 1) -> Tensor:
    """What an argument has of one sample, which may be several rows."""
    rows = x.unflatten(0, (SMALL.samples, -1))[[i] * copies]
    return rows.flatten(0, 1)


def judged(case: Case) -> dict[str, Any]:
    """What becomes of a model: `right`, `wrong`, `refused`, `fails`.

    It is `unfit` if no loop can run it, and `mixes` if its samples depend on each other, and `check` says where. In a
    batch of one, torch's own gradient of some batch norms in eval mode is wrong: so what differs there is compared
    with each sample given twice.
    """
    model, inputs = case.as_type(torch.float64)
    plain = deepcopy(model)  # which runs first, and may keep what cannot be copied
    batch = losses(plain(**inputs))
    if len(batch) != SMALL.samples:
        return {"verdict": "unfit", "why": "no result with one row a sample"}
    named = {name: parameter for name, parameter in plain.named_parameters() if parameter.requires_grad}

    def loop(copies: int) -> dict[str, Tensor] | None:
        """Parameter name -> the gradients of each sample alone, or beside copies of itself."""
        rows: dict[str, list[Tensor]] = {name: [] for name in named}
        for i in range(SMALL.samples):
            loss = losses(plain(**{name: of_sample(x, i, copies) for name, x in inputs.items()}))
            own = float(loss[:1].detach().sum())
            if len(loss) != copies or abs(own - float(batch[i].detach())) > 1e-6 * (1 + abs(own)):
                return None
            grads = torch.autograd.grad(loss[0], list(named.values()), allow_unused=True, materialize_grads=True)
            for name, grad in zip(named, grads, strict=True):
                rows[name].append(grad)
        return {name: torch.stack(grads) for name, grads in rows.items()}

    expected = loop(copies=1)
    if expected is None:
        return {"verdict": "unfit", "why": "a sample alone gives another result than in the batch"}
    size = float(torch.cat([rows.flatten() for rows in expected.values()]).norm())
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

    def worst_of(expected: dict[str, Tensor]) -> tuple[float, str]:
        """The largest relative error of a parameter's rows, and its name."""
        errors = [(0.0, "")]
        for name, parameter in model.named_parameters():
            if name in expected:
                rows, wanted = parameter.grad_sample, expected[name]
                rows = torch.zeros_like(wanted) if rows is None else rows.detach()
                errors.append((float((rows - wanted).norm()) / max(float(wanted.norm()), 1e-3 * size), name))
        return max(errors)

    worst, where = worst_of(expected)
    if not worst < TOLERANCE and (twice := loop(copies=2)) is not None:
        worst, where = min((worst, where), worst_of(twice))
    if not worst < TOLERANCE:
        report = str(enn.check(model, **inputs))
        mixes = re.search(r"1\. (.*the result for a sample depends on the other samples[^(]*)", report)
        why = mixes[1] if mixes else f"{where}: {worst:.1e}"
        return {"verdict": "mixes" if mixes else "wrong", "why": why}
    return {"verdict": "right", "escalated": slow, "parameters": sum(each.numel() for each in named.values())}


def timed(case: Case) -> dict[str, Any]:
    """The time of a step as a multiple of the plain one's, and that: processor time, the least of some turns."""
    plain, inputs = case.as_type(torch.float32)
    losses(plain(**inputs))
    model = enn.convert(deepcopy(plain)).per_sample()
    least, start = [float("inf")] * 2, time.perf_counter()
    for turn in range(8):
        for k, each in enumerate((plain, model)):
            each.zero_grad()
            before = time.process_time()
            losses(each(**inputs)).mean().backward()
            least[k] = min(least[k], time.process_time() - before)
        if turn > 2 and time.perf_counter() - start > SECONDS / 30:
            break
    return {"ratio": round(least[1] / least[0], 2), "plain ms": round(1000 * least[0], 1)}


def _run(zoo: str, name: str, answer: Any) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    try:
        case = ZOOS[zoo](name, SMALL)
        if sum(each.numel() for each in case.model.parameters()) > 30_000_000:
            answer.send({"verdict": "unfit", "why": "too large: the config was not shrunk"})
            return
        judgement = judged(case)
        answer.send(judgement)
        if judgement["verdict"] != "right":
            return
        has_sizes = zoo in ("transformers", "images and texts")
        try:
            judgement |= timed(ZOOS[zoo](name, LARGE if has_sizes else SMALL))
            answer.send(judgement)
        except enn.PerSampleError as error:
            answer.send({"verdict": "refused", "why": f"at a larger size: {error}"})
        except Exception:  # the larger config does not fit itself
            answer.send(judgement | timed(ZOOS[zoo](name, SMALL)))
        if has_sizes and judgement.get("ratio", 0) > SLOW:
            with suppress(Exception):  # likewise
                answer.send(judgement | {"wide": timed(ZOOS[zoo](name, WIDE))})
    except Exception as error:
        answer.send({"verdict": "unfit", "why": f"{type(error).__name__}: {error}"[:300]})


def run(zoo: str, name: str) -> dict[str, Any]:
    """The verdict on one model, in a process of its own."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(zoo, name, there))
    process.start()
    there.close()
    verdict = {"verdict": "unfit", "why": f"takes over {SECONDS} s"}
    try:
        while here.poll(SECONDS):  # the verdict, and once more with its time
            verdict = here.recv()
    except EOFError:
        if verdict.get("why", "").startswith("takes over"):
            verdict = {"verdict": "unfit", "why": "its process has died"}
    process.kill()
    process.join()
    if "why" in verdict:  # without the machine's folders
        verdict["why"] = re.sub(r"/[^\s']*/site-packages/", "", verdict["why"])
    return {"zoo": zoo, "name": name, **verdict}


REASONS = {
    "a folded batch": "folded batch|other rows",
    "vmap cannot follow": "vmap cannot follow",
    "a result without one row a sample": "for one sample its forward returns",
    "an index without a batch dimension": "index|no batch dimension",
    "another result on the batch": "on the whole batch its forward gives another result",
    "a shared result taken apart": "shared by all|has one row, but was computed",
    "used outside of its module": "outside of its module",
    "keeps tensors": "keeps tensors|writes what is of one sample",
}


def reason(why: str) -> str:
    return next((reason for reason, pattern in REASONS.items() if re.search(pattern, why)), "something else")


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """The counts, as Markdown."""
    lines = [
        "| zoo | run | right | of these in parts sample by sample | refused | fails | wrong | step, median | largest | "
        f"plain step over {LONG} ms | their median | largest |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for zoo in dict.fromkeys(row["zoo"] for row in rows):
        fit = [row for row in rows if row["zoo"] == zoo and row["verdict"] not in ("unfit", "mixes")]
        count = Counter(row["verdict"] for row in fit)
        ratios = [row["ratio"] for row in fit if "ratio" in row]
        of_long = [row["ratio"] for row in fit if "ratio" in row and row["plain ms"] > LONG]
        times = f"{_median_and_largest(ratios)} | {len(of_long)} | {_median_and_largest(of_long)}"
        escalated = sum(bool(row.get("escalated")) for row in fit)
        lines.append(
            f"| {zoo} | {len(fit)} | {count['right']} | {escalated} | {count['refused']} | {count['fails']} | "
            f"{count['wrong']} | {times} |"
        )
    refused = Counter(reason(row["why"]) for row in rows if row["verdict"] in ("refused", "fails"))
    mixing = sum(row["verdict"] == "mixes" for row in rows)
    lines += ["", *(f"- {why}: {number}" for why, number in refused.most_common())]
    lines += [f"- not counted, as its samples depend on each other, where `check` says: {mixing}"] if mixing else []
    return "\n".join(lines)


def _median_and_largest(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} | {max(ratios):.2f}" if ratios else "| "


def _time_and_ratio(row: dict[str, Any]) -> str:
    return f"{row['plain ms']:.0f} | {row['ratio']:.2f}" if "ratio" in row else " | "


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The counts, and a line for each model, as Markdown."""
    lines = [
        "# Other people's models",
        "",
        "Models with random weights, one for a model type, unedited: whose rows agree with a loop over the samples, "
        "at a small size and in float64, what is refused and why, and the time of a step, in float32 on one thread, "
        f"as a multiple of the plain one's. In models this small much of it is Python. So where it is above {SLOW}, "
        f"models of transformers are timed again, with layers {WIDE.width} wide and texts of {WIDE.positions} words. "
        "Measured by `make zoos`.",
        "",
        summary(rows),
        "",
        "<details><summary>Each model</summary>",
        "",
        "| model | rows | plain step, ms | step | plain, wide | step, wide | goes sample by sample, or why not |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["zoo"], row["name"])):
        if row["verdict"] != "unfit":
            said = row.get("why") or " ".join(each.partition(": runs sample by sample")[0] for each in row["escalated"])
            times = f"{_time_and_ratio(row)} | {_time_and_ratio(row.get('wide', {}))}"
            said = said.replace("|", "/").replace("\n", " ")
            said = f"`{said[:157]}…`" if len(said) > 160 else f"`{said}`" if said else ""
            lines.append(f"| {row['name']} | {row['verdict']} | {times} | {said} |")
    return "\n".join([*lines, "", "</details>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoos", description=__doc__)
    parser.add_argument("names", nargs="*", help="models, all by default; a part of the run only prints")
    parser.add_argument("--zoo", choices=ZOOS, action="append", help="these zoos only")
    parser.add_argument("--out", type=Path, default=None, help="another file for the results, model by model")
    options = parser.parse_args()
    rows = []
    for zoo in options.zoo or ZOOS:
        names = names_of(zoo)
        if names and find_spec(zoo) is not None:
            import_module(zoo)
        for name in options.names or names:
            row = run(zoo, name)
            rows.append(row)
            told = row.get("why") or f"ratio {row.get('ratio')}, {len(row['escalated'])} warnings"
            print(f"{zoo} {name}: {row['verdict']}; {told}", flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(summary(rows))
    if not (options.names or options.zoo):
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
