"""Benchmarks as commands: `finessl bench step | augment | data | tuning`. Each prints ratios against a plain reference
measured in the same run, so that they mean something on any machine."""
