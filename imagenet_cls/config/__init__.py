"""From YAML files and command line arguments to checked, plain dataclasses. Never imports torch."""
