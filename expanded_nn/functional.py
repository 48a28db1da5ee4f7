"""The operations, named as in `torch.nn.functional`, on weights with a leading batch dimension.

The maps also take a weight without one, and are torch's own then: see `expanded_nn.expanded`.
"""

import torch.nn.functional as F

from expanded_nn.layers import conv as _conv, embedding as _embedding, linear as _linear
from expanded_nn.layers.activation import prelu as prelu
from expanded_nn.layers.embedding import embedding_bag as embedding_bag
from expanded_nn.layers.norm import (
    batch_norm as batch_norm,
    group_norm as group_norm,
    instance_norm as instance_norm,
    layer_norm as layer_norm,
    rms_norm as rms_norm,
)
from expanded_nn.modules.outside import with_plain_weights as _with_plain_weights

linear = _with_plain_weights(_linear.linear, F.linear, 2)
bilinear = _with_plain_weights(_linear.bilinear, F.bilinear, 3)
embedding = _with_plain_weights(_embedding.embedding, F.embedding, 2)
conv1d = _with_plain_weights(_conv.conv1d, F.conv1d, 3)
conv2d = _with_plain_weights(_conv.conv2d, F.conv2d, 4)
conv3d = _with_plain_weights(_conv.conv3d, F.conv3d, 5)
conv_transpose1d = _with_plain_weights(_conv.conv_transpose1d, F.conv_transpose1d, 3)
conv_transpose2d = _with_plain_weights(_conv.conv_transpose2d, F.conv_transpose2d, 4)
conv_transpose3d = _with_plain_weights(_conv.conv_transpose3d, F.conv_transpose3d, 5)
