"""From run directories to figures."""
