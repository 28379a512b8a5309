"""Figures and reports from run directories."""
