"""The commands: arguments, printing and exit codes. `tools/` and the console scripts call them."""
