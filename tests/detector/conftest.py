"""Detectors on the toy model, and the paper's formula as a loop."""

from __future__ import annotations

import torch
from torch import nn

from neuralmean import Detector

HELD_OUT = torch.rand(200, 3, 8, 8, generator=torch.Generator().manual_seed(7))


def reference_nmd(model, image):
    """The paper's Eq. 3 to 5 for one image, from stored activations, one number at a time."""
    kept = {}
    handles = [
        module.register_forward_pre_hook(lambda module, args, name=name: kept.update({name: args[0].detach().clone()}))
        for name, module in model.named_modules()
        if isinstance(module, nn.BatchNorm2d)
    ]
    model(image.unsqueeze(0))
    for handle in handles:
        handle.remove()
    vector = []
    for name, activation in kept.items():
        for c in range(activation.shape[1]):
            values = activation[0, c].flatten().tolist()
            vector.append(sum(values) / len(values) - model.get_submodule(name).running_mean[c].item())
    return vector


def fitted(model, images, **options):
    return Detector(model, **options).fit(images, held_out=HELD_OUT)
