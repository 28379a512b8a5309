"""Benchmarks: `finessl bench step | augment | data | predict | quick | tuning | scale`. Each prints ratios to a reference
that is measured in the same run, so that they are comparable between machines."""
