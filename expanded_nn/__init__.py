"""Per-sample gradients by plain autograd: a parallel `nn` whose layers take batch-expanded weights."""

from expanded_nn import functional as functional
from expanded_nn._errors import ConversionError as ConversionError
from expanded_nn._errors import PerSampleError as PerSampleError
from expanded_nn._module import Expanded as Expanded
from expanded_nn._registry import expands as expands
from expanded_nn.convert import convert as convert
from expanded_nn.convert import per_sample as per_sample
from expanded_nn.convert import revert as revert
from expanded_nn.factored import FactoredTensor as FactoredTensor
from expanded_nn.layers.linear import Bilinear as Bilinear
from expanded_nn.layers.linear import Linear as Linear

__all__ = [
    # the switch
    "convert",
    "revert",
    "per_sample",
    # layers
    "Bilinear",
    "Linear",
    # for layers of your own
    "Expanded",
    "expands",
    "functional",
    # what comes back
    "FactoredTensor",
    "ConversionError",
    "PerSampleError",
]
