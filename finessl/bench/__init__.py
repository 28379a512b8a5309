"""Benchmarks as commands: `finessl bench step | augment | data | tuning | scale`. Each prints ratios against a reference
measured in the same run, so that they mean something on any machine."""
