"""Images: from files, libraries or a user's own code to uint8 batches, and from there to what a model takes.

Owns everything between the config's `data`, `augment` and `eval` sections and a batch on the device. Refuses to know of
models, optimizers or reports. Called by `engine`; `prepare` is called by its tool.

    layout, lists, index    which images there are             transforms    crops, flips, colour
    decode, sources         one image and its target           samplers      which image comes when, on which rank
    digits, synthetic,      sets that need no folder           loader        batches, from worker processes
    torchvision_sets                                           device        uint8 to normalised floats
    datasets                the config's section, opened       prepare, ilsvrc    ImageNet's archives into folders

Imports nothing here, so that the tool, which needs no torch, starts at once.
"""
