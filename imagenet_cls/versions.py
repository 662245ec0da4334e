"""The versions of this package and of the libraries that weights may depend on."""

__version__ = "0.2.0"


def library_versions() -> dict[str, str]:
    """Versions by the names of the modules."""
    import numpy
    import PIL
    import safetensors
    import timm
    import torch
    import torchvision

    libraries = (torch, torchvision, timm, safetensors, numpy, PIL)
    versions = {module.__name__: module.__version__ for module in libraries}
    return {"imagenet_cls": __version__, **versions}
