"""Per-sample gradients by plain autograd: a parallel `nn` whose layers take batch-expanded weights."""

from expanded_nn import functional as functional
from expanded_nn._errors import (
    ConversionError as ConversionError,
    PerSampleError as PerSampleError,
    PerSampleWarning as PerSampleWarning,
)
from expanded_nn._version import __version__ as __version__
from expanded_nn.check import Report as Report, check as check
from expanded_nn.clipping import clip_grad_sample_norms_ as clip_grad_sample_norms_
from expanded_nn.common.batch import shared_by_all as shared_by_all
from expanded_nn.compile import compile as compile
from expanded_nn.convert import convert as convert, per_sample as per_sample, revert as revert
from expanded_nn.core.kronecker import EigenFactors as EigenFactors, KroneckerFactors as KroneckerFactors
from expanded_nn.factored import FactoredTensor as FactoredTensor
from expanded_nn.grads import PerSampleGrads as PerSampleGrads, per_sample_grads as per_sample_grads
from expanded_nn.layers.activation import PReLU as PReLU
from expanded_nn.layers.attention import (
    MultiheadAttention as MultiheadAttention,
    Transformer as Transformer,
    TransformerDecoder as TransformerDecoder,
    TransformerDecoderLayer as TransformerDecoderLayer,
    TransformerEncoder as TransformerEncoder,
    TransformerEncoderLayer as TransformerEncoderLayer,
)
from expanded_nn.layers.conv import (
    Conv1d as Conv1d,
    Conv2d as Conv2d,
    Conv3d as Conv3d,
    ConvTranspose1d as ConvTranspose1d,
    ConvTranspose2d as ConvTranspose2d,
    ConvTranspose3d as ConvTranspose3d,
)
from expanded_nn.layers.embedding import Embedding as Embedding, EmbeddingBag as EmbeddingBag
from expanded_nn.layers.general.alone import alone as alone
from expanded_nn.layers.linear import Bilinear as Bilinear, Linear as Linear
from expanded_nn.layers.norm import (
    BatchNorm1d as BatchNorm1d,
    BatchNorm2d as BatchNorm2d,
    BatchNorm3d as BatchNorm3d,
    GroupNorm as GroupNorm,
    InstanceNorm1d as InstanceNorm1d,
    InstanceNorm2d as InstanceNorm2d,
    InstanceNorm3d as InstanceNorm3d,
    LayerNorm as LayerNorm,
    RMSNorm as RMSNorm,
)
from expanded_nn.layers.rnn import (
    GRU as GRU,
    LSTM as LSTM,
    RNN as RNN,
    GRUCell as GRUCell,
    LSTMCell as LSTMCell,
    RNNCell as RNNCell,
)
from expanded_nn.modules.base import Expanded as Expanded
from expanded_nn.modules.outside import expanded as expanded, one_pass as one_pass
from expanded_nn.modules.registry import expands as expands
from expanded_nn.projection import Projection as Projection
from expanded_nn.projection_store import ProjectionStore as ProjectionStore

__all__ = [
    # the switch
    "convert",
    "revert",
    "per_sample",
    "one_pass",
    "shared_by_all",
    "compile",
    # trust
    "check",
    "Report",
    # layers
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Bilinear",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Embedding",
    "EmbeddingBag",
    "GRU",
    "GRUCell",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LSTM",
    "LSTMCell",
    "LayerNorm",
    "Linear",
    "MultiheadAttention",
    "PReLU",
    "RMSNorm",
    "RNN",
    "RNNCell",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    # for layers of your own
    "Expanded",
    "alone",
    "expanded",
    "expands",
    "functional",
    # the rows
    "per_sample_grads",
    "clip_grad_sample_norms_",
    "PerSampleGrads",
    "KroneckerFactors",
    "EigenFactors",
    "Projection",
    "ProjectionStore",
    "FactoredTensor",
    # errors
    "ConversionError",
    "PerSampleError",
    "PerSampleWarning",
]
