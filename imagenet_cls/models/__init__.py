"""Models: from a config's `model` section to a module on the CPU, weights of any origin into it, and its moving
average."""
