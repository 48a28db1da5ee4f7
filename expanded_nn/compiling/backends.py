"""Backends, which make a function of a graph: inductor, none (`"eager"`), or another that `torch.compile` knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from inspect import signature
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from expanded_nn._errors import complaint, first_line
from expanded_nn.common.meanwhile import meanwhile
from expanded_nn.compiling.memory import memory_of
from expanded_nn.core import cost

Backend = Callable[[fx.GraphModule, list[Tensor]], Callable[..., Any]]

# Random numbers are those of the eager step. Convolutions keep the layout that they have: put channels last, a step of
# a small CNN took 1.5 times the plain step's time on an AMD EPYC, and 0.9 times without that. Threads wait for each
# other at the end of each loop, so short ones run on one: a step of three layers of 16 took 0.7 times as long on both
# threads of an Intel Xeon, where inductor's own limit is 512 numbers for each thread; milliseconds less where another
# program had one of the cores.
OPTIONS = {"fallback_random": True, "layout_optimization": False, "cpp.min_chunk_size": 4096}


def backend_of(backend: str | Backend, options: dict[str, Any]) -> Backend:
    """The backend of a name; those of torch take seconds to import, so that waits for the first graph."""
    if backend == "eager":
        return _replayed
    return partial(_of_torch, backend, options)


def _replayed(graph: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
    """The graph itself; some operations give other strides than a trace says, as that of the mean squared error."""
    _loosen_views(graph)
    return graph


def draws_alike(backend: str | Backend, options: dict[str, Any]) -> bool:
    """Whether its graphs are sure to draw the random numbers of the eager step."""
    return backend == "eager" or (backend == "inductor" and options.get("fallback_random", True))


def _of_torch(
    backend: str | Backend, options: dict[str, Any], graph: fx.GraphModule, examples: list[Tensor]
) -> Callable[..., Any]:
    _loosen_views(graph)
    if not isinstance(backend, str):
        return backend(graph, examples)
    compiler: Any
    if backend == "inductor":
        unknown = sorted(options.keys() - import_module("torch._inductor").list_options())
        if unknown:
            problem, wanted = f"inductor has no options {unknown}", "those that torch._inductor.list_options() names"
            raise TypeError(str(complaint("enn.compile", problem, wanted, "Leave them out.")))
        _spell_out_small_products(graph)
        _take_biases_out(graph)
        compiler = partial(_compiled_in_order, OPTIONS | options)
    else:
        compiler = import_module("torch._dynamo").lookup_backend(backend)
    try:
        function: Callable[..., Any] = compiler(graph, examples)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise CompilerError(first_line(error)) from error
    return function


def _compiled_in_order(options: dict[str, Any], graph: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
    """The function that inductor makes; each read of a tensor stays behind the write that it waits for.

    In torch 2.13 a node whose loops are made like another's, to fuse the two, forgets the new name that a tensor has
    after a write in place. So what reads the gradients of a table came before these were added up by an index.
    """
    node_class = import_module("torch._inductor.scheduler").SchedulerNode
    recompute = node_class.recompute_size_and_body

    def recomputed(node: Any, *args: Any, **kwargs: Any) -> None:
        recompute(node, *args, **kwargs)
        node.set_read_writes(node.read_writes.rename(node.mutation_renames))

    with meanwhile(node_class, recompute_size_and_body=recomputed):
        compile_fx = import_module("torch._inductor.compile_fx").compile_fx
        decompositions = _decompositions(options, examples)
        function: Callable[..., Any] = compile_fx(
            graph, examples, config_patches=options, decompositions=decompositions
        )
    return function


def _decompositions(options: dict[str, Any], examples: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """What inductor takes apart to make loops of it: on several threads of a CPU no sums by an index.

    In these each thread adds to any place, so that each number takes an atomic operation. Measured on the clipped step
    of a mean of embeddings, two threads of an AMD EPYC (Zen 5): 0.5 without that; on one thread 1.1.
    """
    inductor = import_module("torch._inductor.decomposition")
    with inductor.config.patch(options):
        operations: dict[Any, Callable[..., Any]] = inductor.select_decomp_table()
    on_cpu = all(example.device.type == "cpu" for example in examples if isinstance(example, Tensor))
    by_index = torch.ops.aten.embedding_dense_backward.default
    if torch.get_num_threads() == 1 or not on_cpu or not _may_choose():
        return operations
    return {operation: function for operation, function in operations.items() if operation is not by_index}


def _may_choose() -> bool:
    """Whether inductor calls the kernel of what it is told not to take apart; in torch 2.10 that is an error."""
    return "get_decomp_fn" in signature(import_module("torch._inductor.lowering").make_fallback).parameters


def _loosen_views(graph: fx.GraphModule) -> None:
    """Makes `view` a `reshape`, which copies where it must: compilers give some results other strides than eager does.

    Where the memory that is viewed is written to, a copy would not see that, so such views stay.
    """
    memory, written = memory_of(graph.graph)
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.view.default and memory[node] not in written:
            node.target = torch.ops.aten.reshape.default
    graph.recompile()


_EXACT = torch.float32, torch.float64  # in others the sums would have another precision
_PRODUCTS = torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default


def _spell_out_small_products(graph: fx.GraphModule) -> None:
    """Makes sums of products of numbers of small matrix products: inductor puts these into the loops around them."""
    aten = torch.ops.aten
    for node in graph.graph.nodes:
        if node.target not in _PRODUCTS or node.kwargs or not _is_small_product(node):
            continue
        *offset, a, b = node.args  # (*, M, K), (*, K, N)
        with graph.graph.inserting_before(node):
            pairs = [graph.graph.call_function(aten.unsqueeze.default, pair) for pair in ((a, -1), (b, -3))]
            products = graph.graph.call_function(aten.mul.Tensor, tuple(pairs))  # (*, M, K, N)
        node.target, node.args = aten.sum.dim_IntList, (products, [-2])
        if offset:
            with graph.graph.inserting_after(node):
                total = graph.graph.call_function(aten.add.Tensor)
            total.meta = node.meta
            node.replace_all_uses_with(total)
            total.args = node, *offset
    graph.recompile()


def _take_biases_out(graph: fx.GraphModule) -> None:
    """Adds what is added to a product behind it: inductor puts that into the loops around the product.

    Else it is copied to where the product is added to it, in a pass over the memory. The product has a dimension more
    meanwhile, as inductor makes `addmm` of a product and what is added to it. Measured on clipped steps of a GPT and of
    a ViT on an Intel Xeon: 0.96 and 0.98.
    """
    aten = torch.ops.aten
    for node in graph.graph.nodes:
        if node.target is not aten.addmm.default or node.kwargs or not _is_exact_on_cpu(node):
            continue
        offset, *factors = node.args
        with graph.graph.inserting_before(node):
            product = graph.graph.call_function(aten.mm.default, tuple(factors))
            product = graph.graph.call_function(aten.unsqueeze.default, (product, 0))
            total = graph.graph.call_function(aten.add.Tensor, (product, offset))
        node.target, node.args = aten.squeeze.dim, (total, 0)
    graph.recompile()


def _is_exact_on_cpu(node: fx.Node) -> bool:
    """Whether a node is a tensor on a CPU whose sums have the same precision whatever computes them."""
    value = node.meta["val"]
    return value.device.type == "cpu" and value.dtype in _EXACT


def _is_small_product(node: fx.Node) -> bool:
    """Whether a node is a product of small matrices on a CPU, whose sizes and precision are known."""
    a = node.args[-2].meta["val"]  # type: ignore[union-attr]
    sizes = *node.meta["val"].shape, a.shape[-1]
    return _is_exact_on_cpu(node) and not any(map(cost.is_symbol, sizes)) and cost.product_is_small(prod(sizes))


class CompilerError(Exception):
    """A compiler of torch's has failed; the text says how."""
