"""Models to train and to predict, each with the number of parameters that is published.

>>> model = create("resnet50")
>>> names()
['mlp', 'small_cnn', ...]
>>> inputs, targets = spec("bert_large").batch(8, seq=384)
"""

from labutils.models.registry import create, names, parameter_count, resolve, spec
from labutils.models.spec import ModelSpec, from_module

__all__ = ["ModelSpec", "create", "from_module", "names", "parameter_count", "resolve", "spec"]
