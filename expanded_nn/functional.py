"""The operations, named as in `torch.nn.functional`, on weights with a leading batch dimension.

All but `embedding_bag` also take weights and biases without one, which all samples share: see `expanded_nn.expanded`.
"""

import torch.nn.functional as F

from expanded_nn.layers import (
    activation as _activation,
    conv as _conv,
    embedding as _embedding,
    linear as _linear,
    norm as _norm,
)
from expanded_nn.layers.embedding import embedding_bag as embedding_bag
from expanded_nn.modules.outside import (
    with_plain_weights as _with_plain_weights,
    with_shared_parameters as _with_shared_parameters,
)

batch_norm = _with_shared_parameters(_norm.batch_norm)
group_norm = _with_shared_parameters(_norm.group_norm)
instance_norm = _with_shared_parameters(_norm.instance_norm)
layer_norm = _with_shared_parameters(_norm.layer_norm)
rms_norm = _with_shared_parameters(_norm.rms_norm)
prelu = _with_shared_parameters(_activation.prelu)
linear = _with_plain_weights(_linear.linear, F.linear, 2)
bilinear = _with_plain_weights(_linear.bilinear, F.bilinear, 3)
embedding = _with_plain_weights(_embedding.embedding, F.embedding, 2)
conv1d = _with_plain_weights(_conv.conv1d, F.conv1d, 3)
conv2d = _with_plain_weights(_conv.conv2d, F.conv2d, 4)
conv3d = _with_plain_weights(_conv.conv3d, F.conv3d, 5)
conv_transpose1d = _with_plain_weights(_conv.conv_transpose1d, F.conv_transpose1d, 3)
conv_transpose2d = _with_plain_weights(_conv.conv_transpose2d, F.conv_transpose2d, 4)
conv_transpose3d = _with_plain_weights(_conv.conv_transpose3d, F.conv_transpose3d, 5)
