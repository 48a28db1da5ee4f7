"""The operations, named as in `torch.nn.functional`, on weights with a leading batch dimension."""

from expanded_nn.layers.activation import prelu as prelu
from expanded_nn.layers.conv import (
    conv1d as conv1d,
    conv2d as conv2d,
    conv3d as conv3d,
    conv_transpose1d as conv_transpose1d,
    conv_transpose2d as conv_transpose2d,
    conv_transpose3d as conv_transpose3d,
)
from expanded_nn.layers.embedding import embedding as embedding, embedding_bag as embedding_bag
from expanded_nn.layers.linear import bilinear as bilinear, linear as linear
from expanded_nn.layers.norm import (
    batch_norm as batch_norm,
    group_norm as group_norm,
    instance_norm as instance_norm,
    layer_norm as layer_norm,
    rms_norm as rms_norm,
)
