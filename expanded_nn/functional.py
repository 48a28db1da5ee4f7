"""The operations, named as in `torch.nn.functional`, on weights with a leading batch dimension."""

from expanded_nn.layers.linear import bilinear as bilinear
from expanded_nn.layers.linear import linear as linear
