"""What a run is: every choice that decides its result, checked completely before anything starts. See schema.py."""

from finessl.recipe.files import parse_setting, read_toml, recipe_folder
from finessl.recipe.merge import merge, override
from finessl.recipe.schema import Recipe, TrainRecipe
from finessl.registry.options import Choice

__all__ = ["Choice", "Recipe", "TrainRecipe", "merge", "override", "parse_setting", "read_toml", "recipe_folder"]
