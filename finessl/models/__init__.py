"""Backbones, their tuning strategies, and the heads on top."""
