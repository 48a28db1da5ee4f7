"""Where did a language model read that? K-FAC influence on a small GPT, passage by passage and byte by byte.

A small GPT reads Python's standard library. The influence of a training passage on a new one is the inner product of
their gradients, one of them times the inverse of a Kronecker-factored second moment (Grosse et al., 2023).
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.progress import track
from torch import Tensor, nn

import expanded_nn as enn

LENGTH, NEW, TOP = 128, 40, 10  # bytes in a passage; new passages; training passages looked at for each
MODULES = ("argparse", "_pydecimal", "difflib", "html.entities", "pydoc", "statistics", "tarfile", "textwrap", "turtle")


class GPT(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0, batch_first=True, norm_first=True)
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.layers = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, texts: Tensor) -> Tensor:  # (B, T) -> (B, 256, T)
        places, mask = torch.arange(texts.shape[1]), nn.Transformer.generate_square_subsequent_mask(texts.shape[1])
        return self.head(self.layers(self.bytes(texts) + self.places(places[None]), mask=mask, is_causal=True)).mT


def passages() -> tuple[Tensor, Tensor]:  # texts (N, LENGTH), shuffled, and the module of each (N,)
    sources = [find_spec(name).loader.get_source(name).encode() for name in MODULES]
    texts = [torch.tensor(list(source)).unfold(0, LENGTH, LENGTH) for source in sources]
    modules = torch.arange(len(texts)).repeat_interleave(torch.tensor([len(text) for text in texts]))
    order = torch.randperm(len(modules))
    return torch.cat(texts)[order], modules[order]


def matrices(model: nn.Module, texts: Tensor) -> enn.PerSampleGrads:
    F.cross_entropy(model(texts[:, :-1]), texts[:, 1:], reduction="none").sum(1).mean().backward()
    grads = enn.per_sample_grads(model).items()
    return enn.PerSampleGrads({name: rows for name, rows in grads if "layers" in name and rows.dim() > 2})  # weights


def draw(shares: dict[str, float], new: Tensor, text: Tensor, pulls: Tensor, path: Path) -> None:
    figure = Figure(figsize=(11, 3), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 3])
    left.bar(shares.keys(), shares.values())
    left.set_ylabel(f"of the first {TOP}, those of the right module")
    right.imshow((pulls / pulls.abs().max()).view(4, -1).numpy(), cmap="PiYG", vmin=-1, vmax=1, aspect="auto")
    for i, byte in enumerate(text.tolist()):
        right.text(i % 32, i // 32, chr(byte) if chr(byte).isprintable() else "·", ha="center", va="center")
    right.set(title=" ".join("".join(map(chr, new.tolist())).split()), xticks=[], yticks=[])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images/influence.png"), help="the picture")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--passages", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    (texts, modules), model = passages(), enn.convert(GPT())
    (new, texts), (new_modules, modules) = (x[: NEW + args.passages].tensor_split([NEW]) for x in (texts, modules))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in track(range(args.steps), description="training"):
        optimizer.zero_grad()
        batch = texts[torch.randint(len(texts), (8,))]
        F.cross_entropy(model(batch[:, :-1]), batch[:, 1:]).backward()
        optimizer.step()
    model.per_sample(True, accumulate_grad=False, keep_factors=True)
    factors, batches = None, texts.split(16)
    for batch in track(batches, description="second moments"):
        factors = matrices(model, batch).kronecker(factors)
    plain = matrices(model, new)
    queries = {"inner products": plain, "K-FAC": plain.precondition(factors, damping=1e-4)}
    by_batch = (matrices(model, batch) for batch in track(batches, description="influences"))
    influences = torch.cat([torch.stack([grads.gram(query) for query in queries.values()]) for grads in by_batch], 1)
    shares = {"chance": float((modules[:, None] == new_modules).float().mean())}
    for name, best in zip(queries, influences.topk(TOP, dim=1).indices, strict=True):
        shares[name] = float((modules[best] == new_modules).float().mean())
    print("Of the right module:", ", ".join(f"{name} {share:.0%}" for name, share in shares.items()))
    passage, query = divmod(int(influences[1].argmax()), NEW)
    pulls = matrices(model, texts[passage : passage + 1]).gram(queries["K-FAC"], per_position=True)[0, :, query]
    draw(shares, new[query], texts[passage], F.pad(pulls, (1, 0)), args.out)
    print(f"Shares of the right module, and the bytes whose prediction pulls: {args.out}")


if __name__ == "__main__":
    main()
