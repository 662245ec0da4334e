"""From YAML files and command-line words to checked, plain dataclasses. Never imports torch."""
