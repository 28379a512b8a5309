"""The engine: a recipe goes in, a run directory comes out."""
