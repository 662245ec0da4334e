"""Launchers, process groups, collectives, DDP and exit codes.

Independent of configs, models and data.
"""
